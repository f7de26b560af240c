"""Populations larger than memory: read batch by batch, written batch by batch.

What is written is first staged, see `data.staging`, so that an interrupted `write` is continued.
This takes room for twice the population on the disk, and memory for one batch, whatever the
population's size.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from jaxpfl.data import storage
from jaxpfl.data.columns import Column, as_column, concatenated, part, text_array
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.data.sequences import Sequences
from jaxpfl.data.staging import Staging, partial_folder
from jaxpfl.errors import InputError
from jaxpfl.progress import Progress

_EXAMPLES = 2**15


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
      batches: at least one, so that the columns' types are known. Examples before those that the
        stream begins with are in none of them, but all clients are.
      examples: about how many there are in all, for a progress bar. PRIVATE.
      name, unit, splitting: as in `Population`.
      fingerprint: of the population, or None for the `content` of the columns.
    """

    batches: Iterator[Batch]
    examples: int
    name: str
    unit: str
    splitting: str = "words"
    fingerprint: str | None = None


@dataclass(frozen=True)
class Source:
    """What can be read as a stream, from any example on.

    Attributes:
      identity: says which data it is, in JSON's types: another source does not continue it.
      stream: opens the stream of the examples from this number on; temporary files go to a folder.
    """

    identity: Mapping[str, Any]
    stream: Callable[[int, Path], AbstractContextManager[Stream]] = field(repr=False)


class Encoder(Protocol):
    """Makes sequences of ids of texts."""

    @property
    def encoding(self) -> Mapping[str, Any]:
        """What the ids stand for, in JSON's types; see `Sequences`."""
        ...

    def sequences(self, texts: pa.Array) -> Sequences:
        """The ids of each text of a large_string array."""
        ...

    def save(self, path: Path) -> None:
        """Writes the vocabulary, always the same bytes."""
        ...


def of_population(population: Population) -> Source:
    """A population, in memory or mapped from a folder, as a source of blocks of examples."""

    def batches(begin: int) -> Iterator[Batch]:
        ids, sizes, seen = population.client_ids, population.sizes(), 0
        starts = range(begin, max(population.num_examples, begin + 1), _EXAMPLES)
        for start in starts:
            rows = slice(start, min(start + _EXAMPLES, population.num_examples))
            done = int(np.searchsorted(population.offsets[1:], rows.stop, "right"))
            yield Batch(
                population.rows(rows), ids[seen:done].to_pylist(), sizes[seen:done].tolist()
            )
            seen = done

    def stream(begin: int, _: Path) -> AbstractContextManager[Stream]:
        described = (population.name, population.unit, population.splitting)
        found = Stream(batches(begin), population.num_examples, *described, population.fingerprint)
        return contextlib.nullcontext(found)

    return Source({"content": population.content}, stream)


def behind(stream: Stream, begin: int) -> Stream:
    """The stream from the example with this number on; all clients stay in it."""

    def batches() -> Iterator[Batch]:
        left = begin
        for batch in stream.batches:
            rows = slice(left, None)
            left = max(0, left - len(next(iter(batch.columns.values()))))
            yield batch._replace(columns={k: part(v, rows) for k, v in batch.columns.items()})

    return replace(stream, batches=batches())


def collect(stream: Stream) -> Population:
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
        columns[name] = concatenated(parts)
        parts.clear()
    ids, described = text_array(client_ids), (stream.name, stream.unit, stream.splitting)
    return Population(columns, offsets_of(sizes), ids, *described)


def write(
    folder: str | Path,
    source: Source,
    encoder: Encoder | None = None,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """Writes the source's population to a new folder, with the same files as `Population.save`.

    An interrupted call leaves what it had done next to the folder. The next call with the same
    source and encoder goes on from there, and what it writes is the same to the byte.

    Args:
      encoder: writes only a column "tokens", which it makes of the column "text".
      progress: is seen the number of examples after each batch.

    Returns:
      The numbers of clients and of examples.
    """
    request = {**source.identity, "encoding": None if encoder is None else dict(encoder.encoding)}
    with partial_folder(Path(folder)) as partial:
        ids: list[pa.Array] = []
        sizes: list[np.ndarray] = []
        with contextlib.ExitStack() as opened:
            staging = opened.enter_context(Staging.opened(partial / "staging", request))
            # Next to the folder, where there must be room for the data anyway; /tmp may have less.
            temporary = opened.enter_context(_temporary(partial / "unpacked"))
            stream = opened.enter_context(source.stream(staging.examples, temporary))
            if progress:
                progress.begin(staging.examples, stream.examples)
            for batch in stream.batches:
                held = {name: as_column(f"column {name!r}", c) for name, c in batch.columns.items()}
                if encoder is not None:
                    held = _encoded(held, encoder, stream)
                staging.append(held)
                ids.append(text_array(list(batch.client_ids)))
                sizes.append(np.asarray(batch.sizes, np.int64))
                if progress:
                    progress.update(staging.examples)
            staging.commit()
        client_ids, offsets = pa.concat_arrays(ids), offsets_of(np.concatenate(sizes))
        if len(client_ids) != len(offsets) - 1 or len(client_ids.unique()) != len(client_ids):
            raise InputError("the clients of a stream must have one size each and different ids")
        written = staging.columns if encoder is None else (_TOKENS,)
        staging.write(partial / storage.EXAMPLES, written, offsets)
        fingerprint = stream.fingerprint
        if encoder is not None:
            if fingerprint is None:
                # That of the text, so that texts and tokens are charged to the same ledger.
                read = [name for name in staging.columns if name != _TOKENS]
                fingerprint = staging.content(read, offsets)
            encoder.save(partial / storage.VOCABULARY)
        types = {name: staging.columns[name].type for name in written}
        described = (stream.name, stream.unit, stream.splitting, fingerprint)
        storage.finish(partial, storage.Stored(types, offsets, client_ids, *described))
        shutil.rmtree(partial / "staging")
    return len(client_ids), int(offsets[-1])


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    # A process that was killed could not remove its own.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# No source has a column of texts of this name: those that are read in one have this library's own.
_TOKENS = "tokens"


def _encoded(held: dict[str, Column], encoder: Encoder, stream: Stream) -> dict[str, Column]:
    """The tokens of a batch, and what else must be staged for the fingerprint."""
    texts = held.get("text")
    if not isinstance(texts, pa.Array):
        found = ", ".join(map(repr, held)) or "none"
        raise InputError(f"{stream.name} must have a column 'text' to tokenise, found {found}")
    tokens = {_TOKENS: encoder.sequences(texts)}
    return tokens if stream.fingerprint is not None else {**held, **tokens}
