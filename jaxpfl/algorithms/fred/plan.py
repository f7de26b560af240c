"""The plan of one private query of the clients' moments: its noise and its privacy cost.

The L2 sensitivities of count, sum and second moment, by which adding or removing one unit moves a
release, are 1, c and c^2 with c the clip norm: of one example, and of one client, who contributes
averages. Where the unit is the example, the noise is 2^-7 larger, for rounding (`privacy.plan`).

`FredPlan.as_printed` is Algorithm 1 of the paper literally, whose noise costs another epsilon than
the paper states.

Guarantee, for add-or-remove-one of the unit: releases with noise multipliers z_i (the standard
deviation of the noise divided by the sensitivity) compose to exactly one Gaussian mechanism with
mu = sqrt(sum 1 / z_i^2) (Dong, Roth, Su 2022, Corollary 3.3).
"""

import dataclasses
import math
from typing import Any, Self

from jaxpfl import checks
from jaxpfl.checked import Checked, Positive, PositiveFraction, PositiveInt
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.moments import ClientMoment, LabelledMoment, Moment
from jaxpfl.privacy import accounting, gaussian
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise, NoiseKind
from jaxpfl.privacy.guarantee import Guarantee, Unit, sensitivity
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.simulated import SIMULATED, LargerPopulation

_MOMENTS: tuple[Moment, ...] = ("count", "sum", "second")
# The shares of mu^2 of count, mean and covariance. With the small one, the error of the count is a
# few hundred units; a population that is declared public needs no count.
_SHARES, _SHARES_WITHOUT_COUNT = (0.004, 0.498, 0.498), (0.0, 0.5, 0.5)
# A label may have few units, of which the count must tell.
_SHARES_OF_LABELS = (0.04, 0.48, 0.48)


