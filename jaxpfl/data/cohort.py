"""Packing a cohort: ragged clients into a few static shapes.

Clients are capped, batched, sorted by size and put into buckets [clients, steps, batch, ...] whose
number of steps is a rung of a short ladder: each rung is one compilation, whatever the cohort.
Buckets are made one at a time, so memory is bounded by the bucket and not by the cohort.

A client's shuffle, and its choice of examples where it has more than the cap, is a function of
(seed, round, client) alone: it does not depend on who else takes part.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError


class Bucket(NamedTuple):
    """Clients of one number of steps; a pytree whose arrays start with the clients' axis.

    Attributes:
      batches: {column: [clients, steps, batch, ...]}.
      mask: bool [clients, steps, batch], True where a row is a real example.
      steps: int32 [clients], steps that hold an example; 0 for empty clients and padding.
      weight: float32 [clients], 1 for a client (also an empty one), 0 for padding.
      client: uint32 [clients], index in the population; addresses randomness. PRIVATE.
    """

    batches: dict[str, np.ndarray]
    mask: np.ndarray
    steps: np.ndarray
    weight: np.ndarray
    client: np.ndarray


@dataclasses.dataclass(frozen=True)
class CohortSpec:
    """Public caps and shapes of a cohort.

    Attributes:
      batch_size: examples in a batch.
      max_examples: cap on a client's examples an epoch; one with more uses a fresh uniform
        choice each round.
      epochs: passes over the client's examples, each newly shuffled; the last batch of each
        may be partial.
      ladder: allowed numbers of steps, rising; None = a quarter and the whole of the largest.
      clients_per_bucket: capacity of a bucket; a multiple of the number of devices.
    """

    batch_size: int
    max_examples: int
    epochs: int = 1
    ladder: tuple[int, ...] | None = None
    clients_per_bucket: int = 64

    def __post_init__(self):
        for name in ("batch_size", "max_examples", "epochs", "clients_per_bucket"):
            checks.positive_int(name, getattr(self, name))
        if self.ladder is not None:
            for rung in self.ladder:
                checks.positive_int("ladder", rung)
            if list(self.ladder) != sorted(set(self.ladder)) or self.ladder[-1] < self.max_steps:
                raise InputError(
                    f"ladder must rise and end at {self.max_steps} steps or more, "
                    f"found {self.ladder}"
                )

    @property
    def max_steps(self) -> int:
        """Steps of a client at the cap."""
        return self.epochs * -(-self.max_examples // self.batch_size)

    @property
    def rungs(self) -> tuple[int, ...]:
        """The ladder in use. Padding steps are not run, so a rung bounds memory, not time."""
        if self.ladder is not None:
            return self.ladder
        return tuple(sorted({max(1, -(-self.max_steps // 4)), self.max_steps}))


@dataclasses.dataclass
class PackingStats:
    """How full the buckets were; PRIVATE, as it tells of clients' sizes.

    Attributes:
      examples: real examples packed.
      run_slots: example slots of the steps that are run.
      slots: example slots held in memory, padding steps and padding clients included.
      buckets: {rung: buckets made}.
    """

    examples: int = 0
    run_slots: int = 0
    slots: int = 0
    buckets: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def padding_waste(self) -> float:
        """Share of the run slots that hold no example; 0 for an empty cohort."""
        return 1.0 - self.examples / self.run_slots if self.run_slots else 0.0

    @property
    def memory_waste(self) -> float:
        """Share of the slots in memory that hold no example."""
        return 1.0 - self.examples / self.slots if self.slots else 0.0


class Cohort:
    """The buckets of one round, packed as they are asked for.

    Args:
      population: who is there.
      clients: indices of the cohort, distinct.
      spec: caps and shapes.
      seed, round: address the shuffles.
      shards: devices over which each bucket's clients will be dealt: each contiguous share of
        the clients' axis gets an equal mix of sizes, real clients before padding.

    Iterating gives `Bucket`s of exactly `spec.clients_per_bucket` slots, the longest clients
    first; `stats` is complete afterwards.
    """

    def __init__(
        self,
        population: Population,
        clients: np.ndarray,
        spec: CohortSpec,
        *,
        seed: int,
        round: int,
        shards: int = 1,
    ):
        if spec.clients_per_bucket % checks.positive_int("shards", shards):
            raise InputError(
                f"clients_per_bucket = {spec.clients_per_bucket} must be a multiple of the "
                f"{shards} devices that share a cohort"
            )
        for name, column in population.columns.items():
            if not isinstance(column, np.ndarray):
                raise InputError(
                    f"{population.name}: column {name!r} holds text; encode it before training "
                    "(text.Vocabulary.encode)"
                )
        self._population = population
        self._clients = np.asarray(clients, np.int64)
        self._spec = spec
        self._address = (checks.non_negative_int("seed", seed), int(round))
        self._shards = shards
        self.stats = PackingStats()

    def __iter__(self) -> Iterator[Bucket]:
        self.stats = PackingStats()
        spec = self._spec
        sizes = np.minimum(
            self._population.offsets[self._clients + 1] - self._population.offsets[self._clients],
            spec.max_examples,
        )
        steps = spec.epochs * -(-sizes // spec.batch_size)
        order = np.argsort(-steps, kind="stable")
        rungs = np.asarray(spec.rungs)
        rung_of = np.minimum(np.searchsorted(rungs, steps[order]), len(rungs) - 1)
        for rung in range(len(rungs) - 1, -1, -1):
            members = order[rung_of == rung]
            for start in range(0, len(members), spec.clients_per_bucket):
                chosen = members[start : start + spec.clients_per_bucket]
                yield self._bucket(self._clients[chosen], sizes[chosen], int(rungs[rung]))

    def _bucket(self, clients: np.ndarray, sizes: np.ndarray, rung: int) -> Bucket:
        spec, population = self._spec, self._population
        slots, batch = spec.clients_per_bucket, spec.batch_size
        share = slots // self._shards
        ranks = np.arange(len(clients))
        places = (ranks % self._shards) * share + ranks // self._shards
        rows = np.zeros((slots, rung * batch), np.int64)
        mask = np.zeros((slots, rung * batch), bool)
        per_epoch = -(-sizes // batch) * batch
        for place, client, size, width in zip(places, clients, sizes, per_epoch, strict=True):
            if size == 0:
                continue
            start, stop = population.offsets[client], population.offsets[client + 1]
            generator = _generator(*self._address, int(client))
            for epoch in range(spec.epochs):
                first = epoch * width
                rows[place, first : first + size] = start + _draw(generator, stop - start, size)
                mask[place, first : first + size] = True
        batches = {}
        for name, column in population.columns.items():
            assert isinstance(column, np.ndarray)
            # Padding reads row 0 of the population; the mask keeps it out of everything.
            taken = (
                column[rows.reshape(-1)]
                if population.num_examples
                else np.zeros((rows.size, *column.shape[1:]), column.dtype)
            )
            batches[name] = taken.reshape(slots, rung, batch, *column.shape[1:])
        steps = np.zeros(slots, np.int32)
        steps[places] = spec.epochs * (per_epoch // batch)
        weight = np.zeros(slots, np.float32)
        weight[places] = 1
        index = np.zeros(slots, np.uint32)
        index[places] = clients
        stats = self.stats
        stats.examples += int(mask.sum())
        stats.run_slots += int(steps.sum()) * batch
        stats.slots += mask.size
        stats.buckets[rung] = stats.buckets.get(rung, 0) + 1
        return Bucket(batches, mask.reshape(slots, rung, batch), steps, weight, index)


def pack(
    population: Population,
    clients: np.ndarray,
    spec: CohortSpec,
    *,
    seed: int,
    round: int,
    shards: int = 1,
) -> Iterator[Bucket]:
    """Returns the buckets of a round; see `Cohort`."""
    return iter(Cohort(population, clients, spec, seed=seed, round=round, shards=shards))


def _generator(seed: int, round: int, client: int) -> np.random.Generator:
    """A generator for one client in one round, from a counter-based cipher of its address."""
    # Made for every client: hashing the address here would cost more than the shuffle.
    key = np.array([seed & (2**64 - 1), (round << 32) | client], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _draw(generator: np.random.Generator, held: int, count: int) -> np.ndarray:
    """`count` distinct rows of `held`, in random order."""
    if count == held:
        return generator.permutation(held)
    return generator.choice(held, count, replace=False)
