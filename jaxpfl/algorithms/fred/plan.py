"""What one private query of moments does and costs.

| unit    | per_client | one unit moves count, sum, second moment by |
|---------|------------|---------------------------------------------|
| example | -          | 1, c, c^2                                   |
| client  | "mean"     | 1, c, c^2: a client gives its averages      |
| client  | "sum"      | k, k c, k c^2: at most k examples a client  |

Guarantee, for add-or-remove-one of the unit: releases of noise multipliers z_i (noise divided by
the movement above) are together exactly as private as one Gaussian of shift / noise
mu = sqrt(sum 1 / z_i^2) (Dong, Roth, Su 2022, Corollary 3.3).
"""

import dataclasses
import math
from typing import Any, Literal, Self

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.federated.moments import ClientMoment, Moment
from jaxpfl.privacy import gaussian
from jaxpfl.privacy.clip import Clip
from jaxpfl.privacy.events import Adjacency
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.guarantee import Guarantee, Unit
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan

Mode = Literal["exact", "paper"]
PerClient = Literal["mean", "sum"]

_MOMENTS: tuple[Moment, ...] = ("count", "sum", "second")


@dataclasses.dataclass(frozen=True)
class Split:
    """How mu^2 is shared out between the releases; the shares sum to 1.

    The default gives mean and covariance equal parts and the count as little as its error, a few
    hundred units, allows. A count of 0 is for a population that is declared public.
    """

    count: float = 0.004
    mean: float = 0.498
    covariance: float = 0.498

    def __post_init__(self) -> None:
        checks.non_negative("split.count", self.count)
        for name in ("mean", "covariance"):
            checks.positive(f"split.{name}", getattr(self, name))
        total = self.count + self.mean + self.covariance
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise InputError(f"split must sum to 1, found {total:g}")


