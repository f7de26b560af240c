"""The participants of a round, and the cost of that round's Gaussian.

|           | who takes part            | adjacency         | the sum moves by |
|-----------|---------------------------|-------------------|------------------|
| Poisson   | each with q = n / N       | add or remove one | S                |
| FixedSize | exactly n, no replacement | replace one       | 2 S              |
| Cyclic    | each once in N / n rounds | add or remove one | S an epoch       |

`multiplier` is always z = (noise standard deviation on the sum) / S. Under replace-one the sum
moves by 2 S, so that the event has multiplier z / 2. It is a common error to account for a
fixed-size round as if the sum moved by S, because dp-accounting's SampledWithoutReplacement takes
the multiplier relative to the shift. With cyclic participation a client takes part once in each
epoch of R = floor(N / n) rounds, always R rounds apart, and nothing is amplified. This is the
setting of DP-FTRL, where the noise may be correlated between rounds (`privacy.correlated_noise`):
an epoch costs one Gaussian of multiplier z.

A cohort is a function of (seed, round) alone. Amplification by sampling requires that the adversary
does not know the seed, and so who took part. With cyclic participation nothing is amplified, but
the seed is still secret: clients are addressed by index, so that removing one would visibly move
those after it.
"""

import dataclasses
import hashlib
from typing import ClassVar, Literal

import dp_accounting
import numpy as np

from jaxpfl import checks
from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.privacy.events import Adjacency

Sampling = Literal["poisson", "fixed", "cyclic"]


@dataclasses.dataclass(frozen=True)
class _OfClients(Checked):
    """The population N and the planned clients per round n: the fields of all three kinds."""

    sampling: ClassVar[Sampling]
    adjacency: ClassVar[Adjacency] = "add_or_remove_one"

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
        """Returns the number, from 1, of the charge that covers round 1, 2, ..."""
        return round

    def without_sampling(self, multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of another release on the same cohort as an earlier one.

        It is not amplified, because the first release reveals something about the cohort: it is one
        Gaussian of multiplier z, or z / 2 under replace-one. A third release costs as much again.

        Proof. Fix the rest of the cohort and, in a cohort of fixed size, the client that replaces
        the one in question: both are drawn alike for neighbours, and divergences are jointly
        convex. The sum
        is then one of few values, no further apart than one client moves it. Given the first
        release, the second is a mixture of Gaussians around them, whose proportions may depend on
        the data; by joint convexity, its divergence between neighbours is at most that of two
        Gaussians so far apart. That pair dominates it whatever the first release was, and
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

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one charge, which covers a round."""
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        if self.clients_per_round == self.population:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampling_rate, gaussian)

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
    or more; if n > N / 2, everyone takes part in every round.
    """

    sampling = "cyclic"

    @property
    def denominator(self) -> float:
        """N / R, a public constant: divide a sum by it to get a mean."""
        return self.population / self.rounds_per_epoch

    def charge_number(self, round: int) -> int:
        """Returns the number of the round's epoch, from 1, whose rounds share one charge."""
        return -(-round // self.rounds_per_epoch)

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        """Returns the event of one charge, which covers an epoch."""
        return dp_accounting.GaussianDpEvent(multiplier)

    def sample(self, seed: int, round: int) -> np.ndarray:
        cycle = self.rounds_per_epoch
        places = _generator(seed, "place in the epoch").integers(0, cycle, self.population)
        return np.flatnonzero(places == (round - 1) % cycle)


Participation = Poisson | FixedSize | Cyclic
KINDS: dict[str, type[Participation]] = {"poisson": Poisson, "fixed": FixedSize, "cyclic": Cyclic}


def of(kind: Sampling, population: int, clients_per_round: int) -> Participation:
    """Returns the participation that is called "poisson", "fixed" or "cyclic" in a config."""
    checks.one_of("sampling", kind, tuple(KINDS))
    return KINDS[kind](population, clients_per_round)


def shuffled(cohort: np.ndarray, seed: int, round: int) -> np.ndarray:
    """A round's cohort in an order that is uniformly random and as secret as the cohort."""
    return _generator(seed, "places", round).permutation(cohort)


def _generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """A numpy generator that only depends on its arguments."""
    text = " ".join(["jaxpfl", purpose, str(int(seed)), *(str(int(part)) for part in address)])
    words = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint64)
    return np.random.Generator(np.random.Philox(key=words))
