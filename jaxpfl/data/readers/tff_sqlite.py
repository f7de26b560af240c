"""TensorFlow Federated's data sets, .sqlite and .sqlite.lzma, without TensorFlow Federated.

A file has the tables examples(split_name, client_id, serialized_example_proto) and
client_metadata(client_id, split_name, num_examples), as `save_to_sql_client_data` of
tensorflow-federated writes them; each example is a tf.train.Example (see `example_proto`). Clients
come in the order of their ids, as TFF sorts them, a client's examples by rowid.

Policy:
- A file is opened read-only and must be whole (see `sqlite_file`).
- The two tables must agree: the same clients, each named once, with as many examples.
- .lzma is unpacked to a temporary file. TFF's streams carry no checksum: give `sha256` to be sure
  that no bit of a number has changed.
- An example has at most 64 MiB. Texts and ids are UTF-8, strictly.
- Errors name the file, the client by its index in the order above, and the row by its rowid, and
  never a value.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import checks
from jaxpfl.data import stream
from jaxpfl.data.population import Population
from jaxpfl.data.readers.example_proto import DefectError, ExampleDecoder, Feature
from jaxpfl.data.readers.sqlite_file import MAX_VALUE_BYTES, errors_of, machine_error, opened
from jaxpfl.data.readers.tff_schemas import SCHEMAS, Schema
from jaxpfl.data.stream import Batch, Stream
from jaxpfl.errors import CorruptFile, InputError

ENDINGS = (".sqlite", ".sqlite.lzma")
# Rows that are looked up at once, and fetched at once; bytes of messages decoded at once.
_ROWS, _FETCHED, _BATCH_BYTES = 8192, 256, 2**22
_TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"split_name", "client_id", "num_examples"},
}


def read_tff(
    path: str | Path,
    dataset: str | None = None,
    split: str | None = None,
    *,
    features: Mapping[str, Feature] | None = None,
    form: str = "canonical",
    sha256: str | None = None,
    name: str | None = None,
) -> Population:
    """Reads one split of a file into memory.

    Args:
      path: the file; one that ends in .lzma or .xz is unpacked.
      dataset: "emnist", "stackoverflow", "shakespeare", "cifar100" or "celeba" (`tff_schemas`).
      split: as TFF names it, such as "all_train"; may be left out where there is but one.
      features: what the examples hold, instead of `dataset`, for a file of one's own.
      form: "canonical": columns for this library's models; "raw": names, types and shapes as TFF
        gives them.
      sha256: of the file as it is given, in hexadecimal; checked before anything is read.
      name: what the population is called; by default the path and the split.

    Raises:
      InputError: no such file, data set or split; the tables or examples are not as declared; or
        there is more than fits into memory (`jaxpfl convert` writes such a file to disk).
      CorruptFile: the file or an example in it is truncated or damaged.
    """
    with stream_tff(
        path, dataset, split, features=features, form=form, sha256=sha256, name=name, in_memory=True
    ) as examples:
        return stream.collect(examples)


@contextlib.contextmanager
def stream_tff(
    path: str | Path,
    dataset: str | None = None,
    split: str | None = None,
    *,
    features: Mapping[str, Feature] | None = None,
    form: str = "canonical",
    sha256: str | None = None,
    name: str | None = None,
    in_memory: bool = False,
    folder: str | Path | None = None,
) -> Iterator[Stream]:
    """One split of a file as a stream of a few megabytes a batch; see `read_tff`.

    Args:
      in_memory: refuse a file that is too large for that.
      folder: where a temporary file may go; by default where the system has such files.
    """
    path = Path(path)
    schema = _schema(dataset, features)
    checks.one_of("form", form, ("canonical", "raw"))
    with opened(path, _TABLES, sha256=sha256, in_memory=in_memory, folder=folder) as connection:
        split = _choose_split(path, connection, split)
        reader = _Reader(path, connection, split, schema, form)
        yield Stream(
            batches=reader.batches(),
            examples=reader.declared_examples(),
            name=f"{path} [{split}]" if name is None else name,
            unit=schema.unit,
        )


def _schema(dataset: str | None, features: Mapping[str, Feature] | None) -> Schema:
    if (dataset is None) == (features is None):
        raise InputError(
            f"either dataset (one of {', '.join(SCHEMAS)}) or features must be given, found "
            f"{'neither' if dataset is None else 'both'}"
        )
    if dataset is not None:
        return SCHEMAS[checks.one_of("dataset", dataset, tuple(SCHEMAS))]
    return Schema(dict(features or {}), "client of the file", dict)


class _Reader:
    """The examples of one split, client by client."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, split: str, schema: Schema, form: str
    ) -> None:
        self._path = path
        self._connection = connection
        self._split = split
        self._decoder = ExampleDecoder(schema.features)
        self._finish = schema.canonical if form == "canonical" else dict
        # The client whose examples are being read: its id, its index, how many it should have.
        self._id: bytes | None = None
        self._index = -1
        self._declared = 0
        self._read = 0

    def declared_examples(self) -> int:
        query = "SELECT total(num_examples) FROM client_metadata WHERE split_name = ?"
        return int(self._connection.execute(query, (self._split,)).fetchone()[0])

    def batches(self) -> Iterator[Batch]:
        """The examples and the clients; at least one batch, the last one without examples."""
        with errors_of(self._path):
            declared = self._declared_clients()
            done: list[tuple[str, int]] = []
            for row_R, ids in self._ordered():
                client_R = self._account(ids, declared, done)
                for columns in self._decoded(row_R, client_R):
                    yield Batch(columns, *_unzip(done))
                    done.clear()
            self._close(done)
            for id_, count in declared:
                self._open(id_, count)
                self._close(done)
            yield Batch(self._finish(self._decoder.decode([])), *_unzip(done))

    def _ordered(self) -> Iterator[tuple[np.ndarray, list[bytes]]]:
        """Rowids int64 [rows] and ids of examples, sorted by id and rowid."""
        # SQLite uses an index where the file has one, and sorts on disk where it has none.
        cursor = self._connection.execute(
            "SELECT rowid, client_id FROM examples WHERE split_name = ? "
            "ORDER BY client_id COLLATE BINARY, rowid",
            (self._split,),
        )
        while found := cursor.fetchmany(_ROWS):
            rows, ids = zip(*found, strict=True)
            yield np.array(rows, np.int64), list(ids)

    def _declared_clients(self) -> Iterator[tuple[bytes, int]]:
        """Ids and numbers of examples as client_metadata has them, sorted by id."""
        cursor = self._connection.execute(
            "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ? "
            "ORDER BY client_id COLLATE BINARY",
            (self._split,),
        )
        before = None
        for index, (id_, count) in enumerate(cursor):
            where = f"{self._path}, client {index}"
            if type(id_) is not bytes or type(count) is not int or count < 0:
                raise InputError(
                    f"{where}: client_metadata must hold an id and a number of examples"
                )
            if before is not None and not before < id_:
                raise CorruptFile(f"{where}: client_metadata has this client twice")
            before = id_
            yield id_, count

    def _account(
        self,
        ids: list[bytes],
        declared: Iterator[tuple[bytes, int]],
        done: list[tuple[str, int]],
    ) -> np.ndarray:
        """The index of each row's client, int64 [rows]; clients that end here go to `done`."""
        changes = [at for at in range(1, len(ids)) if ids[at] != ids[at - 1]]
        if ids[0] != self._id:
            changes.insert(0, 0)
        client_R = np.empty(len(ids), np.int64)
        begin = 0
        for change in changes:
            client_R[begin:change] = self._index
            self._read += change - begin
            self._close(done)
            self._advance(ids[change], declared, done)
            begin = change
        client_R[begin:] = self._index
        self._read += len(ids) - begin
        return client_R

    def _advance(
        self,
        wanted: bytes,
        declared: Iterator[tuple[bytes, int]],
        done: list[tuple[str, int]],
    ) -> None:
        """Opens the client `wanted`; those before it have no examples."""
        for id_, count in declared:
            self._open(id_, count)
            if id_ == wanted:
                return
            if type(wanted) is not bytes or id_ > wanted:
                break
            self._close(done)
        raise CorruptFile(
            f"{self._path}, client {max(self._index, 0)}: examples has a client here that "
            "client_metadata does not name"
        )

    def _open(self, id_: bytes, declared: int) -> None:
        self._id, self._declared, self._read = id_, declared, 0
        self._index += 1

    def _close(self, done: list[tuple[str, int]]) -> None:
        if self._id is None:
            return
        where = f"{self._path}, client {self._index}"
        if self._read != self._declared:
            raise CorruptFile(f"{where}: client_metadata counts other examples than there are")
        try:
            done.append((self._id.decode("utf-8"), self._read))
        except UnicodeDecodeError:
            raise InputError(f"{where}: its id is not valid UTF-8") from None
        self._id = None

    def _decoded(self, row_R: np.ndarray, client_R: np.ndarray) -> Iterator[dict[str, Any]]:
        """The columns of these rows, in a few pieces."""
        begin, messages, size = 0, [], 0
        for found in self._messages(row_R, client_R):
            messages += found
            size += sum(map(len, found))
            if size >= _BATCH_BYTES:
                yield self._decode(messages, row_R[begin:], client_R[begin:])
                begin, messages, size = begin + len(messages), [], 0
        if messages:
            yield self._decode(messages, row_R[begin:], client_R[begin:])

    def _decode(
        self, messages: list[bytes], row_R: np.ndarray, client_R: np.ndarray
    ) -> dict[str, Any]:
        try:
            return self._finish(self._decoder.decode(messages))
        except DefectError as error:
            where = self._where(row_R[error.index], client_R[error.index])
            kind = CorruptFile if error.corrupt else InputError
            raise kind(f"{where}: {error.reason}") from None

    def _messages(self, row_R: np.ndarray, client_R: np.ndarray) -> Iterator[list[bytes]]:
        """The messages of these rows in their order, some hundred at a time."""
        breaks = np.flatnonzero(np.diff(row_R) != 1) + 1
        ends = [*breaks.tolist(), len(row_R)]
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            span = (int(row_R[begin]), int(row_R[end - 1]))
            cursor = self._connection.execute(
                "SELECT serialized_example_proto FROM examples WHERE rowid BETWEEN ? AND ? "
                "ORDER BY rowid",
                span,
            )
            at = begin
            while at < end:
                try:
                    found = [message for (message,) in cursor.fetchmany(_FETCHED)]
                except sqlite3.DatabaseError:
                    self._find_unreadable(row_R[at:end], client_R[at:end])
                    raise
                if set(map(type, found)) != {bytes}:
                    bad = [type(message) is bytes for message in found].index(False) if found else 0
                    where = self._where(row_R[at + bad], client_R[at + bad])
                    raise InputError(f"{where}: serialized_example_proto must be a blob")
                yield found
                at += len(found)

    def _find_unreadable(self, row_R: np.ndarray, client_R: np.ndarray) -> None:
        """Raises for the first of these rows that SQLite cannot read."""
        query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
        for row, client in zip(row_R.tolist(), client_R.tolist(), strict=True):
            try:
                self._connection.execute(query, (row,)).fetchone()
            except sqlite3.DataError:
                where = self._where(row, client)
                raise InputError(f"{where}: longer than {MAX_VALUE_BYTES} bytes") from None
            except sqlite3.DatabaseError as error:
                if machine_error(error) is None:
                    where = self._where(row, client)
                    raise CorruptFile(f"{where}: its SQLite pages are damaged") from None
                raise

    def _where(self, row: int, client: int) -> str:
        return f"{self._path}, client {client}, row {row}"


def _unzip(done: list[tuple[str, int]]) -> tuple[list[str], list[int]]:
    return [id_ for id_, _ in done], [count for _, count in done]


def _choose_split(path: Path, connection: sqlite3.Connection, split: str | None) -> str:
    query = "SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name LIMIT 50"
    found = [row[0] for row in connection.execute(query)]
    splits = [name.decode("utf-8", "replace") for name in found if type(name) is bytes]
    if not splits:
        raise InputError(f"{path} has no clients in its table 'client_metadata'")
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        asked = "no split is given" if split is None else f"there is no split {split!r}"
        raise InputError(f"{path}: {asked}; it has {', '.join(map(repr, splits))}")
    return split
