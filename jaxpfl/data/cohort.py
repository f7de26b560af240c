"""A cohort as static shapes: capped, batched, sorted by size, packed into buckets with masks.

A bucket is [clients, steps, batch, ...] with a fixed number of clients and a number of steps from a
short ladder, so that there are at most as many shapes, and compilations, as rungs. Clients are
sorted by steps, then by examples, largest first, and fill buckets in that order; a bucket has the
smallest number of steps on the ladder that its largest client fits into.

A client's shuffles and subsets depend only on (seed, round, client id), and not on other clients,
the bucket's capacity, the shards or the order of packing. Which client is in which slot
follows from the sizes of all, so that each of several processes can pack its own slots alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from jaxpfl import checks
from jaxpfl.checked import Checked, Fraction, PositiveInt
from jaxpfl.data.columns import Column, take
from jaxpfl.data.mapped import Mapped
from jaxpfl.data.population import Population, check_client_indices
from jaxpfl.data.sequences import Padded
from jaxpfl.errors import InputError

CLIENTS_PER_BUCKET = 64
"""The least capacity that is chosen for buckets of rounds that plan half as many clients or more.

With less, most time goes to starting programs.
"""

_FEW_STEPS = 4
_LARGE = 2**20  # bytes of a bucket's column
_T = TypeVar("_T")
_END, _AHEAD = object(), 2
# Separate these draws from every other use of the same seed.
_EXAMPLES = int.from_bytes(b"examples", "big")
_STRAGGLERS = int.from_bytes(b"straggle", "big")


class Bucket(NamedTuple):
    """Some of a cohort's clients: a pytree of numpy arrays, clients axis first.

    Attributes:
      batches: name -> [clients, steps, batch, ...]; zeros where there is no example.
      mask: bool [clients, steps, batch], true where there is an example.
      steps: int32 [clients], steps up to the last one with an example; 0 for padding.
      weight: float32 [clients], 1 for a client, even without examples, and 0 for padding.
      key: uint32 [clients, 2], a keyed hash of the client's id, from which its random key follows;
        0 for padding. PRIVATE.
      client_states: what each client keeps between rounds, a pytree of arrays [clients, ...]; None
        where clients keep nothing. PRIVATE.
      is_new: bool [clients], true where nothing is kept yet; None as above. PRIVATE.
    """

    batches: dict[str, np.ndarray]
    mask: np.ndarray
    steps: np.ndarray
    weight: np.ndarray
    key: np.ndarray
    client_states: Any = None
    is_new: np.ndarray | None = None


@dataclass(frozen=True)
class CohortSpec(Checked):
    """Public caps and shapes of a cohort.

    Attributes:
      batch_size: examples per step.
      max_examples: cap on a client's examples in a round; a client with more of them uses a new
        uniform subset each round.
      epochs: passes over these examples, each in a new order with a partly masked last batch.
      one_shape: whether all buckets have `max_steps` steps.
      clients_per_bucket: capacity; bounds the memory that a bucket takes on host and device. None:
        as many as keep the devices of a query busy (`federated.Query`), and 64 elsewhere.
      stragglers: probability that a client, in a round, only does a number of epochs drawn
        uniformly from 1 to `epochs`, whatever its examples (Li et al. 2020, "Federated Optimization
        in Heterogeneous Networks", section 5.2).
      drop_stragglers: whether these send zeros instead. They count as clients, and the noise stays.
    """

    batch_size: PositiveInt
    max_examples: PositiveInt
    epochs: PositiveInt = 1
    one_shape: bool = False
    clients_per_bucket: PositiveInt | None = None
    stragglers: Fraction = 0.0
    drop_stragglers: bool = False

    @property
    def capacity(self) -> int:
        """The clients of a bucket."""
        return CLIENTS_PER_BUCKET if self.clients_per_bucket is None else self.clients_per_bucket

    @property
    def max_steps(self) -> int:
        """The most steps a client can take."""
        return self.epochs * -(-self.max_examples // self.batch_size)

    @property
    def rungs(self) -> tuple[int, ...]:
        """The ladder: `max_steps` and, where that is more than four, a quarter of it.

        Each rung is a program to trace, check and compile, while padding steps take memory but are
        not run: two are enough for many steps, and one for few.
        """
        most = self.max_steps
        return (most,) if self.one_shape or most <= _FEW_STEPS else (-(-most // 4), most)


@dataclass(eq=False, repr=False)
class Cohort:
    """Packs clients into buckets of `spec.capacity`, one at a time, as it is iterated over.

    Attributes:
      population: its numeric columns are packed.
      clients: int [cohort], indices of different clients; no indices give no buckets.
      seed, round: what shuffles and subsets follow from; whole numbers >= 0.
      shards: number of equal blocks that the clients axis consists of, one per device. A bucket's
        clients are dealt to the blocks back and forth, so that devices have similar work.
      states: `(clients) -> (client_states, is_new)` of clients' indices, whose rows are zeros for
        the index -1; None where clients keep nothing.
      blocks: the numbers, all different, of the blocks that the buckets consist of, in this order;
        None = all. No example of other blocks' clients is read.
      examples: slots that hold an example, in the buckets of the latest iteration. PRIVATE.
      run_slots: its slots in steps that are run, up to a client's last example. PRIVATE.

    Raises:
      InputError: an index is out of range or occurs twice, `shards` does not divide the capacity,
        or no column is numeric.
    """

    population: Population
    clients: Any
    spec: CohortSpec
    _: KW_ONLY
    seed: int
    round: int
    shards: int = 1
    blocks: tuple[int, ...] | None = None
    states: Callable[[np.ndarray], tuple[Any, np.ndarray]] | None = None
    examples: int = field(init=False, default=0)
    run_slots: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.clients = check_client_indices(self.clients, len(self.population))
        self.seed = checks.non_negative_int("seed", self.seed)
        self.round = checks.non_negative_int("round", self.round)
        capacity, shards, blocks = self.spec.capacity, self.shards, self.blocks
        if capacity % checks.positive_int("shards", shards):
            raise InputError(f"clients_per_bucket = {capacity} is no multiple of {shards} shards")
        wanted = np.arange(shards) if blocks is None else np.asarray(blocks, np.int64)
        self._columns = self.population.numeric()
        if not self._columns:
            columns = self.population.column_types()
            raise InputError(f"a cohort needs a numeric column, found {columns}: encode text first")
        # Only the slots of the wanted blocks are packed.
        places = np.full(shards, -1)
        places[wanted] = np.arange(len(wanted))
        turn, block = np.divmod(np.arange(capacity), shards)
        # Every other turn goes back: otherwise the first block would have the most work.
        place = places[np.where(turn % 2, shards - 1 - block, block)]
        self._here = np.flatnonzero(place >= 0)
        self._slots = (place * (capacity // shards) + turn)[self._here]

    @property
    def padding_waste(self) -> float:
        """The fraction of `run_slots` without an example; 0 if there are none. PRIVATE."""
        return 1.0 - self.examples / self.run_slots if self.run_slots else 0.0

    def __iter__(self) -> Iterator[Bucket]:
        spec, offsets, chosen = self.spec, self.population.offsets, self.clients
        self.examples = self.run_slots = 0
        keys = client_keys(self.population, chosen, self.seed)
        used = np.minimum(offsets[chosen + 1] - offsets[chosen], spec.max_examples)
        epochs = self._epochs(keys)
        steps = epochs * -(-used // spec.batch_size)
        # Ties by index: the order in which the cohort was given changes nothing.
        largest_first = np.lexsort((chosen, -used, -steps))
        by_client = [array_C[largest_first] for array_C in (chosen, keys, epochs, steps)]
        capacity, rungs, packed = spec.capacity, spec.rungs, len(self._slots)
        for start in range(0, len(chosen), capacity):
            # The largest client of all blocks decides, so that every process packs one shape.
            rung = next(rung for rung in rungs if rung >= by_client[-1][start])
            there = self._here < len(chosen) - start
            here, slots = start + self._here[there], self._slots[there]
            clients_b, keys_b, epochs_b, steps_b = (array_C[here] for array_C in by_client)

            mask = np.zeros((packed, rung * spec.batch_size), bool)
            rows = np.zeros((packed, rung * spec.batch_size), np.int64)
            sizes_b = offsets[clients_b + 1] - offsets[clients_b]
            # Most of a cohort may hold one example each, which has only one order.
            single_b = sizes_b == 1
            client, epoch = np.nonzero(np.arange(spec.epochs) < epochs_b[single_b, None])
            places = slots[single_b][client], epoch * spec.batch_size
            mask[places], rows[places] = True, offsets[clients_b[single_b]][client]
            by_client_b = (slots, clients_b, keys_b, sizes_b, epochs_b)
            others = [array_b[sizes_b > 1] for array_b in by_client_b]
            for slot, client, words, size, passes in zip(*others, strict=True):
                generator = _generator(_EXAMPLES, (self.seed, self.round), words)
                # For a large client, the cost depends on the cap and not on the client's size.
                subset = generator.choice(size, min(size, spec.max_examples), replace=False)
                for epoch in range(passes):
                    order = generator.permutation(subset) if epoch else subset
                    width = -(-len(order) // spec.batch_size) * spec.batch_size
                    place = slice(epoch * width, epoch * width + len(order))
                    mask[slot, place] = True
                    rows[slot, place] = order + offsets[client]

            shape = (packed, rung, spec.batch_size)
            mask, rows = mask.reshape(shape), rows.reshape(shape)
            bucket = Bucket(
                batches={
                    name: gather(column, rows, mask) for name, column in self._columns.items()
                },
                mask=mask,
                steps=np.zeros(packed, np.int32),
                weight=np.zeros(packed, np.float32),
                key=np.zeros((packed, 2), np.uint32),
            )
            if self.states is not None:
                placed = np.full(packed, -1)
                placed[slots] = clients_b
                states, is_new = self.states(placed)
                bucket = bucket._replace(client_states=states, is_new=is_new)
            bucket.steps[slots] = steps_b
            bucket.weight[slots] = 1.0
            bucket.key[slots] = keys_b
            self.examples += int(bucket.mask.sum())
            self.run_slots += int(bucket.steps.sum()) * spec.batch_size
            yield bucket

    def _epochs(self, keys: np.ndarray) -> np.ndarray:
        """The epochs of each client, int [cohort], drawn from its own words and the round."""
        spec, counter = self.spec, (self.seed, self.round)
        epochs = np.full(len(keys), spec.epochs)
        for client in range(len(keys) if spec.stragglers else 0):
            generator = _generator(_STRAGGLERS, counter, keys[client])
            if generator.random() < spec.stragglers:
                fewer = generator.integers(1, spec.epochs, endpoint=True)
                epochs[client] = 0 if spec.drop_stragglers else fewer
        return epochs


def client_keys(population: Population, clients_idx: np.ndarray, seed: int) -> np.ndarray:
    """Words from which clients' draws follow, uint32 [clients, 2].

    They depend on the id alone: an index would change for all clients after one that is removed.
    They are hashes under the seed, so that they tell nobody an id.
    """
    secret = (seed % 2**256).to_bytes(32, "little")
    ids = take(population.client_ids, clients_idx).to_pylist()
    words = [blake2b(client_id.encode(), digest_size=8, key=secret).digest() for client_id in ids]
    return np.frombuffer(b"".join(words), np.uint32).reshape(-1, 2)


def _generator(purpose: int, address: tuple[int, int], words: np.ndarray) -> np.random.Generator:
    """The generator of one client, by its words, in a (seed, round)."""
    seed, round = address
    key = np.array([seed % 2**64, purpose], np.uint64)
    own = words.astype(np.uint64)
    counter = np.array([0, seed >> 64, round, own[0] << np.uint64(32) | own[1]], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def gather(column: Column, rows: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The examples of `rows`; zeros where masked: padding never holds another client's data."""
    shape = (*rows.shape, *column.shape[1:])
    if not mask.any():
        return np.zeros(shape, column.dtype)
    if isinstance(column, Padded):
        values = np.zeros(shape, column.dtype)
        values[mask] = column[rows[mask]]
        return values
    if isinstance(column, Mapped):
        located = np.zeros_like(rows)
        column, located[mask] = column.located(rows[mask])
        rows = located
    values = np.zeros(shape, column.dtype)
    parts = [(values, rows, mask)]
    if values.nbytes > _LARGE:
        # One client after the other, up to its last step: padding that nobody writes is free.
        ends = [max(np.flatnonzero(own.any(axis=1)), default=-1) + 1 for own in mask]
        places = [(slot, slice(end)) for slot, end in enumerate(ends)]
        parts = [(values[place], rows[place], mask[place]) for place in places]
    for own, own_rows, is_example in parts:
        # "clip" lets numpy write to `out` without a buffer; all rows are in range.
        np.take(column, own_rows, axis=0, out=own, mode="clip")
        own[~is_example] = 0
    return values


def batches(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows into batches: rows int32 and mask bool, [steps, size]; the last is padded."""
    steps = -(-len(rows) // size)
    padded = np.zeros(steps * size, np.int32)
    padded[: len(rows)] = rows
    real = np.arange(steps * size) < len(rows)
    return padded.reshape(steps, size), real.reshape(steps, size)


@contextmanager
def prefetch(items: Iterable[_T]) -> Iterator[Iterator[_T]]:
    """Iterates over `items`, such as a cohort's buckets, in a thread, at most two items ahead.

    An exception in `items` is raised in the consumer, after the items before it. When the `with`
    block is left, also early or by an exception, the thread has ended. In memory are two items that
    are made or being made, and the one in use.
    """
    source = iter(items)
    with ThreadPoolExecutor(1, "jaxpfl-prefetch") as thread:
        ahead = deque(thread.submit(next, source, _END) for _ in range(_AHEAD))

        def consume() -> Iterator[_T]:
            # The last future stays in the queue, so that a second iteration ends, too.
            while (item := ahead[0].result()) is not _END:
                ahead.popleft()
                ahead.append(thread.submit(next, source, _END))
                yield cast(_T, item)

        try:
            yield consume()
        finally:
            for future in ahead:
                future.cancel()