@dataclasses.dataclass(frozen=True)
class FredPlan:
    """What one private query of the moments does and costs; every field is public.

    Made by `calibrated`, `paper` or `without_privacy`.

    Attributes:
      multipliers: noise / sensitivity of count, mean and covariance; the count's is infinite
        where `population` is declared public (nothing about it is released).
      delta: of the statement.
      clip_norm: c, of embeddings and of centred embeddings.
      unit: "client", or "example" (the paper's): what is added or removed.
      per_client: "mean" or "sum", see the table above; of no meaning for the unit "example".
      max_examples: k, a cap on the examples that a client uses where the unit is the client.
        Where it is the example all are used: a cap would put another example in a removed one's
        place and so double the sensitivity.
      population: the number of units, if it is declared public.
      mode: "exact", or "paper": Algorithm 1 as printed.
      private: False only through `without_privacy`.
    """

    multipliers: tuple[float, float, float]
    delta: float
    clip_norm: float = 1.0
    unit: Unit = "client"
    per_client: PerClient = "mean"
    max_examples: int = 64
    population: int | None = None
    mode: Mode = "exact"
    private: bool = True

    def __post_init__(self) -> None:
        if not 1e-6 <= checks.positive("clip_norm", self.clip_norm) <= 1e6:
            raise InputError(f"clip_norm must lie in [1e-6, 1e6], found {self.clip_norm:g}")
        checks.one_of("unit", self.unit, ("client", "example"))
        checks.one_of("per_client", self.per_client, ("mean", "sum"))
        checks.one_of("mode", self.mode, ("exact", "paper"))
        checks.positive_int("max_examples", self.max_examples)
        if self.population is not None:
            checks.positive_int("population", self.population)
        if not self.private:
            if any(self.multipliers):
                raise InputError("a plan without privacy has no noise: use without_privacy")
            return
        if math.isinf(self.multipliers[0]) != (self.population is not None):
            raise InputError(
                "the count's multiplier must be infinite exactly where population is declared"
            )
        checks.open_fraction("delta", self.delta)
        for name, multiplier in zip(("mean", "covariance"), self.multipliers[1:], strict=True):
            checks.positive(f"noise multiplier of the {name}", multiplier)
        if self.population is None:
            checks.positive("noise multiplier of the count", self.multipliers[0])
        elif self.delta >= 1 / self.population:
            raise InputError(
                f"delta = {self.delta:g} is not below 1 / population = {1 / self.population:g}"
            )

    @classmethod
    def calibrated(
        cls,
        *,
        epsilon: float,
        delta: float,
        clip_norm: float = 1.0,
        unit: Unit = "client",
        per_client: PerClient = "mean",
        max_examples: int = 64,
        population: int | None = None,
        split: Split | None = None,
    ) -> Self:
        """Returns the plan with the least noise that is (epsilon, delta)-private.

        The exact Gaussian gives mu (0.1527 for (0.6, 2e-6)), confirmed by a second formula; release
        i gets the multiplier 1 / (mu sqrt(share_i)).

        Args:
          population: the number of units, where that is public; else it is released with noise.
          split: shares of mu^2; default `Split()`, or half and half where `population` is given.

        Raises:
          InputError: a value out of range; the split gives a share to a count that is public, or
            none to one that is not.
        """
        if split is None:
            split = Split() if population is None else Split(0.0, 0.5, 0.5)
        if (split.count == 0) != (population is not None):
            raise InputError(
                "split.count must be 0 exactly where population is declared public, found "
                f"split.count = {split.count:g} and population = {population}"
            )
        total = gaussian.smallest_multiplier(
            lambda z: gaussian.on_everyone([z], delta, unit), epsilon
        )
        shares = (split.count, split.mean, split.covariance)
        return cls(
            multipliers=_three(total / math.sqrt(s) if s else math.inf for s in shares),
            delta=delta,
            clip_norm=clip_norm,
            unit=unit,
            per_client=per_client,
            max_examples=max_examples,
            population=population,
        )

    @classmethod
    def paper(
        cls,
        *,
        epsilon: float,
        delta: float,
        population: int,
        clients: int,
        clip_norm: float = 1.0,
    ) -> Self:
        """Returns Algorithm 1 as printed, for comparison; `epsilon()` is what it REALLY costs.

        It claims (epsilon, delta) for each of two releases, and so (2 epsilon, 2 delta). But the
        mean's noise is added to each of n examples and then averaged, so it is sqrt(n) too small;
        the covariance's is added to each client's share, so it is sqrt(clients) too large, and to
        the plain triangle. n is disclosed, so only replace-one makes sense of it: one example
        moves the sum by 2 c and the second moment by sqrt(2) c^2.

        Args:
          population: n, the number of examples; disclosed.
          clients: the number of clients; disclosed.
        """
        n = checks.positive_int("population", population)
        clients = checks.positive_int("clients", clients)
        factor = math.sqrt(2 * math.log(1.25 / checks.open_fraction("delta", delta)))
        factor /= checks.positive("epsilon", epsilon)
        # tau_1 = 2 c factor / n on each example; tau_2 = c^2 factor / n on each client's share.
        return cls(
            multipliers=(math.inf, 2 * factor / math.sqrt(n), factor * math.sqrt(clients)),
            delta=delta,
            clip_norm=clip_norm,
            unit="example",
            population=n,
            mode="paper",
        )

    @classmethod
    def without_privacy(
        cls,
        *,
        clip_norm: float = 1.0,
        unit: Unit = "client",
        per_client: PerClient = "mean",
        max_examples: int = 64,
    ) -> Self:
        """Returns the same query without noise: NOT private, and everything made says so."""
        return cls(
            multipliers=(0.0, 0.0, 0.0),
            delta=0.0,
            clip_norm=clip_norm,
            unit=unit,
            per_client=per_client,
            max_examples=max_examples,
            private=False,
        )

    def client_fn(self, moment: Moment) -> ClientMoment:
        """Returns what a client computes for one of the releases."""
        return ClientMoment(
            moment,
            self.clip_norm,
            average=self.unit == "client" and self.per_client == "mean",
            isometric=self.mode == "exact",
        )

    @property
    def sensitivities(self) -> tuple[float, float, float]:
        """By how much one unit moves count, sum and second moment, as the client functions say."""
        functions = [self.client_fn(moment) for moment in _MOMENTS]
        if self.unit == "example":
            return _three(function.example_bound for function in functions)
        return _three(function.client_bound(self.max_examples) for function in functions)

    @property
    def accounted_multipliers(self) -> tuple[float, float, float]:
        """Noise / the movement under the adjacency in use: replace-one in the mode "paper"."""
        count, mean, covariance = self.multipliers
        if self.mode == "paper":
            return (count, mean / 2, covariance / math.sqrt(2))
        return self.multipliers

    @property
    def mu(self) -> float:
        """Shift / noise of the one Gaussian that all releases together amount to."""
        if not self.private:
            return math.inf
        return math.sqrt(math.fsum(z**-2 for z in self.accounted_multipliers))

    def guarantee(self) -> Guarantee:
        """Returns what the whole query costs at `delta`.

        In the mode "paper" its multipliers are relative to replace-one, whose shift is at least
        that of add-or-remove-one: a ledger of the latter is charged too much, never too little.
        """
        adjacency: Adjacency = "add_or_remove_one" if self.mode == "exact" else "replace_one"
        return gaussian.on_everyone(self.accounted_multipliers, self.delta, self.unit, adjacency)

    def event(self) -> dp_accounting.DpEvent:
        """Returns the event of the whole query."""
        return self.guarantee().event

    def epsilon(self) -> float:
        """Returns what the query really costs at `delta` (exact)."""
        return self.guarantee().epsilon()

    def epsilons(self) -> dict[str, float]:
        """Returns the cost of each release alone at `delta`: "count", "mean", "covariance"."""
        return {
            name: gaussian.on_everyone([z], self.delta).epsilon()
            for name, z in zip(
                ("count", "mean", "covariance"), self.accounted_multipliers, strict=True
            )
            if math.isfinite(z)
        }

    def statement(self) -> str:
        """Returns the guarantee in one line."""
        realised = "" if self.mode == "exact" else "Algorithm 1 as printed, REALISED "
        return realised + self.guarantee().statement()

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values for JSON."""
        return dataclasses.asdict(self)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """What is released, in this order: no count where the population is declared."""
        return tuple(
            moment for moment, z in zip(_MOMENTS, self.multipliers, strict=True) if math.isfinite(z)
        )

    def plans(self, units: int) -> tuple[Plan, ...]:
        """Returns the plan of each release in `moments`: everyone takes part, once.

        What their rounds cost together is what this plan says.

        Args:
          units: the number of clients, or of examples where these are the unit.

        Raises:
          InputError: `delta` is not below 1 / units.
        """
        return tuple(
            self._everyone(sensitivity * (z / accounted if z else 1.0), accounted, units)
            for sensitivity, z, accounted in zip(
                self.sensitivities, self.multipliers, self.accounted_multipliers, strict=True
            )
            if math.isfinite(z)
        )

    def _everyone(self, movement: float, multiplier: float, units: int) -> Plan:
        """One release, of noise relative to what one unit moves under the adjacency in use."""
        return Plan(
            rounds=1,
            clip=Clip(movement),
            noise=Noise(multiplier) if self.private else None,
            participation=Poisson(units, units),
            delta=self.delta,
            unit=self.unit,
        )


def _three(values: Any) -> tuple[float, float, float]:
    count, mean, covariance = values
    return (count, mean, covariance)
