"""The plan: one object that fixes what a run costs, and the only maker of its random parts.

A plan couples sampling, clipping, mechanism, rounds, unit, adjacency and delta. It alone makes
the cohorts, the noise's scale and the events that the ledger is charged with, so that a sampler
cannot meet the wrong accountant.

| sampling | who takes part              | adjacency             | a client moves the sum by | accountant |
|----------|-----------------------------|-----------------------|---------------------------|------------|
| poisson  | each with q = n / N         | add or remove one     | S                         | PLD        |
| fixed    | exactly n, no replacement   | replace one           | 2 S                       | RDP        |

`noise_multiplier` is always z = (noise standard deviation on the sum) / S. Under replace-one the
sum moves by 2 S, so the event that is accounted for has multiplier z / 2; accounting a fixed-size
round as if it moved by S is a common error (SampledWithoutReplacement in dp-accounting takes the
multiplier relative to the shift).
"""

import dataclasses
import math
from typing import Any, Literal, Self

import dp_accounting
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, sampling
from jaxpfl.privacy.accounting import Accountant, Adjacency
from jaxpfl.privacy.clipping import Clipping

Sampling = Literal["poisson", "fixed"]

_IN_WORDS = {"add_or_remove_one": "add or remove one client", "replace_one": "replace one client"}


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """Adaptive quantile clipping (Andrew et al. 2021, Algorithm 1).

    Attributes:
      target_quantile: the share of clients whose update should be within the clip norm.
      learning_rate: of the geometric update.
      indicator_noise: sigma_b, the noise's standard deviation on the sum of (b_i - 1/2), in
        clients; None = 0.05 times the planned clients per round.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    indicator_noise: float | None = None

    def __post_init__(self):
        checks.open_fraction("target_quantile", self.target_quantile)
        checks.positive("adaptive learning_rate", self.learning_rate)
        if self.indicator_noise is not None:
            checks.positive("indicator_noise", self.indicator_noise)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run of `rounds` private sums does and costs; every field is public.

    Attributes:
      population: N, the number of clients, public.
      clients_per_round: n, planned; also the public denominator of means.
      rounds: T.
      clip_norm: S, the L2 bound of a contribution (the first round's, under adaptive clipping).
      noise_multiplier: z; the noise on the sum has standard deviation z S.
      delta: of the statement; below 1 / N.
      sampling: "poisson" or "fixed".
      clipping: "flat" or "per_layer".
      adaptive_clip: None for a constant clip norm.
      accountant: None = PLD for Poisson, RDP for fixed-size cohorts.
      private: False only through `without_privacy`.
      allow_large_delta: a written reason to accept delta >= 1 / N.

    Raises:
      InputError: a field is not of its kind, out of range, or contradicts another.
    """

    population: int
    clients_per_round: int
    rounds: int
    clip_norm: float
    noise_multiplier: float
    delta: float
    sampling: Sampling = "poisson"
    clipping: Clipping = "flat"
    adaptive_clip: AdaptiveClip | None = None
    accountant: Accountant | None = None
    private: bool = True
    allow_large_delta: str | None = None

    def __post_init__(self):
        checks.positive_int("population", self.population)
        checks.positive_int("clients_per_round", self.clients_per_round)
        checks.positive_int("rounds", self.rounds)
        checks.positive("clip_norm", self.clip_norm)
        checks.one_of("sampling", self.sampling, ("poisson", "fixed"))
        checks.one_of("clipping", self.clipping, ("flat", "per_layer"))
        if self.accountant is not None:
            checks.one_of("accountant", self.accountant, ("pld", "rdp"))
        if self.clients_per_round > self.population:
            raise InputError(
                f"clients_per_round = {self.clients_per_round} exceeds the population of "
                f"{self.population}"
            )
        if not self.private:
            if self.noise_multiplier != 0:
                raise InputError("a plan without privacy has no noise: use Plan.without_privacy")
            return
        checks.positive("noise_multiplier", self.noise_multiplier)
        checks.open_fraction("delta", self.delta)
        if self.delta >= 1 / self.population and not self.allow_large_delta:
            raise InputError(
                f"delta = {self.delta:g} is not below 1 / population = {1 / self.population:g}, so "
                "it would allow a client's data to be published: choose a smaller delta, or give "
                "the reason in allow_large_delta"
            )
        if self.sampling == "fixed" and self.accountant == "pld":
            raise InputError(
                "PLD cannot account for fixed-size cohorts: use accountant = 'rdp' or Poisson"
            )
        if self.adaptive_clip is not None and not 2 * self.indicator_noise_std > (
            self.noise_multiplier
        ):
            raise InputError(
                f"indicator_noise = {self.indicator_noise_std:g} is too small for noise_multiplier "
                f"= {self.noise_multiplier:g}: the quantile alone would cost more than the plan; it "
                "must exceed half the noise multiplier"
            )

    @classmethod
    def calibrated(
        cls,
        *,
        epsilon: float,
        delta: float,
        population: int,
        clients_per_round: int,
        rounds: int,
        clip_norm: float,
        sampling: Sampling = "poisson",
        clipping: Clipping = "flat",
        adaptive_clip: AdaptiveClip | None = None,
        accountant: Accountant | None = None,
        allow_large_delta: str | None = None,
    ) -> Self:
        """Returns the plan with the least noise whose epsilon is at most `epsilon`.

        The noise multiplier is found with the plan's accountant (to 1e-5, rounded up) and then
        confirmed by a second, independent one, which raises it where it finds more.
        """
        target = checks.positive("epsilon", epsilon)

        def plan(z: float) -> Self:
            return cls(
                population=population,
                clients_per_round=clients_per_round,
                rounds=rounds,
                clip_norm=clip_norm,
                noise_multiplier=z,
                delta=delta,
                sampling=sampling,
                clipping=clipping,
                accountant=accountant,
                allow_large_delta=allow_large_delta,
            )

        plan(1.0)  # a fault in another field is named before the search
        z = accounting.smallest_noise_multiplier(lambda z: plan(z).epsilon(), target)
        while not plan(z).confirmed_epsilon() <= target:
            z *= 1 + 1e-4
        found = dataclasses.replace(plan(z), adaptive_clip=adaptive_clip)
        if not (found.epsilon() <= target and found.confirmed_epsilon() <= target):
            raise InputError(f"calibration to epsilon = {target:g} failed at noise multiplier {z:g}")
        return found

    @classmethod
    def without_privacy(
        cls,
        *,
        population: int,
        clients_per_round: int,
        rounds: int,
        clip_norm: float = 1e6,
        sampling: Sampling = "poisson",
        clipping: Clipping = "flat",
    ) -> Self:
        """Returns a plan with no noise and no guarantee; everything it makes says so."""
        return cls(
            population=population,
            clients_per_round=clients_per_round,
            rounds=rounds,
            clip_norm=clip_norm,
            noise_multiplier=0.0,
            delta=0.0,
            sampling=sampling,
            clipping=clipping,
            private=False,
        )

    @property
    def unit(self) -> str:
        """Whose data is protected."""
        return "client"

    @property
    def adjacency(self) -> Adjacency:
        return "add_or_remove_one" if self.sampling == "poisson" else "replace_one"

    @property
    def sampling_rate(self) -> float:
        """q = n / N."""
        return self.clients_per_round / self.population

    @property
    def denominator(self) -> float:
        """The public constant that sums are divided by: the planned cohort size."""
        return float(self.clients_per_round)

    @property
    def chosen_accountant(self) -> Accountant:
        return self.accountant or ("pld" if self.sampling == "poisson" else "rdp")

    @property
    def indicator_noise_std(self) -> float:
        """Noise on the sum of (b_i - 1/2) in adaptive clipping, in clients; 0 without it."""
        if self.adaptive_clip is None or not self.private:
            return 0.0
        given = self.adaptive_clip.indicator_noise
        return 0.05 * self.clients_per_round if given is None else given

    def value_noise_std(self, clip_norm: float) -> float:
        """Returns the noise's standard deviation on the sum, given the round's clip norm.

        Under adaptive clipping the values get z_D = (z^-2 - (2 sigma_b)^-2)^(-1/2) instead of
        z, so that values and quantile together cost what z alone would (Andrew et al., Thm 1).
        """
        z = self.noise_multiplier
        if self.private and self.adaptive_clip is not None:
            z = (z**-2 - (2 * self.indicator_noise_std) ** -2) ** -0.5
        return z * clip_norm

    def round_event(self) -> dp_accounting.DpEvent:
        """Returns the event of one round, values and quantile together."""
        if not self.private:
            return dp_accounting.NonPrivateDpEvent()
        if self.sampling == "fixed":
            # The sum moves by 2 S when one client is replaced.
            return dp_accounting.SampledWithoutReplacementDpEvent(
                self.population,
                self.clients_per_round,
                dp_accounting.GaussianDpEvent(self.noise_multiplier / 2),
            )
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.clients_per_round == self.population:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampling_rate, gaussian)

    def event(self) -> dp_accounting.DpEvent:
        """Returns the event of all rounds."""
        return dp_accounting.SelfComposedDpEvent(self.round_event(), self.rounds)

    def epsilon(self, rounds: int | None = None, accountant: Accountant | None = None) -> float:
        """Returns epsilon at the plan's delta after `rounds` rounds (default: all)."""
        if not self.private:
            return math.inf
        rounds = self.rounds if rounds is None else checks.non_negative_int("rounds", rounds)
        if rounds == 0:
            return 0.0
        event = dp_accounting.SelfComposedDpEvent(self.round_event(), rounds)
        return accounting.epsilon(
            event, self.delta, accountant or self.chosen_accountant, self.adjacency
        )

    def confirmed_epsilon(self) -> float:
        """Returns the second accountant's epsilon of all rounds.

        PLD where the plan's accountant is RDP on Poisson cohorts; otherwise implementations of
        our own that share no code with dp-accounting (`accounting.second_epsilon`).
        """
        if not self.private:
            return math.inf
        if self.sampling == "fixed":
            return accounting.second_epsilon_fixed(
                self.noise_multiplier / 2,
                self.clients_per_round,
                self.population,
                self.rounds,
                self.delta,
            )
        if self.chosen_accountant == "rdp":
            return self.epsilon(accountant="pld")
        return accounting.second_epsilon(
            self.noise_multiplier, self.sampling_rate, self.rounds, self.delta
        )

    def epsilon_curve(self, rounds: list[int]) -> list[float]:
        """Returns epsilon after each of the given numbers of rounds."""
        return [self.epsilon(count) for count in rounds]

    def sample(self, seed: int, round: int) -> np.ndarray:
        """Returns the cohort of a round: sorted client indices, int64; PRIVATE."""
        if self.sampling == "poisson":
            return sampling.poisson(self.population, self.sampling_rate, seed, round)
        return sampling.fixed_size(self.population, self.clients_per_round, seed, round)

    def statement(self, rounds: int | None = None) -> str:
        """Returns the guarantee in one line, with unit, adjacency and accountant."""
        if not self.private:
            return "NOT PRIVATE: no noise, epsilon = infinity, unit = client"
        return (
            f"(epsilon = {self.epsilon(rounds):.4g}, delta = {self.delta:g}), unit = {self.unit}, "
            f"adjacency = {_IN_WORDS[self.adjacency]}, "
            f"accountant = {self.chosen_accountant.upper()}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Returns the plan that `to_dict` described."""
        adaptive = fields.get("adaptive_clip")
        return cls(**{**fields, "adaptive_clip": AdaptiveClip(**adaptive) if adaptive else None})
