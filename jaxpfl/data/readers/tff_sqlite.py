"""TensorFlow Federated's data sets, .sqlite files, without TensorFlow Federated.

A file has the tables examples(split_name, client_id, serialized_example_proto) and
client_metadata(client_id, split_name, num_examples), as `save_to_sql_client_data` of
tensorflow-federated writes them; each example is a tf.train.Example (see `tff_examples`). Clients
come in the order of their ids, as TFF sorts them, a client's examples by rowid.

Policy:
- A file is opened read-only and must be complete (see `sqlite_file`).
- The two tables must have the same clients, each once, with the same numbers of examples.
- SQLite has no checksums: only the SHA-256 that `jaxpfl data get` compares can make sure that no
  value was altered. It also unpacks the files, which TFF publishes as .lzma.
- An example has at most 64 MiB. Texts and ids must be valid UTF-8.
- Errors name the file, the client by its index in the order above, and the row by its rowid, and
  never a value.
"""

import contextlib
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.data.population import Population, collect
from jaxpfl.data.readers.compressed import decoded
from jaxpfl.data.readers.sqlite_file import MAX_VALUE_BYTES, errors_of, machine_error, opened
from jaxpfl.data.readers.tff_examples import DefectError, ExampleDecoder, Feature
from jaxpfl.data.readers.tff_schemas import SCHEMAS, Schema
from jaxpfl.data.stream import Batch, Stream
from jaxpfl.errors import CorruptFile, InputError

_BATCH_BYTES = 2**21
_TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"split_name", "client_id", "num_examples"},
}


def read_tff(
    path: Path, dataset: str | None = None, split: str | None = None, **options: Any
) -> Population:
    """Reads one split of a file into memory, with the arguments of `stream_tff`.

    Raises:
      InputError: as `stream_tff`; or the file is too large for memory (`jaxpfl convert` writes such
        a file to disk).
      CorruptFile: the file or an example in it is truncated or damaged.
    """
    with stream_tff(path, dataset, split, in_memory=True, **options) as examples:
        return collect(examples)


