"""The plan: one object that fixes what a run costs.

Only a plan makes cohorts, noise scales and the events that the ledger is charged with, so that a
sampler cannot be combined with the wrong accountant. The participation decides the adjacency.

The unit is what is added, removed or replaced: a client with all its examples, or one example. Then
examples are sampled, whoever holds them, and the client function bounds each by itself
(`federated.BoundedByExample`). The noise multiplier z is the sum's noise standard deviation / its
sensitivity: S, and with unit "example" S (1 + 2^-7), of which 2^-7 S are for float32's rounding.
Where clients add the noise themselves, see `privacy.local_trust`.
"""

import dataclasses
import math
from typing import Any, Self

import dp_accounting
import numpy as np

from jaxpfl import checks
from jaxpfl.checked import Checked, NonNegative, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, events, local_trust, participation
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.clipping import AdaptiveClip, Clip
from jaxpfl.privacy.events import Adjacency
from jaxpfl.privacy.gaussian import Noise, NoiseKind
from jaxpfl.privacy.guarantee import Guarantee, Unit, sensitivity
from jaxpfl.privacy.participation import KINDS, Participation, Sampling
from jaxpfl.privacy.simulated import LargerPopulation, both_statements


@dataclasses.dataclass(frozen=True)
class Plan(Checked):
    """All settings of `rounds` private sums that decide their cost; every field is public.

    Attributes:
      rounds: T.
      clip: how contributions are clipped.
      noise: None for a plan without privacy, which `without_privacy` makes.
      participation: one of `privacy.participation`, with population and clients per round.
      delta: of the guarantee, below 1 / N; 0 without noise.
      unit: "client", or "example": then population and clients per round count examples.
      accountant: None = the tightest that supports the rounds; see `privacy.accounting`.
      allow_large_delta: a written reason to accept delta >= 1 / N.
      simulates: a larger population whose noise is scaled down to these clients, see
        `simulated_by`; None for a plan whose guarantee is that of its own clients.
      unchecked: runs client functions that cannot be checked (callbacks); only without noise.

    Raises:
      InputError: a field has a wrong type, is out of range or contradicts another field.
    """

    rounds: PositiveInt
    clip: Clip
    noise: Noise | None
    participation: Participation
    delta: NonNegative
    unit: Unit = "client"
    accountant: Accountant | None = None
    allow_large_delta: str | None = None
    simulates: LargerPopulation | None = None
    unchecked: bool = False

    def check_fields(self) -> None:
        checks.instance("clip", self.clip, Clip, "a Clip")
        hint = f"one of {', '.join(kind.__name__ for kind in KINDS.values())}"
        checks.instance("participation", self.participation, tuple(KINDS.values()), hint)
        if self.unit == "example" and self.sampling != "poisson":
            raise InputError(
                "unit = 'example' needs sampling = 'poisson', where each example takes part by "
                f"itself, found {self.sampling!r}"
            )
        constant = self.unit == "example" or self.participation.in_epochs
        if constant and self.clip.adaptive is not None:
            what = "unit = 'example'" if self.unit == "example" else f"sampling = {self.sampling!r}"
            raise InputError(f"{what} needs a constant clip norm: no adaptive_clip")
        if self.noise is None:
            if self.delta or self.simulates is not None:
                raise InputError("a plan without noise has delta = 0: use Plan.without_privacy")
            return
        if self.unchecked:
            raise InputError("unchecked = True needs a plan without noise: Plan.without_privacy")
        checks.instance("noise", self.noise, Noise, "a Noise")
        checks.open_fraction("delta", self.delta)
        reason = self.allow_large_delta
        if reason is not None and (not isinstance(reason, str) or not reason.strip()):
            raise InputError(f"allow_large_delta must be a written reason, found {reason!r}")
        if reason is None and self.delta >= 1 / self.population:
            raise InputError(
                f"delta = {self.delta:g} is not below 1 / population = {1 / self.population:g}, so "
                "that even publishing a client's data would satisfy it: choose a smaller delta"
            )
        if self.correlated and not self.participation.in_epochs:
            raise InputError(
                f"noise = {self.noise.kind!r} needs sampling = 'cyclic', 'min_separation' or "
                "'cyclic_poisson', where a client takes part at most once an epoch, found "
                f"{self.sampling!r}"
            )
        if self.noise.overlaps:
            object.__setattr__(self, "noise", self.noise.fitted(self.rounds, self.participation))
        elif self.correlated:
            from jaxpfl.privacy import correlated_noise

            correlated_noise.check_shift(self)
        if self.local:
            local_trust.require_support(self)
        if self.accountant is not None:
            accounting.require_support(events.counts(self.charge_event()), self.accountant)
        if self.clip.adaptive is not None:
            self.clip.adaptive.check_noise(self.noise_multiplier, self.clients_per_round)
        if self.simulates is not None:
            self.simulates.check(self.participation, self.clip.adaptive)
            # Checked as a plan of its own, too.
            self.scaled_to(self.simulates)

    @classmethod
    def calibrated(
        cls,
        *,
        epsilon: float,
        delta: float,
        rounds: int,
        clip: Clip,
        participation: Participation,
        noise: NoiseKind | Noise = "independent",
        unit: Unit = "client",
        accountant: Accountant | None = None,
        allow_large_delta: str | None = None,
        prior_releases: dp_accounting.DpEvent | None = None,
    ) -> Self:
        """Returns the plan with the smallest noise whose epsilon is at most `epsilon`.

        Args:
          epsilon: of this plan, or of its composition with `prior_releases`.
          noise: its kind, or a `Noise` whose multiplier does not count.
          prior_releases: other releases on the same clients, which must be Gaussians on everyone,
            such as a private Frechet distance. The plan's own `epsilon()` and `statement()` do not
            include them; the ledger states the cost of both.

        Raises:
          InputError: as `Plan`; or no noise multiplier reaches `epsilon`, the accountants disagree
            or `prior_releases` are of another kind.
        """
        target = checks.positive("epsilon", epsilon)
        checks.instance("clip", clip, Clip, "a Clip")
        like = noise if isinstance(noise, Noise) else Noise(1.0, noise)
        trial = cls(
            rounds=rounds,
            # An adaptive clip would check the noise multiplier, which is not known yet.
            clip=dataclasses.replace(clip, adaptive=None),
            noise=dataclasses.replace(like, multiplier=1.0),
            participation=participation,
            delta=delta,
            unit=unit,
            accountant=accountant,
            allow_large_delta=allow_large_delta,
        )
        prior = prior_releases or dp_accounting.NoOpDpEvent()
        if releases := events.counts(prior):
            for leaf in releases:
                if not isinstance(leaf, dp_accounting.GaussianDpEvent):
                    kind = type(leaf).__name__
                    raise InputError(f"prior releases must be Gaussians on everyone, found {kind}")
            # A cohort of fixed size and a Gaussian have no common adjacency.
            events.adjacency(dp_accounting.ComposedDpEvent([prior, trial.charge_event()]))
            before = dataclasses.replace(trial.guarantee(), event=prior).epsilon()
            if before >= target:
                raise InputError(
                    f"epsilon = {target:g} must cover the prior releases and this plan, but the "
                    f"prior releases alone cost {before:.4g}: give a larger epsilon"
                )

        def with_noise(z: float) -> Self:
            assert trial.noise is not None
            return dataclasses.replace(trial, noise=dataclasses.replace(trial.noise, multiplier=z))

        def composed_guarantee(z: float) -> Guarantee:
            alone = with_noise(z).guarantee()
            together = dp_accounting.ComposedDpEvent([prior, alone.event])
            return dataclasses.replace(alone, event=together)

        z = accounting.smallest_multiplier(composed_guarantee, target)
        return dataclasses.replace(with_noise(z), clip=clip)

    @classmethod
    def without_privacy(
        cls,
        *,
        rounds: int,
        participation: Participation,
        clip: Clip | None = None,
        unit: Unit = "client",
        unchecked: bool = False,
    ) -> Self:
        """Returns a plan with no noise and no guarantee; without a clip, its norm is 1e6."""
        return cls(rounds, clip or Clip(1e6), None, participation, 0.0, unit, unchecked=unchecked)

    def scaled_to(self, larger: LargerPopulation) -> Self:
        """Returns the plan of a larger population with the same noise of the mean."""
        if self.noise is None:
            raise InputError("a plan without noise cannot be scaled to a larger population")
        size = {n: getattr(larger, n) for n in ("population", "clients_per_round")}
        multiplier = self.noise.multiplier * larger.clients_per_round / self.clients_per_round
        return dataclasses.replace(
            self,
            participation=dataclasses.replace(self.participation, **size),
            noise=dataclasses.replace(self.noise, multiplier=multiplier),
            delta=larger.delta,
            simulates=None,
        )

    def simulated_by(self, participation: Participation, delta: float) -> Self:
        """Returns the plan by which fewer clients train with this plan's noise of the mean.

        It is a SIMULATION, which all its statements say: see `privacy.simulated`. `participation`
        and `delta`, of their own guarantee, are of the clients that there are.

        Raises:
          InputError: `participation` is not of fewer clients, or cannot simulate this plan's.
        """
        if self.noise is None or participation.sampling != self.sampling:
            own = f"{self.sampling!r}{'' if self.private else ' without noise'}"
            wanted = f"a plan with noise and sampling = {participation.sampling!r}"
            raise InputError(f"a simulation needs {wanted}, found {own}")
        size, here = self.clients_per_round, participation.clients_per_round
        z = self.noise.multiplier * here / size
        # Rounding must not make the epsilon that is stated for the larger population too small.
        while z * size / here < self.noise.multiplier:
            z = math.nextafter(z, math.inf)
        return dataclasses.replace(
            self,
            participation=participation,
            noise=dataclasses.replace(self.noise, multiplier=z),
            delta=delta,
            simulates=LargerPopulation(self.population, size, self.delta),
        )

    @property
    def simulation(self) -> str:
        """Says that the plan simulates a larger population; "" if it does not."""
        return "" if self.simulates is None else self.simulates.label(self.clients_per_round)

    @property
    def private(self) -> bool:
        return self.noise is not None

    @property
    def population(self) -> int:
        """N."""
        return self.participation.population

    @property
    def clients_per_round(self) -> int:
        """n."""
        return self.participation.clients_per_round

    @property
    def sampling(self) -> Sampling:
        """The participation's name in a config."""
        return self.participation.sampling

    @property
    def denominator(self) -> float:
        """The expected cohort size: divide a sum by this constant to get a mean."""
        return self.participation.denominator

    @property
    def clip_norm(self) -> float:
        """S."""
        return self.clip.norm

    @property
    def noise_multiplier(self) -> float:
        """z; 0 without privacy."""
        return 0.0 if self.noise is None else self.noise.multiplier

    @property
    def local(self) -> bool:
        """Whether each client adds noise to what it sends, see `privacy.local_trust`."""
        return self.noise is not None and self.noise.trust == "local"

    @property
    def adjacency(self) -> Adjacency:
        return "replace_one" if self.local else self.participation.adjacency

    @property
    def correlated(self) -> bool:
        return self.noise is not None and self.noise.correlated

    @property
    def exact(self) -> bool:
        """Whether noise is drawn and added in whole numbers."""
        return self.noise is not None and self.noise.exact

    @property
    def bands(self) -> int:
        """The bands of correlated noise: the rounds of an epoch, or all if they are fewer."""
        return min(self.participation.rounds_per_epoch, self.rounds)

    @property
    def indicator_noise_std(self) -> float:
        """Noise on the sum of (b_i - 1/2) in adaptive clipping, in clients; 0 without it."""
        if self.clip.adaptive is None or not self.private:
            return 0.0
        return self.clip.adaptive.indicator_noise_std(self.clients_per_round)

    def value_noise_std(self, clip_norm: float) -> float:
        """Returns the noise's standard deviation on the sum, given the round's clip norm.

        Under adaptive clipping the values get z_D instead of z: see `AdaptiveClip`.
        """
        z = self.noise_multiplier
        if self.private and self.clip.adaptive is not None:
            z = self.clip.adaptive.value_multiplier(z, self.clients_per_round)
        return z * sensitivity(self.unit) * clip_norm

    def check_round(self, round: int) -> None:
        """Raises `InputError` unless the round is in 1 .. rounds, which the epsilon covers."""
        if checks.non_negative_int("round", round) not in range(1, self.rounds + 1):
            raise InputError(f"round must lie in 1 .. {self.rounds}, the plan's, found {round}")

    def charge_number(self, round: int) -> int:
        """Returns the number, from 1, of the charge that covers a round; see `check_round`."""
        self.check_round(round)
        return self.participation.charge_number(round)

    def charge_event(self) -> dp_accounting.DpEvent:
        """Returns the event of one charge, which covers a round or, if cyclic, an epoch."""
        if self.noise is None:
            return dp_accounting.NonPrivateDpEvent()
        if self.local:
            # Of everyone, because nothing is amplified.
            return participation.FixedSize(1, 1).event(local_trust.client_multiplier(self))
        return self.participation.event(self.noise.multiplier)

    def released_again_event(self) -> dp_accounting.DpEvent:
        """Returns the event of a second release, as of a replayed round, on the SAME secret cohort.

        It is not amplified: see `participation.without_sampling`.
        """
        if self.noise is None or self.local:
            return self.charge_event()
        return self.participation.without_sampling(self.noise.multiplier)

    def event(self, rounds: int | None = None) -> dp_accounting.DpEvent:
        """Returns the event of the first `rounds` rounds (default: all)."""
        rounds = self.rounds if rounds is None else checks.non_negative_int("rounds", rounds)
        charges = self.participation.charge_number(rounds)
        return dp_accounting.SelfComposedDpEvent(self.charge_event(), charges)

    def guarantee(self, rounds: int | None = None) -> Guarantee:
        """Returns the guarantee of the first `rounds` rounds (default: all) at the plan's delta."""
        # A plan without noise is not private, even before its first round.
        event = self.event(rounds) if self.private else self.charge_event()
        charge = events.counts(self.charge_event())
        accountant = self.accountant or accounting.default_accountant(charge)
        return Guarantee(event, self.delta, self.unit, self.adjacency, accountant)

    def epsilon(self, rounds: int | None = None, accountant: Accountant | None = None) -> float:
        """Returns epsilon at the plan's delta after `rounds` rounds (default: all)."""
        guarantee = self.guarantee(rounds)
        if accountant is not None:
            guarantee = dataclasses.replace(guarantee, accountant=accountant)
        return guarantee.epsilon()

    def statement(self, rounds: int | None = None) -> str:
        """Returns the guarantee in one line, with unit, adjacency and accountant."""
        stated = self.guarantee(rounds).statement()
        stated += "; what client functions tell was not checked" if self.unchecked else ""
        stated = local_trust.statement(self, stated, rounds)
        if self.simulates is not None:
            larger = self.scaled_to(self.simulates).statement(rounds)
            stated = f"{self.simulation}; {both_statements(larger, stated)}"
        return stated

    def _repr_html_(self) -> str:
        from jaxpfl.printable import facts

        fields = {name: value for name, value in self.to_dict().items() if value is not False}
        return facts("Plan", {**fields, "privacy": self.statement()})

    def sample(self, seed: int, round: int) -> np.ndarray:
        """Returns a round's cohort: sorted client indices, int64; see `check_round`. PRIVATE."""
        self.check_round(round)
        return self.participation.sample(seed, round)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values for JSON, flat as in a config."""
        return {
            **dataclasses.asdict(self.participation),
            "sampling": self.sampling,
            "rounds": self.rounds,
            "clip_norm": self.clip_norm,
            "adaptive_clip": self.clip.adaptive and dataclasses.asdict(self.clip.adaptive),
            "noise_multiplier": self.noise_multiplier,
            "noise": "independent" if self.noise is None else self.noise.kind,
            **({"blt": dataclasses.asdict(blt)} if (blt := self.noise and self.noise.blt) else {}),
            "delta": self.delta,
            "accountant": self.accountant,
            "private": self.private,
            "allow_large_delta": self.allow_large_delta,
            "unit": self.unit,
            **({"simulates": dataclasses.asdict(self.simulates)} if self.simulates else {}),
            **({"unchecked": True} if self.unchecked else {}),
            **({"trust": "local"} if self.local else {}),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Returns the plan that `to_dict` wrote; raises `InputError` for other fields."""
        try:
            adaptive, simulates = fields["adaptive_clip"], fields.get("simulates")
            adaptive = AdaptiveClip(**adaptive) if adaptive else None
            blt = None
            if fields.get("blt"):
                from jaxpfl.privacy.strategies import BufferedToeplitz

                blt = BufferedToeplitz(**fields["blt"])
            trust = fields.get("trust", "central")
            noise = (fields["noise_multiplier"], fields["noise"], blt, trust)
            return cls(
                rounds=fields["rounds"],
                clip=Clip(fields["clip_norm"], adaptive),
                noise=Noise(*noise) if fields["private"] else None,
                participation=participation.of(
                    fields["sampling"],
                    fields["population"],
                    fields["clients_per_round"],
                    **{name: fields.get(name) for name in ("separation", "at_most")},
                ),
                delta=fields["delta"],
                unit=fields["unit"],
                accountant=fields["accountant"],
                allow_large_delta=fields["allow_large_delta"],
                simulates=LargerPopulation(**simulates) if simulates else None,
                unchecked=fields.get("unchecked", False),
            )
        except (LookupError, TypeError) as error:
            reason = "a plan has the fields that Plan.to_dict writes, found others"
            raise InputError(reason) from error
