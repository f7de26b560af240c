"""Columns in mapped files, verified block by block as they are read (see `data.blocks`).

They keep the map when examples are selected, by a row number per example, so that a population
that is larger than the memory can be split and sampled. What reads one whole verifies it whole.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from jaxpfl.data.blocks import Blocks

_PIECE = 2**16


@dataclass(frozen=True, eq=False, repr=False)
class Mapped:
    """A column of numbers or booleans, as an array is one, except that rows are read on demand.

    Attributes:
      blocks: the stored column.
      dtype: of the values.
      example: shape of one example.
      begin, stored: the stored rows begin .. begin + stored - 1 are those that `rows` counts.
      rows: int64 [examples], which of these each example is; None = all, in their order.
    """

    blocks: Blocks
    dtype: np.dtype
    example: tuple[int, ...]
    begin: int
    stored: int
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return self.stored if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), *self.example

    @property
    def ndim(self) -> int:
        return 1 + len(self.example)

    @property
    def nbytes(self) -> int:
        return len(self) * self._row_bytes

    def select(self, rows: slice | np.ndarray) -> "Mapped":
        """These rows, without reading them."""
        if self.rows is not None:
            return replace(self, rows=self.rows[rows])
        if isinstance(rows, slice):
            first, last, step = rows.indices(self.stored)
            if step == 1:
                return replace(self, begin=self.begin + first, stored=max(0, last - first))
            rows = np.arange(first, last, step)
        return replace(self, rows=np.asarray(rows, np.int64))

    def __getitem__(self, rows: Any) -> np.ndarray:
        """The rows of a slice, or of row numbers >= 0, int [...]; or one row, also from the end."""
        if isinstance(rows, slice):
            first, last, step = rows.indices(len(self))
            if step == 1 and self.rows is None:
                begin, end = self.begin + first, self.begin + max(first, last)
                self.blocks.verify(begin * self._row_bytes, end * self._row_bytes)
                return self._stored[begin:end]
            rows = np.arange(first, last, step)
        elif isinstance(rows, int):
            rows = range(len(self))[rows]
        stored, places = self.located(np.asarray(rows))
        return stored[places]

    def located(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All stored rows, of which these, int [...], are verified; and their places in it."""
        # Beside a part of the stored rows lie other clients' rows.
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows must lie in 0 .. {len(self) - 1}")
        places = (rows if self.rows is None else self.rows[rows]) + self.begin
        begins = places.reshape(-1) * self._row_bytes
        self.blocks.verify_all(begins, begins + self._row_bytes)
        return self._stored, places

    def verify(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Verifies the rows begins[i] .. ends[i] - 1 of every i, of a whole stored column."""
        self.blocks.verify_all(begins * self._row_bytes, ends * self._row_bytes)

    @property
    def unverified(self) -> np.ndarray:
        """The rows of a whole stored column, for who calls `verify`."""
        return self._stored

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.whole
        return whole if dtype is None else whole.astype(dtype)

    @cached_property
    def whole(self) -> np.ndarray:
        """All rows as a read-only array: a view of the file, or a copy where rows were selected."""
        found = self[:] if self.rows is None else self[np.arange(len(self))]
        found.flags.writeable = False
        return found

    def max(self) -> Any:
        """The largest value of all rows, which are read in pieces."""
        pieces = range(0, len(self), _PIECE)
        return max(self[start : start + _PIECE].max() for start in pieces)

    @property
    def root(self) -> str | None:
        """The root of the stored column if this is all of it."""
        all_rows = self.rows is None and self.nbytes == len(self.blocks.unverified)
        return self.blocks.root if all_rows else None

    @property
    def origin(self) -> str:
        """Says which rows of which stored column these are, without reading them; PRIVATE."""
        rows = (
            "all"
            if self.rows is None
            else hashlib.sha256(np.ascontiguousarray(self.rows).data).hexdigest()
        )
        return self.root or f"{self.blocks.root} {self.begin} {self.stored} {rows}"

    @property
    def _row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.example)

    @cached_property
    def _stored(self) -> np.ndarray:
        return self.blocks.unverified.view(self.dtype).reshape(-1, *self.example)


@dataclass(frozen=True, eq=False, repr=False)
class MappedText:
    """A column of texts.

    Attributes:
      edges: int64 [examples + 1], where each text begins in `content`, and the end.
      content: uint8, the texts in UTF-8, one after the other.
    """

    edges: Mapped
    content: Mapped

    def __len__(self) -> int:
        return len(self.edges) - 1

    def select(self, rows: slice) -> "MappedText":
        """Neighbouring texts, without reading them."""
        first, last, _ = rows.indices(len(self))
        return replace(self, edges=self.edges.select(slice(first, max(first, last) + 1)))

    @cached_property
    def whole(self) -> pa.Array:
        """All texts as a large_string array, a view of the file."""
        if not len(self):
            return pa.array([], pa.large_string())
        edges, content = self.edges[:], self.content.blocks
        if not 0 <= edges[0] <= edges[-1] <= len(content.unverified):
            raise content.unfit("they do not lie within it")
        content.verify(int(edges[0]), int(edges[-1]))
        buffers = pa.py_buffer(edges), pa.py_buffer(content.unverified)
        found = pa.LargeStringArray.from_buffers(len(self), *buffers)
        try:
            # Arrow would read beside the content without a question. Its message may quote a text.
            found.validate(full=True)
        except ValueError:
            raise content.unfit("they do not begin one after the other, or are not UTF-8") from None
        return found