@contextlib.contextmanager
def stream_tff(
    path: Path,
    dataset: str | None = None,
    split: str | None = None,
    *,
    features: Mapping[str, Feature] | None = None,
    form: str = "canonical",
    name: str | None = None,
    in_memory: bool = False,
) -> Iterator[Stream]:
    """One split of a file as a stream of batches of a few megabytes.

    Args:
      dataset: "emnist", "stackoverflow", "shakespeare", "cifar100" or "celeba" (`tff_schemas`).
      split: TFF's name of it, such as "all_train"; not needed if the file has only one.
      features: the schema of the examples, in place of `dataset`, for a file of your own.
      form: "canonical" for the columns of this library's models, or "raw" for the names, types and
        shapes that TFF gives (see `tff_schemas`).
      name: of the population; by default the path and the split.
      in_memory: as for `sqlite_file.opened`.

    Raises:
      InputError: there is no such file, data set or split, or the tables or examples do not follow
        the schema.
      CorruptFile: the file or an example in it is truncated or damaged.
    """
    schema = _schema(dataset, features)
    checks.one_of("form", form, ("canonical", "raw"))
    with opened(path, _TABLES, in_memory=in_memory) as connection:
        split = _choose_split(path, connection, split)
        query = "SELECT total(num_examples) FROM client_metadata WHERE split_name = ?"
        examples = int(connection.execute(query, (split,)).fetchone()[0])
        described = (name or f"{path} [{split}]", schema.unit, schema.splitting)
        finish = schema.canonical if form == "canonical" else dict
        reader = _Reader(path, ExampleDecoder(schema.features), finish)
        yield Stream(reader.batches(connection, split), examples, *described)


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
    def __init__(
        self, path: Path, decoder: ExampleDecoder, finish: Callable[[dict], dict[str, Any]]
    ) -> None:
        self._path, self._decoder, self._finish = path, decoder, finish
        # Of the next batch: messages, the client and row of each, and the clients that were read
        # completely, with their numbers of examples.
        self._messages: list[bytes] = []
        self._places: list[tuple[int, int]] = []
        self._done: list[tuple[str, int]] = []

    def batches(self, connection: sqlite3.Connection, split: str) -> Iterator[Batch]:
        """The examples; at least one batch, the last one perhaps without any."""
        path, size = self._path, 0
        with errors_of(path):
            clients = enumerate(_declared_clients(path, connection, split))
            client = -1
            for id_, rows in itertools.groupby(_rows(connection, split), lambda row: row[0]):
                for client, (declared, number) in clients:
                    named = declared == id_
                    if named or type(id_) is not bytes or id_ < declared:
                        break
                    self._complete(client, declared, number, 0)
                else:
                    named = False
                if not named:
                    raise CorruptFile(
                        f"{path}, client {max(client, 0)}: the table examples has a client here "
                        "that client_metadata does not name"
                    )
                read = 0
                for _, row in rows:
                    read += 1
                    message = _message(f"{path}, client {client}, row {row}", connection, row)
                    self._messages.append(message)
                    self._places.append((client, row))
                    size += len(message)
                    if size >= _BATCH_BYTES:
                        yield self._batch()
                        size = 0
                self._complete(client, declared, number, read)
            for client, (declared, number) in clients:
                self._complete(client, declared, number, 0)
            yield self._batch()

    def _complete(self, client: int, id_: bytes, declared: int, read: int) -> None:
        where = f"{self._path}, client {client}"
        if read != declared:
            raise CorruptFile(f"{where}: client_metadata states another number of examples")
        name, bad = decoded(id_)
        if bad:
            raise InputError(f"{where}: its id is not valid UTF-8")
        self._done.append((name, read))

    def _batch(self) -> Batch:
        try:
            columns = self._finish(self._decoder.decode(self._messages))
        except DefectError as error:
            client, row = self._places[error.index]
            kind = CorruptFile if error.corrupt else InputError
            where = f"{self._path}, client {client}, row {row}"
            raise kind(f"{where}: {error.reason}") from None
        batch = Batch(columns, [id_ for id_, _ in self._done], [size for _, size in self._done])
        self._messages, self._places, self._done = [], [], []
        return batch


def _rows(connection: sqlite3.Connection, split: str) -> Iterator[tuple[bytes, int]]:
    """Client id and rowid of each example, sorted by both: on the disk if there is no index."""
    return connection.execute(
        "SELECT client_id, rowid FROM examples WHERE split_name = ? "
        "ORDER BY client_id COLLATE BINARY, rowid",
        (split,),
    )


def _message(where: str, connection: sqlite3.Connection, row: int) -> bytes:
    """The message of a row. Each is read alone: none is read twice, and a bad one is named."""
    query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
    try:
        found = connection.execute(query, (row,)).fetchone()
    except sqlite3.DataError:
        raise InputError(f"{where}: longer than {MAX_VALUE_BYTES} bytes") from None
    except sqlite3.DatabaseError as error:
        if machine_error(error) is not None:
            raise
        found = None
    # An index, by which rows are found, may name one that the table does not have.
    if found is None:
        raise CorruptFile(f"{where}: its SQLite pages are damaged")
    if type(found[0]) is not bytes:
        raise InputError(f"{where}: serialized_example_proto must be a blob")
    return found[0]


def _declared_clients(
    path: Path, connection: sqlite3.Connection, split: str
) -> Iterator[tuple[bytes, int]]:
    """Ids and numbers of examples as client_metadata has them, sorted by id."""
    cursor = connection.execute(
        "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ? "
        "ORDER BY client_id COLLATE BINARY",
        (split,),
    )
    before = None
    for index, (id_, number) in enumerate(cursor):
        where = f"{path}, client {index}"
        if type(id_) is not bytes or type(number) is not int or number < 0:
            raise InputError(f"{where}: client_metadata must hold an id and a number of examples")
        if before is not None and id_ <= before:
            raise CorruptFile(f"{where}: client_metadata has this client twice")
        before = id_
        yield id_, number


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
