"""The plan: one object that fixes what a run costs, and the only maker of its random parts.

A plan couples sampling, clipping, mechanism, rounds, unit, adjacency and delta. It alone makes
the cohorts, the noise's scale and the events that the ledger is charged with, so that a sampler
cannot meet the wrong accountant.

| sampling | who takes part            | adjacency         | the sum moves by | accountant |
|----------|---------------------------|-------------------|------------------|------------|
| poisson  | each with q = n / N       | add or remove one | S                | PLD        |
| fixed    | exactly n, no replacement | replace one       | 2 S              | RDP        |
| epochs   | each once in N / n rounds | add or remove one | S an epoch       | PLD        |

The unit is what is added, removed or replaced: a client with all that it holds, or, where everyone
takes part and the client function bounds each example by itself (`federated.BoundedByExample`), one
example.

`noise_multiplier` is always z = (noise standard deviation on the sum) / S. Under replace-one the
sum moves by 2 S, so the event that is accounted for has multiplier z / 2; accounting a fixed-size
round as if it moved by S is a common error (SampledWithoutReplacement in dp-accounting takes the
multiplier relative to the shift). In epochs of R = floor(N / n) rounds a client takes part once an
epoch, at a distance of R, and nothing is amplified: that is DP-FTRL's setting, and there the noise
may be correlated between rounds (`privacy.correlated_noise`), so that sums of releases, which are
what a server optimiser uses, carry less of it. An epoch then costs one Gaussian of multiplier z.
"""

import dataclasses
import math
from typing import Any, Literal, Self

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import accounting, confirmation, correlated_noise, sampling
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.besides import BesidesGaussians
from jaxpfl.privacy.clipping import Clipping
from jaxpfl.privacy.correlated_noise import NOISES, Noise
from jaxpfl.privacy.events import Adjacency
from jaxpfl.privacy.keys import RoundKeys, round_keys, term_keys

Sampling = Literal["poisson", "fixed", "epochs"]
Unit = Literal["client", "example"]