@dataclasses.dataclass(frozen=True)
class FredPlan(Checked):
    """The settings of one private query of the moments; every field is public.

    Plans are made by `calibrated` and `without_privacy`.

    Attributes:
      multipliers: noise multipliers of count, mean and covariance. The count's is infinite where
        it is not released: where `population` is declared public.
      clip_norm: c, the largest L2 norm of an embedding and of a centred embedding.
      unit: what the guarantee protects: a whole "client", or one "example" as in the paper.
      max_examples: k, the largest number of examples that a client uses where the unit is the
        client. Where the unit is the example all examples are used: with a cap, removing one
        example would let another one in, which doubles the sensitivity.
      population: the number of units, if it is declared public; else None.
      labels: of how many labels, a PUBLIC list, the moments are released, each for its own examples
        (`LabelledMoment`). A unit's contribution to all of them is one vector, whose sensitivities
        are those of one label: the labels share one release. How many units each has, a client
        counting by the share of its examples, is private and released.
      shares: of how many embeddings of the same examples the moments are released, and which share
        of mu^2 each has of mean and covariance. All are one contribution, whose sensitivities are
        those of one embedding (`JointMoment`); the unit is then the client.
      noise: "independent" or, where the unit is the client, "exact" (`privacy.exact_noise`).
      private: False only for plans made by `without_privacy`.
      stated: the epsilon that the paper states for a plan of `as_printed`; None for other plans.
      simulates: a larger population whose noise is scaled down to these units, see `simulated_by`;
        None for a plan whose guarantee is that of its own units.
    """

    multipliers: tuple[float, ...]
    delta: float
    clip_norm: Positive = 1.0
    unit: Unit = "client"
    max_examples: PositiveInt = 64
    population: PositiveInt | None = None
    labels: PositiveInt = 1
    shares: tuple[PositiveFraction, ...] = (1.0,)
    noise: NoiseKind = "independent"
    private: bool = True
    stated: float | None = None
    simulates: LargerPopulation | None = None

    def check_fields(self) -> None:
        if not 1e-6 <= self.clip_norm <= 1e6:
            raise InputError(f"clip_norm must lie in [1e-6, 1e6], found {self.clip_norm:g}")
        if not math.isclose(sum(self.shares), 1, abs_tol=1e-9):
            raise InputError(f"shares must sum to 1, found {list(self.shares)}")
        if self.labels > 1 and self.population is not None:
            raise InputError("population must be None with labels, whose counts are released")
        if not self.private:
            if any(self.multipliers):
                what = "multipliers must all be 0 in a plan without privacy, which has no noise"
                raise InputError(f"{what}; make such a plan by FredPlan.without_privacy")
            return
        names, declared = ("count", "mean", "covariance"), self.population is not None
        if declared and not math.isinf(self.multipliers[0]):
            actual = f"{self.multipliers[0]:g} with the declared population = {self.population}"
            raise InputError(f"the count's noise multiplier must be infinite, found {actual}")
        for name, multiplier in zip(names, self.multipliers, strict=True):
            if name != "count" or not declared:
                checks.positive(f"the noise multiplier of the {name}", multiplier)
        checks.open_fraction("delta", self.delta)
        if self.population is not None and self.delta >= 1 / self.population:
            most = f"1 / population = {1 / self.population:g}"
            raise InputError(f"delta must be below {most}, found {self.delta:g}")

    @classmethod
    def calibrated(
        cls,
        *,
        epsilon: float,
        delta: float,
        unit: Unit = "client",
        population: int | None = None,
        labels: int = 1,
        **settings: Any,
    ) -> Self:
        """Returns the plan with the least noise that is (epsilon, delta)-private.

        The exact analysis of the Gaussian mechanism gives mu (0.1527 for epsilon = 0.6 and delta =
        2e-6), and a second formula confirms it. Release i has the noise multiplier
        1 / (mu sqrt(share_i)); mean and covariance have equal shares of mu^2.

        Args:
          population: the number of units, where that is public. None: it is released with noise.
          settings: fields such as `clip_norm`, `max_examples` and `noise`.

        Raises:
          InputError: a value is out of range.
        """
        total = accounting.smallest_multiplier(
            lambda z: gaussian.on_everyone([z], delta, unit), epsilon
        )
        shares = _SHARES_OF_LABELS if labels > 1 else _SHARES
        shares = shares if population is None else _SHARES_WITHOUT_COUNT
        return cls(
            multipliers=tuple(total / math.sqrt(s) if s else math.inf for s in shares),
            delta=delta,
            unit=unit,
            population=population,
            labels=labels,
            **settings,
        )

    @classmethod
    def without_privacy(cls, **settings: Any) -> Self:
        """Returns the plan of the same query without noise: NOT private, and marked so."""
        return cls(multipliers=(0.0, 0.0, 0.0), delta=0.0, private=False, **settings)

    @classmethod
    def as_printed(
        cls, *, epsilon: float, delta: float, examples: int, clients: int, clip_norm: float = 1.0
    ) -> Self:
        """Returns Algorithm 1 of the paper as printed, which states (epsilon, delta).

        Each release has half of both (Proposition 3.1) and of these f = sqrt(2 log(1.25 / delta)) /
        epsilon. Every example of n has noise of deviation (2 c / n) f before the mean is taken,
        and every client's part of the covariance noise of (c^2 / n) f on its plain triangle.
        The noise of all examples, or clients, is one Gaussian. Both numbers are published, so that
        one example is replaced: it moves the sum by 2 c and the triangle by sqrt(2) c^2.
        `guarantee` is of that.
        """
        checks.positive_int("examples", examples)
        factor = math.sqrt(2 * math.log(2.5 / checks.open_fraction("delta", delta)))
        factor *= 2 / checks.positive("epsilon", epsilon) / sensitivity("example")
        return cls(
            multipliers=(math.inf, factor / math.sqrt(examples), factor * math.sqrt(clients / 2)),
            delta=delta,
            clip_norm=clip_norm,
            unit="example",
            population=examples,
            stated=epsilon,
        )

    def units(self, clients: Population) -> int:
        """The number of units in the data, PRIVATE unless it is declared public."""
        return len(clients) if self.unit == "client" else clients.num_examples

    def simulated_by(self, units: int, delta: float, larger: int) -> Self:
        """Returns the plan by which `units` clients have the noise of `larger` ones in their means.

        It is a SIMULATION, which all its statements say: see `privacy.simulated`. `delta` is of
        what these units have, below 1 / their number.
        """
        return dataclasses.replace(
            self,
            multipliers=tuple(z * (units / larger) for z in self.multipliers),
            delta=delta,
            simulates=LargerPopulation(larger, larger, self.delta),
        )

    @property
    def parts(self) -> list[Self]:
        """The plan of each embedding alone, whose noise is that of its part of the release."""
        count, *others = self.multipliers
        scaled = [(count, *(z / math.sqrt(share) for z in others)) for share in self.shares]
        return [dataclasses.replace(self, multipliers=part, shares=(1.0,)) for part in scaled]

    def client_fn(self, moment: Moment) -> ClientMoment | LabelledMoment:
        """What a client computes of one embedding."""
        average, isometric = self.unit == "client", self.stated is None
        of_one = ClientMoment(moment, self.clip_norm, average=average, isometric=isometric)
        return of_one if self.labels == 1 else LabelledMoment(of_one, self.labels)

    @property
    def sensitivities(self) -> tuple[float, ...]:
        """L2 sensitivities of count, sum and second moment, as the client functions state them."""
        bounds = (self.client_fn(moment).example_bound for moment in _MOMENTS)
        replaced = (1.0, 1.0, 1.0) if self.stated is None else (1.0, 2.0, math.sqrt(2))
        return tuple(bound * more for bound, more in zip(bounds, replaced, strict=True))

    @property
    def noise_stds(self) -> tuple[float, ...]:
        """Standard deviations of the noise on count, sum and second moment, as `plans` have it."""
        pairs = zip(self.multipliers, self.sensitivities, strict=True)
        return tuple(z * s * sensitivity(self.unit) for z, s in pairs)

    @property
    def mu(self) -> float:
        """Ratio of sensitivity to noise of the Gaussian mechanism that all releases compose to."""
        if not self.private:
            return math.inf
        return math.sqrt(math.fsum(z**-2 for z in self.multipliers))

    def guarantee(self) -> Guarantee:
        return gaussian.on_everyone(self.multipliers, self.delta, self.unit)

    def epsilon(self) -> float:
        return self.guarantee().epsilon()

    def statement(self) -> str:
        simulation = f"{self.simulation}; " if self.simulates else ""
        return simulation + self.claimed(self.guarantee().statement())

    def claimed(self, statement: str) -> str:
        """A statement of this plan's guarantee; of `as_printed` after what the paper states.

        The numbers of examples and of clients are then published, so that one is replaced.
        """
        if self.stated is None:
            return statement
        # Not in the words of a guarantee, for which a verifier would take it.
        stated = f"Algorithm 1 as printed states {self.stated:g} at delta {self.delta:g}"
        published = "the numbers of examples and of clients are published; REALISED: "
        replaced = statement.replace("add or remove one example", "replace one example")
        return f"{stated}; {published}{replaced}"

    @property
    def simulation(self) -> str:
        """Says that the plan simulates a larger population; "" if it does not."""
        if self.simulates is None:
            return ""
        noise = f"noise as if {self.simulates.population:,} {self.unit}s took part"
        return f"{SIMULATED}: {noise}; no guarantee for the data of these {self.unit}s"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments that are released, in order; no count where the population is public."""
        pairs = zip(_MOMENTS, self.multipliers, strict=True)
        return tuple(moment for moment, z in pairs if math.isfinite(z))

    def plans(self, units: int) -> tuple[Plan, ...]:
        """Returns one plan for each release in `moments`, of one round in which all take part.

        Their costs compose to the guarantee of this plan. `units` is the number of clients, or of
        examples where the example is the unit; `delta` must be below 1 / units.
        """
        return tuple(
            Plan(
                rounds=1,
                clip=Clip(sensitivity),
                noise=Noise(z, self.noise) if self.private else None,
                participation=Poisson(units, units),
                delta=self.delta,
                unit=self.unit,
                simulates=self.simulates,
            )
            for sensitivity, z in zip(self.sensitivities, self.multipliers, strict=True)
            if math.isfinite(z)
        )
