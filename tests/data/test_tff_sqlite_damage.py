"""TFF's files that are damaged, too large or of another kind: file, client and row are named."""

import sqlite3

import numpy as np
import pytest

from jaxpfl import checks
from jaxpfl.data import open as open_population
from jaxpfl.data.readers import tff_sqlite
from jaxpfl.data.readers.tff_sqlite import stream_tff
from jaxpfl.errors import CorruptFile, InputError
from tests.data.tff_files import (
    EXAMPLES,
    FOUR,
    METADATA,
    SCHEMA,
    SECRET,
    clients,
    example,
    read,
    row,
    write_file,
)
from tests.data.traces import no_trace
from tests.refusals import refusal


@pytest.fixture
def path(tmp_path):
    return write_file(tmp_path / "some.sqlite", clients(FOUR))


def test_a_file_that_does_not_fit_the_memory_is_streamed_alone(path, monkeypatch):
    monkeypatch.setattr(checks, "machine_memory", lambda: 8000)
    refusal(lambda: open_population(f"{path}?dataset=shakespeare"), "jaxpfl convert")
    with stream_tff(path, SCHEMA) as stream:
        assert sum(len(batch.sizes) for batch in stream.batches) == 4


BAD_BLOB = "UPDATE examples SET serialized_example_proto = ? WHERE rowid = 5"
_NOT_ONCE = ": client_metadata must name each client of the table examples once"
_OTHER_NUMBER = ": client_metadata states another number"


def delete(table: str, where: str) -> list[tuple[str, tuple]]:
    return [(f"DELETE FROM {table} WHERE {where}", ())]


def change(table: str, what: str, where: str) -> list[tuple[str, tuple]]:
    return [(f"UPDATE {table} SET {what} WHERE {where}", ())]


def blob(content) -> list[tuple[str, tuple]]:
    return [(BAD_BLOB, (content,))]


TWICE = "INSERT INTO client_metadata VALUES ('d', 'train', 3)"
NOT_UTF8 = f"client_id = CAST('d{SECRET}' || x'ff' AS TEXT)", "client_id = 'd'"
VIEW = ("ALTER TABLE examples RENAME TO o", "CREATE VIEW examples AS SELECT * FROM o")
# In order: a has rows 6-9, b none, d 1-3, the secret one 4-5.
DAMAGED = {
    "truncated": (blob(row(1)[:-3]), "client 3, row 5: .*truncated"),
    "garbage": (blob(SECRET.encode()), "client 3, row 5: "),
    "too few": (
        change("client_metadata", "num_examples = 5", "client_id = 'a'"),
        "client 0" + _OTHER_NUMBER,
    ),
    "too many": (delete("examples", "rowid = 5"), "client 3" + _OTHER_NUMBER),
    "no examples": (delete("examples", "client_id = 'd'"), "client 2" + _OTHER_NUMBER),
    "id a blob": (change("examples", "client_id = x'61'", "rowid = 7"), "client 0" + _OTHER_NUMBER),
    "negative": (
        change("client_metadata", "num_examples = -1", "client_id = 'd'"),
        "client 2" + _OTHER_NUMBER,
    ),
    "twice": ([(TWICE, ())], "client 2" + _NOT_ONCE),
    **{
        f"unnamed {client}": (
            delete("client_metadata", f"client_id LIKE '{client}%'"),
            f"client {index}{_NOT_ONCE}",
        )
        for client, index in (("a", 0), ("d", 2), (SECRET, 3))
    },
}
OF_ANOTHER_KIND = {
    "empty": (blob(b""), 'client 3, row 5: it has no feature "x"'),
    "extra": (
        blob(example({"x": 1, "t": b"", SECRET: 1})),
        "client 3, row 5: it has a feature that is not declared; declared are x, t",
    ),
    "UTF-8": (
        blob(example({"x": 1, "t": b"rosebud \xff"})),
        'client 3, row 5: feature "t": byte 9 is not valid UTF-8',
    ),
    "number": (blob(7), "client 3, row 5: .* must be a blob"),
    "no number": (
        change("client_metadata", "num_examples = 'rosebud'", "client_id = 'd'"),
        "table 'client_metadata' must hold texts as ids, and whole numbers",
    ),
    "id not UTF-8": (
        [*change("client_metadata", *NOT_UTF8), *change("examples", *NOT_UTF8)],
        "client 2: its id is not valid UTF-8",
    ),
    "no table": ([("DROP TABLE client_metadata", ())], "no table 'client_metadata'"),
    "no column": (
        [("ALTER TABLE examples RENAME COLUMN client_id TO other", ())],
        "table 'examples' has no column 'client_id'",
    ),
    "own rowid": (
        [("ALTER TABLE examples ADD COLUMN rowid INTEGER", ())],
        "'examples' must be a plain table with SQLite's own rowid",
    ),
    "view": ([(each, ()) for each in VIEW], "no table 'examples'"),
    "no clients": (delete("client_metadata", "1"), "has no clients"),
}


@pytest.mark.parametrize(
    "after, what, kind",
    [
        pytest.param(*case, kind, id=name)
        for kind, cases in ((CorruptFile, DAMAGED), (InputError, OF_ANOTHER_KIND))
        for name, case in cases.items()
    ],
)
def test_defects_are_named_by_file_client_and_row(after, what, kind, tmp_path):
    path = write_file(tmp_path / "some.sqlite", clients(FOUR), after=after)
    with pytest.raises(kind, match=what) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and SECRET not in message.removeprefix(str(path))
    no_trace(caught.value, SECRET)