_IN_WORDS = {"add_or_remove_one": "add or remove one", "replace_one": "replace one"}


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
      clients_per_round: n, planned. In epochs R = floor(N / n) rounds share everyone, so N / R take
        part on average: n or more, and with n above N / 2 everyone in every round.
      rounds: T.
      clip_norm: S, the L2 bound of a contribution (the first round's, under adaptive clipping).
      noise_multiplier: z; the noise on the sum has standard deviation z S.
      delta: of the statement; below 1 / N.
      sampling: "poisson", "fixed" or "epochs".
      noise: "independent" in every round, or with sampling in epochs "tree" or "banded".
      clipping: "flat" or "per_layer".
      adaptive_clip: None for a constant clip norm.
      accountant: None = PLD for Poisson, RDP for fixed-size cohorts.
      private: False only through `without_privacy`.
      unit: "client", or "example": then everyone takes part, and `population` and
        `clients_per_round` count examples.
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
    unit: Unit = "client"
    noise: Noise = "independent"

    def __post_init__(self):
        for name in ("population", "clients_per_round", "rounds"):
            # Plain numbers, so that a plan from numpy values can be written as JSON.
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name)))
        for name in ("clip_norm", "noise_multiplier", "delta"):
            object.__setattr__(self, name, checks.non_negative(name, getattr(self, name)))
        if not 1e-12 <= checks.positive("clip_norm", self.clip_norm) <= 1e12:
            raise InputError(
                f"clip_norm must lie in [1e-12, 1e12], found {self.clip_norm:g}: the square of a "
                "norm outside that range does not fit float32"
            )
        checks.one_of("sampling", self.sampling, ("poisson", "fixed", "epochs"))
        checks.one_of("noise", self.noise, NOISES)
        if self.noise != "independent" and self.sampling != "epochs":
            raise InputError(
                f"noise = {self.noise!r} needs sampling = 'epochs', where a client takes part once "
                f"an epoch, found {self.sampling!r}"
            )
        checks.one_of("clipping", self.clipping, ("flat", "per_layer"))
        if self.accountant is not None:
            checks.one_of("accountant", self.accountant, ("pld", "rdp"))
        if self.clients_per_round > self.population:
            raise InputError(
                f"clients_per_round = {self.clients_per_round} exceeds the population of "
                f"{self.population}"
            )
        if not isinstance(self.private, bool):
            raise InputError(f"private must be True or False, found {self.private!r}")
        if self.adaptive_clip is not None and not isinstance(self.adaptive_clip, AdaptiveClip):
            raise InputError(f"adaptive_clip must be an AdaptiveClip, found {self.adaptive_clip!r}")
        self._check_unit()
        if not self.private:
            if self.noise_multiplier != 0:
                raise InputError("a plan without privacy has no noise: use Plan.without_privacy")
            return
        checks.positive("noise_multiplier", self.noise_multiplier)
        checks.open_fraction("delta", self.delta)
        reason = self.allow_large_delta
        if reason is not None and (not isinstance(reason, str) or not reason.strip()):
            raise InputError(f"allow_large_delta must be a written reason, found {reason!r}")
        if self.delta >= 1 / self.population and reason is None:
            raise InputError(
                f"delta = {self.delta:g} is not below 1 / population = {1 / self.population:g}, so "
                "it would allow a client's data to be published: choose a smaller delta, or give "
                "the reason in allow_large_delta"
            )
        if self.sampling == "fixed" and self.accountant == "pld":
            raise InputError(
                "PLD cannot account for fixed-size cohorts: use accountant = 'rdp' or Poisson"
            )
        if self.adaptive_clip is not None and self.clipping == "per_layer":
            raise InputError(
                "adaptive_clip follows a quantile of the whole update's norm, so it needs "
                "clipping = 'flat', found 'per_layer'"
            )
        if self.adaptive_clip is not None and self.sampling == "epochs":
            raise InputError("sampling = 'epochs' needs a constant clip norm: no adaptive_clip")
        if self.adaptive_clip is not None and not 2 * self.indicator_noise_std > (
            self.noise_multiplier
        ):
            raise InputError(
                f"indicator_noise = {self.indicator_noise_std:g} is too small for noise_multiplier "
                f"= {self.noise_multiplier:g}: the quantile alone would cost more than the plan; "
                "it must exceed half the noise multiplier"
            )

    def _check_unit(self) -> None:
        checks.one_of("unit", self.unit, ("client", "example"))
        if self.unit == "client":
            return
        if self.sampling != "poisson" or self.clients_per_round != self.population:
            raise InputError(
                "unit = 'example' needs everyone to take part: sampling = 'poisson' and "
                "clients_per_round = population, because clients are sampled and not examples"
            )
        if self.adaptive_clip is not None or self.clipping != "flat":
            raise InputError("unit = 'example' needs clipping = 'flat' and no adaptive_clip")

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
        noise: Noise = "independent",
        after: dp_accounting.DpEvent | None = None,
    ) -> Self:
        """Returns the plan with the least noise whose epsilon is at most `epsilon`.

        Args:
          after: what is released on the same clients besides this plan, Gaussians on everyone such
            as a private Frechet distance: then `epsilon` is that of everything together. The
            plan's own `epsilon()` and `statement()` remain those of the plan alone; the ledger
            says what both cost.

        The noise multiplier is found with the plan's accountant, rounded up to 5 digits, and then
        confirmed by a second, independent one (`confirmed_epsilon`), which may raise it by up to
        0.1 percent.

        Raises:
          InputError: as `Plan`; no noise multiplier reaches `epsilon`; the accountants disagree;
            `after` is of another kind.
        """
        target = checks.positive("epsilon", epsilon)
        before = BesidesGaussians.of(after)
        if before.mu and sampling == "fixed":
            raise InputError(
                "a plan after other releases needs sampling = 'poisson' or 'epochs', which share "
                "their adjacency, found 'fixed'"
            )
        if before.mu and before.epsilon(delta) >= target:
            raise InputError(
                f"epsilon = {target:g} is for this plan and what is released besides it, which "
                f"alone costs {before.epsilon(delta):.4g}"
            )
        trial = cls(
            population=population,
            clients_per_round=clients_per_round,
            rounds=rounds,
            clip_norm=clip_norm,
            noise_multiplier=1.0,
            delta=delta,
            sampling=sampling,
            clipping=clipping,
            accountant=accountant,
            allow_large_delta=allow_large_delta,
            noise=noise,
        )
        least = accounting.smallest_noise_multiplier(
            lambda z: before.and_then(dataclasses.replace(trial, noise_multiplier=z).event()),
            target,
            delta,
            trial.chosen_accountant,
            trial.adjacency,
        )
        for raised in (0.0, 1e-5, 1e-4, 1e-3):
            found = dataclasses.replace(trial, noise_multiplier=least * (1 + raised))
            if found._confirms(target, before):
                return dataclasses.replace(found, adaptive_clip=adaptive_clip)
        raise InputError(
            f"the accountants disagree on noise multiplier {least:g}: epsilon = "
            f"{found._epsilon(before):.6g} by {found.chosen_accountant.upper()}, "
            f"{found._confirmed_epsilon(before):.6g} by the second, target {target:g}"
        )

    def _confirms(self, target: float, before: BesidesGaussians) -> bool:
        """Whether both accountants stay within the target, and PLD within what RDP allows."""
        within = self._epsilon(before) <= target and self._confirmed_epsilon(before) <= target
        if self.sampling != "fixed":
            rdp = self._epsilon(before, "rdp")
            within = within and self._epsilon(before, "pld") <= rdp * (1 + 1e-3)
        return within

    def _epsilon(self, before: BesidesGaussians, accountant: Accountant | None = None) -> float:
        """Epsilon of all rounds and of what is released besides."""
        event = before.and_then(self.event())
        chosen = accountant or self.chosen_accountant
        return accounting.epsilon(event, self.delta, chosen, self.adjacency)

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
        noise: Noise = "independent",
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
            noise=noise,
        )

    @property
    def adjacency(self) -> Adjacency:
        return "replace_one" if self.sampling == "fixed" else "add_or_remove_one"

    @property
    def sampling_rate(self) -> float:
        """q = n / N."""
        return self.clients_per_round / self.population

    @property
    def denominator(self) -> float:
        """The public constant that sums are divided by: the expected cohort size, n or N / R."""
        if self.sampling == "epochs":
            return self.population / self.rounds_per_epoch
        return float(self.clients_per_round)

    @property
    def chosen_accountant(self) -> Accountant:
        return self.accountant or ("rdp" if self.sampling == "fixed" else "pld")

    @property
    def rounds_per_epoch(self) -> int:
        """R = floor(N / n): with sampling in epochs, a client takes part in one of so many."""
        return self.population // self.clients_per_round

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

    def round_event(self, round: int = 1) -> dp_accounting.DpEvent:
        """Returns the event of round 1, 2, ...: values and quantile together.

        In epochs, what its first round is charged is the whole epoch's, and the others nothing.

        Raises:
          InputError: a round of epochs that the plan does not have.
        """
        self._check_round(round)
        first = (round - 1) % self.rounds_per_epoch == 0
        if self.sampling == "epochs" and self.private and not first:
            return dp_accounting.NoOpDpEvent()
        return self._charged_once()

    def _check_round(self, round: int) -> None:
        """In epochs, what a round costs and who takes part depend on its number."""
        checks.non_negative_int("round", round)
        if self.sampling == "epochs" and not 1 <= round <= self.rounds:
            raise InputError(f"round must lie in 1 .. {self.rounds}, the plan's, found {round}")

    def released_again_event(self) -> dp_accounting.DpEvent:
        """Returns the event of a round that was replayed to another output: a second release."""
        return self._charged_once()

    def _charged_once(self) -> dp_accounting.DpEvent:
        """The event of a round, or of an epoch."""
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
        if self.sampling == "epochs" or self.clients_per_round == self.population:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampling_rate, gaussian)

    def event(self, rounds: int | None = None) -> dp_accounting.DpEvent:
        """Returns the event of the first `rounds` rounds (default: all)."""
        rounds = self.rounds if rounds is None else checks.non_negative_int("rounds", rounds)
        charged = -(-rounds // self.rounds_per_epoch) if self.sampling == "epochs" else rounds
        return dp_accounting.SelfComposedDpEvent(self._charged_once(), charged)

    def epsilon(self, rounds: int | None = None, accountant: Accountant | None = None) -> float:
        """Returns epsilon at the plan's delta after `rounds` rounds (default: all)."""
        if not self.private:
            return math.inf
        if rounds == 0:
            return 0.0
        return accounting.epsilon(
            self.event(rounds), self.delta, accountant or self.chosen_accountant, self.adjacency
        )

    def confirmed_epsilon(self) -> float:
        """Returns the second accountant's epsilon of all rounds.

        PLD where the plan's accountant is RDP on Poisson cohorts; otherwise an implementation of
        our own that shares no code with dp-accounting (see `privacy.confirmation`).
        """
        return self._confirmed_epsilon(BesidesGaussians(0.0))

    def _confirmed_epsilon(self, before: BesidesGaussians) -> float:
        if not self.private:
            return math.inf
        if self.sampling == "fixed":
            return confirmation.fixed_size_epsilon(
                self.noise_multiplier / 2,
                self.clients_per_round,
                self.population,
                self.rounds,
                self.delta,
            )
        if self.chosen_accountant == "rdp":
            return self._epsilon(before, "pld")
        if self.sampling == "epochs":
            epochs = -(-self.rounds // self.rounds_per_epoch)
            mu = math.hypot(before.mu, epochs**0.5 / self.noise_multiplier)
            return confirmation.gaussian_epsilon(mu, self.delta)
        return confirmation.poisson_epsilon(
            self.noise_multiplier,
            self.sampling_rate,
            self.rounds,
            self.delta,
            reach=self._epsilon(before, "rdp"),
            gaussian_mu=before.mu,
        )

    def epsilon_curve(self, rounds: list[int]) -> list[float]:
        """Returns epsilon after each of the given numbers of rounds."""
        return [self.epsilon(count) for count in rounds]

    def sample(self, seed: int, round: int) -> np.ndarray:
        """Returns the cohort of a round: sorted client indices, int64; PRIVATE.

        Raises:
          InputError: a round of epochs that the plan does not have.
        """
        self._check_round(round)
        if self.sampling == "poisson":
            return sampling.poisson(self.population, self.sampling_rate, seed, round)
        if self.sampling == "epochs":
            return sampling.in_epochs(self.population, self.rounds_per_epoch, seed, round)
        return sampling.fixed_size(self.population, self.clients_per_round, seed, round)

    def keys(self, training_root: jax.Array, noise_root: jax.Array, round: int) -> RoundKeys:
        """Returns the keys of round 1, 2, ..., and the terms of its noise if that is correlated."""
        self._check_round(round)
        found = round_keys(training_root, noise_root, round)
        if self.noise == "independent" or not self.private:
            return found
        made = correlated_noise.terms(self.noise, round, self.rounds_per_epoch)
        # As many in every round, so that one program serves all; what is added has weight zero.
        spare = correlated_noise.most_terms(self.noise, self.rounds, self.rounds_per_epoch)
        spare -= len(made.weights)
        addresses = np.pad(made.addresses, ((0, spare), (0, 0)))
        weights = np.pad(made.weights, (0, spare)).astype(np.float32)
        terms = term_keys(noise_root, addresses), jnp.asarray(weights)
        return found._replace(terms=terms, made_for=self.noise_name)

    @property
    def noise_name(self) -> str:
        """What the keys of a round are made for; the door compares it with its plan's."""
        if self.noise == "independent" or not self.private:
            return "independent"
        return f"{self.noise}, {self.rounds_per_epoch} rounds an epoch, {self.rounds} rounds"

    def statement(self, rounds: int | None = None) -> str:
        """Returns the guarantee in one line, with unit, adjacency and accountant."""
        if not self.private:
            return f"NOT PRIVATE: no noise, epsilon = infinity, unit = {self.unit}"
        return (
            f"(epsilon = {accounting.rounded_up(self.epsilon(rounds))}, delta = {self.delta:g}), "
            f"unit = {self.unit}, adjacency = {_IN_WORDS[self.adjacency]} {self.unit}, "
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
