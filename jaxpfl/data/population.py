"""Clients and what they hold: columns of examples, and where each client's begin."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from jaxpfl import checks, files
from jaxpfl.data import columns as column_module
from jaxpfl.data.columns import Column, as_column, describe, is_numeric, take, text_array
from jaxpfl.data.content import content_hash, origin_hash
from jaxpfl.errors import CorruptFile, InputError, named

if TYPE_CHECKING:
    from jaxpfl.data.stream import Stream

_BLOCK = 2**20
_EXAMPLES = 2**15  # of a batch


class _Content:
    """The SHA-256 of columns and offsets, computed once for all populations derived from one."""

    def __init__(
        self, columns: Mapping[str, Column], offsets: np.ndarray, sha256: str | None = None
    ) -> None:
        self._columns, self._offsets, self._sha256 = columns, offsets, sha256

    def sha256(self) -> str:
        if self._sha256 is None:
            self._sha256 = content_hash(self._columns, self._offsets)
            self._columns = {}
        return self._sha256


@dataclass(frozen=True, eq=False, repr=False)
class Population:
    """Clients and their examples. Client k holds the rows offsets[k] .. offsets[k + 1] - 1.

    A client is the unit of privacy, so every id occurs once: readers merge all rows of an id.

    A population that is made from another one by its methods (a part, or one with another order,
    other columns or other examples) keeps the `fingerprint` of its SOURCE and is charged to the
    source's ledger; only its `content` is its own. A population that was read from a file or made
    from columns is its own source.

    Attributes:
      columns: name -> numpy array [examples, ...], pyarrow large_string array [examples], or token
        ids (see `data.sequences`). Numbers and texts of a file are verified whole when their name
        is looked up; `numeric`, `examples` and `data.Cohort` verify no more than they read.
      offsets: int64 [clients + 1], from 0 to the number of examples, non-decreasing.
      client_ids: pyarrow large_string array [clients], all different. PRIVATE.
      name: the source's name, as given to `data.open`. Public.
      unit: what a client is, in words. Public.
      splitting: how a vocabulary of its texts divides them into words, one of
        `text.tokenisers.vocabulary`: data that came split into words keeps them. Public.
      dropped: how many rows of the source's table lacked a value and were left out. PRIVATE.

    Raises:
      InputError: columns, offsets and ids do not fit together, or an id occurs twice.
    """

    columns: Mapping[str, Column]
    offsets: np.ndarray
    client_ids: pa.Array
    name: str = "in memory"
    unit: str = "client"
    splitting: str = "words"
    dropped: int = 0
    _stored: Mapping[str, Column] = field(init=False)
    _content: _Content = field(init=False)
    _source: _Content = field(init=False)

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets)
        if offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
            actual = describe(offsets)
            raise InputError(f"offsets must be whole numbers [clients + 1], found {actual}")
        offsets = offsets.astype(np.int64).view()
        offsets.flags.writeable = False
        if offsets[0] != 0 or np.any(np.diff(offsets) < 0):
            raise InputError("offsets must start at 0 and never decrease")
        columns = {
            name: as_column(f"column {name!r}", values) for name, values in self.columns.items()
        }
        if not columns:
            raise InputError("a population needs at least one column, found none")
        for name, column in columns.items():
            if len(column) != offsets[-1]:
                what = f"column {name!r} has {len(column)} examples"
                raise InputError(f"{what}, the offsets say {offsets[-1]}")
        ids = self.client_ids
        if not isinstance(ids, pa.Array):
            ids = text_array(list(ids))
        ids = ids.cast(pa.large_string())
        if len(ids) != len(offsets) - 1:
            raise InputError(f"{len(ids)} client ids for {len(offsets) - 1} clients")
        if len(ids.unique()) != len(ids):
            raise InputError("client ids must be different, found one twice: merge its examples")
        content = _Content(columns, offsets)
        for name, value in (
            ("columns", MappingProxyType(column_module.ReadColumns(columns))),
            ("_stored", MappingProxyType(columns)),
            ("offsets", offsets),
            ("client_ids", ids),
            ("_content", content),
            ("_source", content),
        ):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Population({self.name!r}, unit={self.unit!r}, columns=({self.column_types()}))"

    def _repr_html_(self) -> str:
        from jaxpfl.printable import facts

        values = {"source": self.name, "a client is": self.unit, "columns": self.column_types()}
        return facts("Population", values)

    def column_types(self) -> str:
        """Name, type and shape of each column."""
        return ", ".join(f"{name}: {describe(column)}" for name, column in self._stored.items())

    @property
    def num_examples(self) -> int:
        """The number of examples of all clients."""
        return int(self.offsets[-1])

    @property
    def content(self) -> str:
        """SHA-256 (hex) of columns and offsets, but not of ids, however they are stored.

        PRIVATE: a guess of the data can be tested against it. The first use hashes all columns.
        """
        return self._content.sha256()

    @property
    def fingerprint(self) -> str:
        """The `content` of this population's source."""
        return self._source.sha256()

    @property
    def origin(self) -> str:
        """Hashes of the ids and of all else, in their order. PRIVATE; reads nothing of a file."""
        ids = origin_hash({"id": self.client_ids}, np.arange(len(self) + 1))
        return f"{ids} {origin_hash(self._stored, self.offsets)}"

    def numeric(self) -> dict[str, Column]:
        """The columns that a model can read, by name; nothing of a file is read before its rows."""
        return {name: column for name, column in self._stored.items() if is_numeric(column)}

    def sizes(self) -> np.ndarray:
        """Number of examples of each client, int64 [clients]. PRIVATE."""
        return np.diff(self.offsets)

    def column(self, name: str) -> Column:
        """`columns[name]`, with an `InputError` if there is no such column."""
        if name not in self.columns:
            names = ", ".join(map(repr, self.columns))
            raise InputError(f"{self.name!r} must have a column {name!r}, found columns {names}")
        return self.columns[name]

    def examples(self, client: int) -> dict[str, Column]:
        """The columns of one client, given by its index."""
        if checks.non_negative_int("client", client) >= len(self):
            raise InputError(f"client must lie in 0 .. {len(self) - 1}, found {client}")
        return self.rows(slice(int(self.offsets[client]), int(self.offsets[client + 1])))

    def rows(self, rows: slice) -> dict[str, Column]:
        """The columns of neighbouring examples, whichever clients they are of."""
        return {name: column_module.rows_of(column, rows) for name, column in self._stored.items()}

    def select(self, client_indices: Any, name: str | None = None) -> "Population":
        """The clients of these indices, each in range and given once, in this order."""
        chosen = check_client_indices(client_indices, len(self))
        sizes = self.sizes()[chosen]
        offsets = offsets_of(sizes)
        if len(chosen) and np.all(np.diff(chosen) == 1):
            # Neighbours stay where they are, so that a mapped column stays mapped.
            rows: Any = slice(int(self.offsets[chosen[0]]), int(self.offsets[chosen[-1] + 1]))
        else:
            rows = np.repeat(self.offsets[chosen] - offsets[:-1], sizes)
            # In blocks: there is one large array alone.
            for start in range(0, len(rows), _BLOCK):
                block = rows[start : start + _BLOCK]
                block += np.arange(start, start + len(block))
        columns = {name: take(column, rows) for name, column in self._stored.items()}
        ids = take(self.client_ids, chosen)
        return self._derive(columns, offsets, ids, self.name if name is None else name)

    def with_min_examples(self, n: int) -> "Population":
        """The same clients, where those with fewer than `n` examples have none.

        They remain clients, because the number of clients is public, and how many of them have few
        examples is private. An empty client is sampled like the others and contributes zero.
        """
        n, sizes = checks.positive_int("n", n), self.sizes()
        enough = np.repeat(sizes >= n, sizes)
        return self.keeping(enough, f"{self.name} [examples of clients with at least {n}]")

    def split(self, fractions: Mapping[str, float], seed: int) -> dict[str, "Population"]:
        """Deals the CLIENTS to disjoint parts; with a sum below 1, some clients are in none.

        A client's part depends on the seed and its id alone, so that adding or removing a client
        moves no other. Parts have their fractions in expectation, not exactly. `InputError` if one
        is negative or no number, or if their sum is 0 or exceeds 1.
        """
        from jaxpfl.data.draws import client_uniforms

        seed = checks.non_negative_int("seed", seed)
        checks.instance("fractions", fractions, Mapping, 'a mapping, as {"train": 0.8}')
        shares = [checks.non_negative(f"fractions[{k!r}]", v) for k, v in fractions.items()]
        edges = np.concatenate([np.zeros(1), np.cumsum(shares)])
        if not 0 < edges[-1] <= 1 + 1e-9:
            raise InputError(f"fractions must sum to at most 1 and not to 0, found {edges[-1]:g}")
        if edges[-1] > 1 - 1e-9:
            edges[edges == edges[-1]] = 1.0
        draws = client_uniforms("split", seed, self.client_ids)
        return {
            part: self.select(
                np.flatnonzero((edges[i] <= draws) & (draws < edges[i + 1])),
                name=f"{self.name} [{part}]",
            )
            for i, part in enumerate(fractions)
        }

    def with_columns(self, columns: Mapping[str, Any]) -> "Population":
        """The same clients with other columns of the same length, such as tokens of their texts.

        The fingerprint stays, because a release of values computed from a client's data must be
        charged to that client's ledger.
        """
        return self._derive(columns, self.offsets, self.client_ids, self.name)

    def with_examples(
        self, columns: Mapping[str, Any], offsets: np.ndarray, name: str | None = None
    ) -> "Population":
        """The same clients with other examples made of their own, such as their rare words.

        The fingerprint stays, as in `with_columns`, and so does the number of clients: one that has
        no examples left remains.
        """
        if len(offsets) != len(self.offsets):
            raise InputError(f"{len(offsets) - 1} clients in offsets, expected {len(self)}")
        return self._derive(columns, offsets, self.client_ids, name or self.name)

    def keeping(self, kept: np.ndarray, name: str | None = None) -> "Population":
        """The same clients with only the examples where `kept`, bool [examples], is true.

        A client that keeps none remains, because how many keep some is private.
        """
        kept = one_per_example(self, "kept", kept)
        rows = np.flatnonzero(kept)
        columns = {name: take(column, rows) for name, column in self._stored.items()}
        return self.with_examples(columns, offsets_of(kept)[self.offsets], name)

    def save(self, folder: str | Path) -> None:
        """Writes the population to a new folder (see `data.storage`), which must not exist."""
        from jaxpfl.data import storage

        checks.instance("folder", folder, (str, Path), "the path of a new folder")
        column_module.warn_of_numbers(self.numeric())
        storage.write(files.user_path(folder), lambda _: contextlib.nullcontext(self.stream()))

    def stream(self) -> "Stream":
        """The population batch by batch; what is mapped is read as far as the batch."""
        from jaxpfl.data.stream import Batch, Stream

        def batches() -> Iterator[Batch]:
            ids, sizes, seen = self.client_ids, self.sizes(), 0
            for start in range(0, max(self.num_examples, 1), _EXAMPLES):
                rows = slice(start, min(start + _EXAMPLES, self.num_examples))
                done = int(np.searchsorted(self.offsets[1:], rows.stop, "right"))
                yield Batch(self.rows(rows), ids[seen:done].to_pylist(), sizes[seen:done].tolist())
                seen = done

        described = (self.name, self.unit, self.splitting, self.fingerprint)
        return Stream(batches(), self.num_examples, *described)

    @classmethod
    def load(cls, folder: str | Path) -> "Population":
        """Maps a saved population into memory; examples are verified as they are read.

        Raises:
          InputError: the folder holds no population.
          CorruptFile: a file is missing, truncated or altered, or the files make no population.
        """
        from jaxpfl.data import storage

        stored = storage.read(files.user_path(folder))
        with named(folder, CorruptFile):
            population = cls(*stored[:-2])
        hashes = (("_source", stored.fingerprint), ("_content", stored.content))
        # The manifest states both, and its own SHA-256 covers them: no need to hash the data again.
        for name, sha256 in hashes:
            object.__setattr__(population, name, _Content({}, population.offsets, sha256))
        return population

    def _derive(
        self, columns: Mapping[str, Any], offsets: np.ndarray, client_ids: pa.Array, name: str
    ) -> "Population":
        described = name, self.unit, self.splitting, self.dropped
        derived = Population(columns, offsets, client_ids, *described)
        object.__setattr__(derived, "_source", self._source)
        return derived


