"""The participants of a round, and the cost of that round's Gaussian.

|               | who takes part              | adjacency         | the sum moves by |
|---------------|-----------------------------|-------------------|------------------|
| Poisson       | each with q = n / N         | add or remove one | S                |
| FixedSize     | exactly n, no replacement   | replace one       | 2 S              |
| Cyclic        | each once in N / n rounds   | add or remove one | S an epoch       |
| MinSeparation | n, each once in b rounds    | zero out one      | S an epoch       |
| CyclicPoisson | each once in b rounds or    | add or remove one | S an epoch       |
|               | not, with b n / N           |                   |                  |
| Truncated-    | as Poisson, at most B       | zero out one      | S, or 2 S where  |
| Poisson       |                             |                   | B is exceeded    |

`multiplier` is always z = (noise standard deviation on the sum) / S. Under replace-one the sum
moves by 2 S, so that the event has multiplier z / 2. It is a common error to account for a
fixed-size round as if the sum moved by S, because dp-accounting's SampledWithoutReplacement takes
the multiplier relative to the shift.

A cohort is a function of (seed, round) alone. Amplification by sampling requires that the adversary
does not know the seed, and so who took part. With cyclic participation nothing is amplified, but
the seed is still secret: clients are addressed by index, so that removing one would visibly move
those after it.
"""

import dataclasses
import functools
import hashlib
from typing import Any, ClassVar, Literal, get_args

import dp_accounting
import numpy as np

from jaxpfl import checks
from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.privacy.events import Adjacency, ZeroOut

Sampling = Literal[
    "poisson", "fixed", "cyclic", "min_separation", "cyclic_poisson", "truncated_poisson"
]


