"""TensorFlow Federated's data sets, .sqlite and .sqlite.lzma, without TensorFlow Federated.

A file has the tables examples(split_name, client_id, serialized_example_proto) and
client_metadata(client_id, split_name, num_examples), as `save_to_sql_client_data` of
tensorflow-federated writes them; each example is a tf.train.Example (see `example_proto`). Clients
come in the order of their ids, as TFF sorts them, a client's examples by rowid.

Policy:
- A file is opened read-only and must be complete (see `sqlite_file`).
- The two tables must have the same clients, each once, with the same numbers of examples.
- .lzma is unpacked to a temporary file. TFF's streams carry no checksum, so that only `sha256` can
  make sure that no value was altered.
- An example has at most 64 MiB. Texts and ids must be valid UTF-8.
- Errors name the file, the client by its index in the order above, and the row by its rowid, and
  never a value.
"""

import contextlib
import itertools
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
# Rows whose ids are read at once, messages fetched at once, and bytes of messages decoded at once.
_ROWS, _FETCHED, _BATCH_BYTES = 8192, 256, 2**22
_TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"split_name", "client_id", "num_examples"},
}


def read_tff(
    path: str | Path, dataset: str | None = None, split: str | None = None, **options: Any
) -> Population:
    """Reads one split of a file into memory, with the arguments of `stream_tff`.

    Raises:
      InputError: as `stream_tff`; or the file is too large for memory (`jaxpfl convert` writes such
        a file to disk).
      CorruptFile: the file or an example in it is truncated or damaged.
    """
    with stream_tff(path, dataset, split, in_memory=True, **options) as examples:
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
    begin: int = 0,
) -> Iterator[Stream]:
    """One split of a file as a stream of batches of a few megabytes.

    Args:
      path: the file; one that ends in .lzma or .xz is unpacked.
      dataset: "emnist", "stackoverflow", "shakespeare", "cifar100" or "celeba" (`tff_schemas`).
      split: TFF's name of it, such as "all_train"; not needed if the file has only one.
      features: the schema of the examples, in place of `dataset`, for a file of your own.
      form: "canonical" for the columns of this library's models, or "raw" for the names, types and
        shapes that TFF gives (see `tff_schemas`).
      sha256: of the file before it is unpacked, in hexadecimal; checked before anything else.
      name: of the population; by default the path and the split.
      in_memory, folder: as for `sqlite_file.opened`.
      begin: the number of the first example that is read; of those before it only the client is.

    Raises:
      InputError: there is no such file, data set or split, or the tables or examples do not follow
        the schema.
      CorruptFile: the file or an example in it is truncated or damaged.
    """
    path = Path(path)
    schema = _schema(dataset, features)
    checks.one_of("form", form, ("canonical", "raw"))
    with opened(path, _TABLES, sha256=sha256, in_memory=in_memory, folder=folder) as connection:
        split = _choose_split(path, connection, split)
        reader = _Reader(path, connection, split, schema, form)
        query = "SELECT total(num_examples) FROM client_metadata WHERE split_name = ?"
        examples = int(connection.execute(query, (split,)).fetchone()[0])
        described = (name or f"{path} [{split}]", schema.unit, schema.splitting)
        yield Stream(reader.batches(begin), examples, *described)


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
        # The client whose examples are being read: its id, its index, how many examples it should
        # have and how many were read.
        self._id: bytes | None = None
        self._index, self._declared, self._read = -1, 0, 0
        self._clients = self._declared_clients()
        # Clients that were read completely and are in no batch yet, with their examples.
        self._done: list[tuple[str, int]] = []

    def batches(self, begin: int) -> Iterator[Batch]:
        """The examples from `begin` on; at least one batch, the last one without examples."""
        with errors_of(self._path):
            for row_R, ids in self._ordered():
                client_R = self._account(ids)
                passed = min(begin, len(ids))
                begin -= passed
                if passed == len(ids):
                    continue
                for columns in self._decoded(row_R[passed:], client_R[passed:]):
                    yield self._batch(columns)
            self._close()
            for id_, count in self._clients:
                self._open(id_, count)
                self._close()
            yield self._batch(self._finish(self._decoder.decode([])))

    def _batch(self, columns: dict[str, Any]) -> Batch:
        done, self._done = self._done, []
        return Batch(columns, [id_ for id_, _ in done], [count for _, count in done])

    def _ordered(self) -> Iterator[tuple[np.ndarray, list[bytes]]]:
        """Rowids int64 [rows] and ids of examples, sorted by id and rowid."""
        # SQLite uses an index if the file has one, and else sorts on disk.
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
            if before is not None and id_ <= before:
                raise CorruptFile(f"{where}: client_metadata has this client twice")
            before = id_
            yield id_, count

    def _account(self, ids: list[bytes]) -> np.ndarray:
        """The index of each row's client, int64 [rows]."""
        client_R = np.empty(len(ids), np.int64)
        begin = 0
        for id_, rows in itertools.groupby(ids):
            end = begin + sum(1 for _ in rows)
            if id_ != self._id:
                self._close()
                self._advance(id_)
            client_R[begin:end] = self._index
            self._read += end - begin
            begin = end
        return client_R

    def _advance(self, wanted: bytes) -> None:
        """Opens the client `wanted`; those before it have no examples."""
        for id_, count in self._clients:
            self._open(id_, count)
            if id_ == wanted:
                return
            if type(wanted) is not bytes or id_ > wanted:
                break
            self._close()
        raise CorruptFile(
            f"{self._path}, client {max(self._index, 0)}: the table examples has a client here "
            "that client_metadata does not name"
        )

    def _open(self, id_: bytes, declared: int) -> None:
        self._id, self._declared, self._read = id_, declared, 0
        self._index += 1

    def _close(self) -> None:
        if self._id is None:
            return
        where = f"{self._path}, client {self._index}"
        if self._read != self._declared:
            raise CorruptFile(f"{where}: client_metadata states another number of examples")
        try:
            self._done.append((self._id.decode("utf-8"), self._read))
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
                if not 0 < len(found) <= end - at:
                    # The index, by which the rows were found, and the table contradict each other.
                    where = self._where(row_R[at], client_R[at])
                    raise CorruptFile(f"{where}: its SQLite pages are damaged")
                if set(map(type, found)) != {bytes}:
                    bad = [type(message) is bytes for message in found].index(False)
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