def from_rows(
    client_of_row: np.ndarray,
    client_ids: Sequence[str] | pa.Array,
    columns: Mapping[str, Any],
    *,
    name: str,
    unit: str,
    dropped: int = 0,
) -> Population:
    """A population from rows in any order.

    Args:
      client_of_row: int [examples], index of each row's client in `client_ids`.
      client_ids: all different, in the population's order. A client's rows keep their order.
      columns: name -> values [examples, ...].
    """
    sizes = np.bincount(client_of_row, minlength=len(client_ids))
    ready = {key: as_column(f"column {key!r}", values) for key, values in columns.items()}
    if np.any(np.diff(client_of_row) < 0):
        rows = np.argsort(client_of_row, kind="stable")
        ready = {key: take(column, rows) for key, column in ready.items()}
    return Population(ready, offsets_of(sizes), client_ids, name, unit, dropped=dropped)


def collect(stream: "Stream") -> Population:
    """The stream's population in memory."""
    pieces: dict[str, list[Column]] = {}
    client_ids: list[str] = []
    sizes: list[int] = []
    for batch in stream.batches:
        for name, column in batch.columns.items():
            pieces.setdefault(name, []).append(column)
        client_ids.extend(batch.client_ids)
        sizes.extend(batch.sizes)
    columns = {}
    for name, parts in pieces.items():
        columns[name] = column_module.concatenated(parts)
        parts.clear()
    ids, described = text_array(client_ids), (stream.name, stream.unit, stream.splitting)
    return Population(columns, offsets_of(sizes), ids, *described, stream.dropped)


def offsets_of(sizes: Any) -> np.ndarray:
    """The sums of the first 0, 1, ... sizes, int64 [sizes + 1]; a boolean counts as 0 or 1."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def one_per_example(population: Population, name: str, values: Any) -> np.ndarray:
    """`values` as bool [examples]."""
    array = np.asarray(values)
    if array.dtype != bool or array.shape != (population.num_examples,):
        # The message leaves the number out: how many examples a selection has is private.
        actual = f"{array.ndim} axes of {array.dtype} or another length"
        raise InputError(f"{name} must be one boolean for each example, found {actual}")
    return array


def check_client_indices(client_indices: Any, clients: int) -> np.ndarray:
    """`client_indices` as int64 [chosen], all different and below `clients`."""
    chosen = np.asarray(client_indices)
    if chosen.size == 0:
        return np.zeros(0, np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise InputError(f"client indices must be whole numbers [chosen], found {describe(chosen)}")
    chosen = chosen.astype(np.int64)
    if not (chosen.min() >= 0 and chosen.max() < clients):
        raise InputError(f"client indices must lie in 0 .. {clients - 1}, found some outside")
    if len(np.unique(chosen)) != len(chosen):
        raise InputError("client indices must be different, found one twice")
    return chosen