@dataclasses.dataclass(frozen=True)
class _OfClients(Checked):
    """The population N and the planned clients per round n: the fields of all kinds."""

    sampling: ClassVar[Sampling]
    adjacency: ClassVar[Adjacency] = "add_or_remove_one"
    # Whether the rounds of an epoch share a charge, and all rounds one secret draw.
    in_epochs: ClassVar[bool] = False

    population: PositiveInt
    clients_per_round: PositiveInt

    def check_fields(self) -> None:
        if self.clients_per_round > self.population:
            raise InputError(
                f"clients_per_round = {self.clients_per_round} exceeds the population of "
                f"{self.population}"
            )

    @property
    def sampling_rate(self) -> float:
        """q = n / N."""
        return self.clients_per_round / self.population

    @property
    def rounds_per_epoch(self) -> int:
        """R = floor(N / n): the length of a cycle, in which each client takes part once."""
        return self.population // self.clients_per_round

    @property
    def denominator(self) -> float:
        """The expected cohort size, a public constant: divide a sum by it to get a mean."""
        return float(self.clients_per_round)

    def charge_number(self, round: int) -> int:
        """Returns the number, from 1, of the charge that covers round 1, 2, ...: of its epoch."""
        return -(-round // self.rounds_per_epoch) if self.in_epochs else round

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one charge, which covers a round, or an epoch."""
        gaussian, rate = dp_accounting.GaussianDpEvent(multiplier), self.sampling_rate
        return gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)

    def without_sampling(self, multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of another release on the same cohort as an earlier one.

        It is not amplified, because the first release reveals something about the cohort: it is one
        Gaussian of multiplier z, or z / 2 under replace-one. A third release costs as much again.

        Proof. Fix the rest of the cohort and, in a cohort of fixed size, the client that replaces
        the one in question: both are drawn alike for neighbours, and divergences are jointly
        convex. The sum is then one of few values, no further apart than one client moves it. Given
        the first release, the second is a mixture of Gaussians around them, whose proportions may
        depend on the data; by joint convexity, its divergence between neighbours is at most that of
        two Gaussians so far apart. That pair dominates it whatever the first release was, and
        dominating pairs compose adaptively (Zhu, Dong, Wang 2022, "Optimal accounting of
        differential privacy via characteristic function", Theorem 10).
        """
        return dp_accounting.GaussianDpEvent(multiplier)


class Poisson(_OfClients):
    """Each of the N clients takes part with probability n / N, independently.

    Attributes:
      population: N, public.
      clients_per_round: n, the expected number; N for everyone.
    """

    sampling = "poisson"

    def sample(self, seed: int, round: int) -> np.ndarray:
        """Returns the sorted indices (int64) of a round's cohort; PRIVATE."""
        draws = _generator(seed, "poisson cohort", round).random(self.population)
        return np.flatnonzero(draws < self.sampling_rate)


class FixedSize(_OfClients):
    """Exactly n = `clients_per_round` of N = `population` clients take part (N is public)."""

    sampling = "fixed"
    adjacency = "replace_one"

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return self._drawn(self.clients_per_round, multiplier)

    def without_sampling(self, multiplier: float) -> dp_accounting.DpEvent:
        # To draw all N is not to sample; a plain Gaussian would not count as replace-one.
        return self._drawn(self.population, multiplier)

    def _drawn(self, clients: int, multiplier: float) -> dp_accounting.DpEvent:
        # The sum moves by 2 S when one client is replaced.
        gaussian = dp_accounting.GaussianDpEvent(multiplier / 2)
        return dp_accounting.SampledWithoutReplacementDpEvent(self.population, clients, gaussian)

    def sample(self, seed: int, round: int) -> np.ndarray:
        drawn = _generator(seed, "fixed-size cohort", round).choice(
            self.population, self.clients_per_round, replace=False, shuffle=False
        )
        return np.sort(drawn.astype(np.int64))


class Cyclic(_OfClients):
    """Each client takes part in one of an epoch's R = floor(N / n) rounds, always the same one.

    N = `population` is public. On average N / R clients take part, which is `clients_per_round` = n
    or more; if n > N / 2, everyone takes part in every round. It is the setting of DP-FTRL, where
    the noise may be correlated between rounds (`privacy.correlated_noise`). Nothing is amplified.
    """

    sampling = "cyclic"
    in_epochs = True

    @property
    def denominator(self) -> float:
        """N / R, a public constant: divide a sum by it to get a mean."""
        return self.population / self.rounds_per_epoch

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(multiplier)

    def sample(self, seed: int, round: int) -> np.ndarray:
        cycle = self.rounds_per_epoch
        places = _generator(seed, "place in the epoch").integers(0, cycle, self.population)
        return np.flatnonzero(places == (round - 1) % cycle)


@dataclasses.dataclass(frozen=True)
class _Separated(_OfClients):
    """A client takes part at most once in an epoch of b = `separation` rounds."""

    in_epochs = True

    separation: PositiveInt

    def check_fields(self) -> None:
        super().check_fields()
        most = self.population // self.clients_per_round
        if self.separation > most:
            raise InputError(
                f"separation must be at most {most}, population / clients_per_round = "
                f"{self.population} / {self.clients_per_round}, so that in each round enough "
                f"clients may take part, found {self.separation}"
            )

    @property
    def rounds_per_epoch(self) -> int:
        """b: a client takes part at most once in an epoch."""
        return self.separation


@dataclasses.dataclass(frozen=True)
class MinSeparation(_Separated):
    """n clients take part, drawn from those who took part in none of the b - 1 rounds before.

    `separation` is b, at most N / n: a client takes part at most once in any b rounds that follow
    each other, as devices do that wait (Xu et al. 2023, "Federated Learning of Gboard Language
    Models with Differential Privacy"). Nothing is amplified. Without a client others would take its
    place, so that the guarantee is for a client whose data is replaced by nothing
    (`events.ZeroOut`), and not for one who is absent.
    """

    sampling = "min_separation"
    adjacency = "zero_out_one"

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return ZeroOut(dp_accounting.GaussianDpEvent(multiplier))

    def without_sampling(self, multiplier: float) -> dp_accounting.DpEvent:
        return self.event(multiplier)

    def sample(self, seed: int, round: int) -> np.ndarray:
        return _CheckIns(self, seed).cohort(round)


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(_Separated):
    """Each client has one of b places, and takes part in its round of an epoch with b n / N.

    b is `separation`, at most N / n: the rounds of an epoch. Places are drawn independently and
    uniformly, so that they tell nothing of other clients, and stay in all epochs. An epoch costs
    one Gaussian on a Poisson cohort of rate b n / N, also where the noise of up to b rounds is
    correlated: what a client adds to C X in one epoch and in another has no row in common
    (Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", Theorem 4, there for
    equal parts of fixed clients).
    """

    sampling = "cyclic_poisson"

    @property
    def sampling_rate(self) -> float:
        """b n / N, within a client's own round of an epoch."""
        return self.separation * self.clients_per_round / self.population

    def sample(self, seed: int, round: int) -> np.ndarray:
        generator = _generator(seed, "place in the epoch")
        places = generator.integers(0, self.separation, self.population)
        draws = _generator(seed, "cyclic poisson cohort", round).random(self.population)
        own = places == (round - 1) % self.separation
        return np.flatnonzero(own & (draws < self.sampling_rate))


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(_OfClients):
    """As `Poisson`; of more than B clients, B take part, drawn uniformly from them.

    B is `at_most`, n or more. A client may displace another one, which moves the sum by 2 S; how
    often that happens is part of the cost. With B six deviations of the cohort's size above n it
    costs hardly more than `Poisson`; with two, far more.
    """

    sampling = "truncated_poisson"
    adjacency = "zero_out_one"

    at_most: PositiveInt

    def check_fields(self) -> None:
        super().check_fields()
        if not self.clients_per_round <= self.at_most or self.clients_per_round == self.population:
            raise InputError(
                f"at_most must be at least clients_per_round = {self.clients_per_round}, which "
                f"must be below the population, {self.population}; found {self.at_most}"
            )

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            self.population, self.sampling_rate, self.at_most, multiplier
        )

    def without_sampling(self, multiplier: float) -> dp_accounting.DpEvent:
        # Given what the first release told, another client may be in this one's place.
        return ZeroOut(dp_accounting.GaussianDpEvent(multiplier / 2))

    def sample(self, seed: int, round: int) -> np.ndarray:
        draws = _generator(seed, "truncated poisson cohort", round).random(self.population)
        drawn = np.flatnonzero(draws < self.sampling_rate)
        if len(drawn) > self.at_most:
            generator = _generator(seed, "truncated to", round)
            drawn = np.sort(generator.choice(drawn, self.at_most, replace=False, shuffle=False))
        return drawn


