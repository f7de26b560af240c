"""Columns of token ids: a sequence per example, of any length, as they lie on the disk.

`Sequences` holds all ids one after the other, and where each sequence begins, so that no stored
value follows from a model's sequence length. A model reads `Padded`: rows of one length, which are
made when a cohort is packed. Both may be mapped from a file: a part of the clients, or another
order, keeps the map, and adds a row number per example. Mapped ids are verified as they are read,
see `data.mapped`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpfl.data.mapped import Mapped, chosen
from jaxpfl.errors import InputError

PAD = np.int32(-1)
"""That of `jaxpfl.models`, which is no id: all its bits are set."""

_BLOCK = 2**18


@dataclass(frozen=True, eq=False, repr=False)
class Sequences:
    """A column of sequences of ids.

    Attributes:
      values: uint16 or uint32 [ids], of the stored sequences, one after the other; or mapped.
      edges: int64 [stored + 1], where each stored sequence begins, and the end; or mapped.
      encoding: the meaning of the ids; public. Columns of one population have one encoding.
      rows: which stored sequence each example is: those of a range, by default all, or int64
        [examples].
    """

    values: np.ndarray | Mapped
    edges: np.ndarray | Mapped
    encoding: Mapping[str, Any]
    rows: range | np.ndarray = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if self.values.dtype not in (np.uint16, np.uint32) or self.values.ndim != 1:
            actual = f"{self.values.dtype} with {self.values.ndim} axes"
            raise InputError(f"sequences must have ids uint16 or uint32, found {actual}")
        edges = self.edges
        if edges.dtype != np.int64 or edges.ndim != 1 or not len(edges):
            raise InputError("the edges of sequences must be int64 [sequences + 1]")
        if not 0 <= edges[0] <= edges[-1] <= len(self.values):
            raise InputError("the edges of sequences must lie within their ids")
        if self.rows is None:
            object.__setattr__(self, "rows", range(len(edges) - 1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | np.ndarray) -> "Sequences":
        """The sequences of a slice, or of row numbers int [...], without copying any."""
        return replace(self, rows=chosen(self.rows, rows))

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def bounds(self, rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places in `values` where the sequences of these rows begin and end, int64."""
        places = chosen(self.rows, rows)
        if isinstance(places, range):
            edges = self.edges[places.start : places.start + len(places) + 1]
            starts, stops = edges[:-1], edges[1:]
        else:
            starts, stops = self.edges[places], self.edges[places + 1]
        if not isinstance(self.edges, Mapped) or not starts.size:
            return starts, stops
        if starts.min() < 0 or stops.max() > len(self.values) or np.any(starts > stops):
            raise self.edges.blocks.unfit("sequences do not begin one after the other")
        return starts, stops

    def blocks(self) -> Iterator["Sequences"]:
        """The same sequences in pieces of bounded size, stored one after the other in each."""
        for start in range(0, len(self), _BLOCK):
            yield self[start : start + _BLOCK].compact()

    def compact(self) -> "Sequences":
        """The same sequences, stored alone, in their order and from the first id on."""
        starts, stops = self.bounds(slice(None))
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        if isinstance(self.rows, range):
            first = int(starts[0]) if len(starts) else 0
            return Sequences(self.values[first : first + int(edges[-1])], edges, self.encoding)
        places = np.repeat(starts - edges[:-1], stops - starts)
        places += np.arange(len(places))
        return Sequences(self.values[places], edges, self.encoding)

    def to_list(self) -> list[np.ndarray]:
        """The ids of each sequence."""
        starts, stops = self.bounds(slice(None))
        return [self.values[i:j] for i, j in zip(starts.tolist(), stops.tolist(), strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class Padded:
    """Sequences read as rows int32 [examples, length], cut or filled with PAD on the right.

    It is a column of numbers as an array is, except that rows are made when they are asked for.
    """

    sequences: Sequences
    length: int

    dtype = np.dtype(np.int32)
    ndim = 2

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def select(self, rows: slice | np.ndarray) -> "Padded":
        """These rows as a column that is not made yet either."""
        return replace(self, sequences=self.sequences[rows])

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """The rows of a slice, or of row numbers int [...]: int32 [..., length]."""
        starts, stops = self.sequences.bounds(rows)
        shape, places_L = (*starts.shape, self.length), np.arange(self.length)
        starts, sizes = starts.reshape(-1), np.minimum(stops - starts, self.length).reshape(-1)
        stored = self.sequences.values
        if isinstance(stored, Mapped):
            stored = stored.of_runs(starts, starts + sizes)
        padded, inside = np.full((len(starts), self.length), PAD), places_L < sizes[:, None]
        padded[inside] = stored[(starts[:, None] + places_L)[inside]]
        return padded.reshape(shape)