@pytest.mark.parametrize("size", [1, 250, 2**22])
@pytest.mark.parametrize(("row_id", "client"), [(1, 2), (5, 3), (9, 0)])
def test_rows_are_named_in_batches_of_any_size(size, row_id, client, tmp_path, monkeypatch):
    monkeypatch.setattr(tff_sqlite, "_BATCH_BYTES", size)
    bad = [(BAD_BLOB.replace("5", str(row_id)), (row(1)[:-3],))]
    path = write_file(tmp_path / "x.sqlite", clients(FOUR), after=bad)
    refusal(lambda: read(path), f"client {client}, row {row_id}: ", CorruptFile)


def test_tables_of_other_kinds_are_refused(tmp_path):
    key = ", PRIMARY KEY (client_id)) WITHOUT ROWID"
    tables = (EXAMPLES.replace(" NOT NULL)", " NOT NULL" + key), METADATA)
    path = write_file(tmp_path / "keyed.sqlite", {"a": [row(1)]}, tables=tables)
    refusal(lambda: read(path), "must be a plain table with SQLite's own rowid")
    with sqlite3.connect(tmp_path / "virtual.sqlite") as connection:
        connection.execute("CREATE VIRTUAL TABLE examples USING fts4(client_id)")
    connection.close()
    refusal(lambda: read(tmp_path / "virtual.sqlite"), "'examples' must be a plain table")
    with sqlite3.connect(tmp_path / "wide.sqlite") as connection:
        connection.executescript(f"PRAGMA encoding = 'UTF-16le'; {EXAMPLES}; {METADATA}")
    connection.close()
    refusal(lambda: read(tmp_path / "wide.sqlite"), "must hold its texts in UTF-8")


def test_files_that_are_no_whole_sqlite_files(path, tmp_path):
    whole = path.read_bytes()
    cases = {
        b"": "is empty, truncated or not an SQLite file",
        b"SQLite format 3\0": "not an SQLite file",
        b"text " * 100: "not an SQLite file",
        whole[:-1]: "its SQLite header counts",
        whole[: len(whole) // 2]: "its SQLite header counts",
        whole + bytes(4096): "its SQLite header counts",
    }
    for content, what in cases.items():
        bad = tmp_path / "bad.sqlite"
        bad.write_bytes(content)
        with pytest.raises(CorruptFile, match=what):
            read(bad)
    refusal(lambda: read(tmp_path / "absent.sqlite"), "there is no such file")
    path.with_name("some.sqlite-wal").write_bytes(b"pages")
    refusal(lambda: read(path), "unfinished writes in some.sqlite-wal")


def test_damaged_pages_never_pass_as_another_population(tmp_path):
    """A page overwritten anywhere but in a message: refused, or the same clients and sizes."""
    path = write_file(tmp_path / "some.sqlite", {f"c{i:03}": [row(i)] * 3 for i in range(200)})
    whole, expected = path.read_bytes(), read(path)
    generator = np.random.default_rng(0)
    refused = 0
    for at in range(100, len(whole), 1024):
        noise = generator.integers(0, 256, 64, np.uint8).tobytes()
        path.write_bytes(whole[:at] + noise + whole[at + 64 :])
        try:
            found = read(path)
        except InputError as error:
            assert SECRET not in str(error)
            refused += 1
        else:
            assert found.client_ids.equals(expected.client_ids)
            assert found.sizes().tolist() == expected.sizes().tolist()
    assert refused > 10


def test_a_row_on_a_damaged_page_is_named(tmp_path):
    """A long message spans pages of its own; the page of one is made another kind of page."""
    long = [example({"x": i, "t": bytes([97 + i]) * 100_000}) for i in range(4)]
    path = write_file(tmp_path / "long.sqlite", {"a": long[:2], "b": long[2:]})
    whole = bytearray(path.read_bytes())
    # Overflow pages begin with the number of the next one: one that is not there.
    page = whole.index(b"c" * 4092) // 4096
    whole[page * 4096 : page * 4096 + 4] = (10**6).to_bytes(4, "big")
    path.write_bytes(whole)
    refusal(lambda: read(path), "long.sqlite, client 1, row 3: its SQLite", CorruptFile)


def test_a_message_beyond_the_limit_and_a_schema_that_is_no_utf8_are_refused(path, monkeypatch):
    with sqlite3.connect(path) as connection:
        connection.execute(BAD_BLOB, (row(1, "x" * 600),))
    connection.close()
    with monkeypatch.context() as patched:
        patched.setattr(tff_sqlite, "MAX_VALUE_BYTES", 500)
        refusal(lambda: read(path), "client 3, row 5: longer than")
    whole = path.read_bytes()
    at = whole.index(b"(", whole.index(b"CREATE TABLE examples"))
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    refusal(lambda: read(path), "some.sqlite is damaged: its schema is no valid UTF-8", CorruptFile)


def test_damaged_places_of_rows_are_refused(path):
    """TRUST 6: the page of the table names rows that are others by the index, or twice the same."""
    whole, refused = path.read_bytes(), 0
    # After its header of 8 bytes, a page of SQLite has two bytes for the place of each row.
    for low in range(4096 + 9, 4096 + 9 + 2 * 9, 2):
        for value in range(1, 256, 4):
            path.write_bytes(whole[:low] + bytes([value]) + whole[low + 1 :])
            try:
                read(path)
            except (CorruptFile, InputError):
                refused += 1
    assert refused