# One for each kind and seed: the next round costs one draw, an earlier one starts again.
@functools.lru_cache(maxsize=4)
class _CheckIns:
    """The cohorts of `MinSeparation`, round after round. PRIVATE."""

    def __init__(self, kind: MinSeparation, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._start()

    def _start(self) -> None:
        # The round in which each client took part last.
        self._round, self._last_N = 0, np.full(self._kind.population, -self._kind.separation)

    def cohort(self, round: int) -> np.ndarray:
        if round < self._round:
            self._start()
        while self._round < round:
            self._round += 1
            ready = np.flatnonzero(self._last_N <= self._round - self._kind.separation)
            generator = _generator(self._seed, "check-ins", self._round)
            drawn = generator.choice(
                len(ready), self._kind.clients_per_round, replace=False, shuffle=False
            )
            self._last_N[ready[drawn]] = self._round
        return np.flatnonzero(self._last_N == round)


Participation = Poisson | FixedSize | Cyclic | MinSeparation | CyclicPoisson | TruncatedPoisson
KINDS: dict[str, type[Participation]] = {kind.sampling: kind for kind in get_args(Participation)}
OTHERS = {*KINDS} - {"poisson"}


def of(kind: Sampling, population: int, clients_per_round: int, **own: Any) -> Participation:
    """Returns the participation of this name in a config.

    Args:
      own: fields that it has beside population and clients per round, such as `separation`; those
        that are None, which a config leaves out, count as absent.
    """
    checks.one_of("sampling", kind, tuple(KINDS))
    names = [field.name for field in dataclasses.fields(KINDS[kind])][2:]
    for name in sorted(own.keys() | {*names}):
        if (own.get(name) is None) == (name in names):
            state = "needs" if name in names else "takes no"
            raise InputError(f"sampling = {kind!r} {state} {name}, found {own.get(name)}")
    return KINDS[kind](population, clients_per_round, **{name: own[name] for name in names})


def shuffled(cohort: np.ndarray, seed: int, round: int) -> np.ndarray:
    """A round's cohort in an order that is uniformly random and as secret as the cohort."""
    return _generator(seed, "places", round).permutation(cohort)


def _generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A numpy generator that only depends on its arguments."""
    text = " ".join(["jaxpfl", purpose, str(int(seed)), *(str(int(part)) for part in address)])
    words = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint64)
    return np.random.Generator(np.random.Philox(key=words))
