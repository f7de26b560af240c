"""Populations that come batch by batch, such as those that are larger than memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from jaxpfl.data.columns import Column
from jaxpfl.data.sequences import Sequences


class Batch(NamedTuple):
    """Examples of some clients, in the clients' order.

    Attributes:
      columns: the same names, types and example shapes in every batch of a stream.
      client_ids: the clients that this batch completes, with or without examples.
      sizes: how many examples each of these has, including those in earlier batches.
    """

    columns: Mapping[str, Column]
    client_ids: Sequence[str]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Stream:
    """A population that comes in batches, once.

    Attributes:
      batches: at least one, so that the columns' types are known.
      examples: about how many there are in all, for a progress bar. PRIVATE.
      fingerprint: the population's, or None for the `content` of the columns.
      dropped: how many rows of a table lacked a value and were left out. PRIVATE.
    """

    batches: Iterator[Batch]
    examples: int
    name: str
    unit: str
    splitting: str = "words"
    fingerprint: str | None = None
    dropped: int = 0


class Encoder(Protocol):
    """Makes sequences of ids of texts."""

    def sequences(self, texts: pa.Array) -> Sequences:
        """The ids of each text of a large_string array."""
        ...

    def save(self, path: Path) -> None:
        """Writes the vocabulary, always the same bytes."""
        ...
