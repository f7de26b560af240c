"""TFF's files: read exactly as TFF reads them; what is damaged is named by client and row."""

import hashlib
import json
import lzma
import os
import re
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.data.readers import sqlite_file, tff_sqlite
from jaxpfl.data.readers.example_proto import Feature
from jaxpfl.data.readers.tff_sqlite import read_tff, stream_tff
from jaxpfl.errors import CorruptFile, InputError
from tests.data.populations import same
from tests.data.tff_files import EXAMPLES, METADATA, example, write_file

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLE = {
    "label": Feature("int32"),
    "pixels": Feature("float32", (4, 4)),
    "score": Feature("int64"),
    "tokens": Feature("text"),
}
SCHEMA = {"x": Feature("int64"), "t": Feature("text")}
SECRET = "rosebud"


@pytest.fixture(scope="session")
def fixtures(data_folder):
    folder = data_folder.parent / "fixtures" / "tff"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: TFF's own files are not at hand")
    return folder


def row(x, text=SECRET):
    return example({"x": x, "t": text.encode()})


def clients(sizes: dict[str, int]) -> dict[str, list[bytes]]:
    return {name: [row(100 * i + k) for k in range(n)] for i, (name, n) in enumerate(sizes.items())}


FOUR = {"d": 3, "b": 0, f"{SECRET} c": 2, "a": 4}


@pytest.fixture
def path(tmp_path):
    return write_file(tmp_path / "some.sqlite", clients(FOUR))


def read(path, **more) -> Population:
    return read_tff(path, features=SCHEMA, **more)


@pytest.mark.parametrize(
    "file, dataset, split",
    [
        ("tff_sample", None, "train"),
        ("tff_sample", None, "test"),
        ("tff_emnist_synthetic", "emnist", "default_split"),
        ("tff_shakespeare_synthetic", "shakespeare", "default_split"),
        ("tff_stackoverflow_synthetic", "stackoverflow", "default_split"),
    ],
)
def test_fixtures_are_read_exactly_as_tff_reads_them(file, dataset, split, fixtures):
    """Golden files are what tensorflow-federated 0.87 gives: `tools/tff_check.py --golden`."""
    source = fixtures / f"{file}.sqlite"
    features = None if dataset else SAMPLE
    population = read_tff(source, dataset, split, features=features, form="raw")
    with np.load(GOLDEN / f"{file}_{split}.npz", allow_pickle=False) as golden:
        assert population.client_ids.to_pylist() == json.loads(golden["ids"].tobytes())
        np.testing.assert_array_equal(population.sizes(), golden["sizes"], strict=True)
        held = {name.partition(":")[2] for name in golden.files if ":" in name}
        assert list(population.columns) == sorted(held)
        for name, column in population.columns.items():
            if isinstance(column, np.ndarray):
                np.testing.assert_array_equal(column, golden[f"array:{name}"], strict=True)
                continue
            texts = [text.encode() for text in column.to_pylist()]
            assert [len(text) for text in texts] == golden[f"lengths:{name}"].tolist()
            assert b"".join(texts) == golden[f"bytes:{name}"].tobytes()


def test_the_sample_holds_what_was_written(fixtures):
    expected = json.loads((fixtures / "tff_sample_expected.json").read_text())
    for split, ids in (("train", ["client_a", "client_b"]), ("test", ["f0000_14"])):
        population = read_tff(fixtures / "tff_sample.sqlite", split=split, features=SAMPLE)
        assert population.client_ids.to_pylist() == ids
        for index, client in enumerate(ids):
            for name, column in population.examples(index).items():
                values = column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()
                assert values == expected[client][name]


def test_canonical_columns_are_what_models_read(fixtures):
    raw = read_tff(fixtures / "tff_emnist_synthetic.sqlite", "emnist", form="raw")
    emnist = open_population(f"{fixtures}/tff_emnist_synthetic.sqlite?dataset=emnist")
    image = emnist.columns["image"]
    assert image.dtype == np.float32 and image.shape == (20, 28, 28, 1)
    assert (image[..., 0] == 1 - raw.columns["pixels"]).all() and image[:, 0, 0].max() == 0
    assert (emnist.columns["label"] == np.tile(np.arange(10), 2)).all()
    assert emnist.unit == "writer"
    words = read_tff(fixtures / "tff_stackoverflow_synthetic.sqlite", "stackoverflow")
    assert list(words.columns) == ["text", "creation_date", "score", "tags", "title", "type"]
    assert words.columns["text"][1].as_py() == "css3 does finally define the"
    plays = read_tff(fixtures / "tff_shakespeare_synthetic.sqlite", "shakespeare")
    assert plays.columns["text"].to_pylist()[-6:-4] == ["Hark!", "When?"]


def test_small_letters_of_emnist_36_have_the_labels_of_capitals(tmp_path):
    pixels = np.ones((28, 28), np.float32)
    examples = [example({"pixels": pixels, "label": label}) for label in (0, 9, 10, 35, 36, 61)]
    found = read_tff(write_file(tmp_path / "e.sqlite", {"writer": examples}), "emnist_36")
    assert found.columns["label"].tolist() == [0, 9, 10, 35, 10, 35]


@pytest.mark.parametrize("form", ["raw", "canonical"])
def test_images_of_integers(form, tmp_path):
    generator = np.random.default_rng(0)
    small, large = (generator.integers(0, 256, shape) for shape in ((32, 32, 3), (84, 84, 3)))
    cifar = example({"image": small, "label": 7, "coarse_label": 3})
    schema = dict.fromkeys(tff_sqlite.SCHEMAS["celeba"].features, 0)
    celeba = example({**schema, "image": large, "smiling": 1})
    found = read_tff(write_file(tmp_path / "c.sqlite", {"0": [cifar]}), "cifar100", form=form)
    assert found.columns["image"].dtype == np.uint8 and (found.columns["image"][0] == small).all()
    assert found.columns["label"].dtype == (np.int64 if form == "raw" else np.int32)
    faces = read_tff(write_file(tmp_path / "f.sqlite", {"0": [celeba]}), "celeba", form=form)
    assert faces.columns["image"].dtype == (np.int64 if form == "raw" else np.uint8)
    assert (faces.columns["image"][0] == large).all() and len(faces.columns) == 41
    assert [name for name, c in faces.columns.items() if c.dtype == bool and c[0]] == ["smiling"]


def reference(path, split="train"):
    """{id: rows} by a plain query for each client, as TFF asks."""
    connection = sqlite3.connect(path)
    query = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?"
    ids = sorted(found for (found,) in connection.execute(query, (split,)))
    query = "SELECT rowid FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid"
    rows = {name: [r for (r,) in connection.execute(query, (split, name))] for name in ids}
    connection.close()
    return rows


@pytest.mark.parametrize("index", [None, "split_name, client_id", "client_id"])
@pytest.mark.parametrize("rows_at_once", [1, 7, 8192])
def test_any_arrangement_of_rows_and_splits(index, rows_at_once, tmp_path, monkeypatch):
    """Rows scattered, with gaps, several splits, an index or none, in batches of any size."""
    monkeypatch.setattr(tff_sqlite, "_ROWS", rows_at_once)
    monkeypatch.setattr(tff_sqlite, "_FETCHED", 3)
    monkeypatch.setattr(tff_sqlite, "_BATCH_BYTES", 100)
    generator = np.random.default_rng(1)
    ids = ["z", "a", "é", "Z", "🙂", "\uffff", "a ", "a\0", ""]
    after = []
    sizes = dict.fromkeys(ids, 0)
    for rowid in generator.permutation(200)[:120].tolist():
        split, client = ("train", "test")[rowid % 2], ids[generator.integers(len(ids) - 1)]
        sizes[client] += split == "train"
        insert = "INSERT INTO examples (rowid, split_name, client_id, serialized_example_proto) "
        after.append((insert + "VALUES (?, ?, ?, ?)", (rowid, split, client, row(rowid))))
    after.append(("DELETE FROM client_metadata", ()))
    declare = "INSERT INTO client_metadata VALUES (?, 'train', ?)"
    after += [(declare, item) for item in sizes.items()]
    after.append(("INSERT INTO client_metadata VALUES ('a', 'test', 0)", ()))
    if index:
        after.append((f"CREATE INDEX by_client ON examples ({index})", ()))
    path = write_file(tmp_path / "scattered.sqlite", {}, after=after)
    population = read(path, split="train")
    expected = reference(path)
    assert population.client_ids.to_pylist() == list(expected)
    for number, rows in enumerate(expected.values()):
        assert population.examples(number)["x"].tolist() == rows
    with stream_tff(path, features=SCHEMA, split="train") as stream:
        assert max(len(batch.columns["x"]) for batch in stream.batches) <= max(3, rows_at_once)


def test_clients_without_examples_stay(path):
    population = read(path)
    assert population.client_ids.to_pylist() == ["a", "b", "d", f"{SECRET} c"]
    assert population.sizes().tolist() == [4, 0, 3, 2]


def test_a_split_of_clients_without_examples(tmp_path):
    population = read(write_file(tmp_path / "none.sqlite", {"a": [], "b": []}))
    assert population.sizes().tolist() == [0, 0]
    assert population.columns["x"].dtype == np.int64


def test_packed_file_reads_the_same_and_leaves_nothing(path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain = read(path, name="n")
    for number, form in enumerate((lzma.FORMAT_ALONE, lzma.FORMAT_XZ)):
        packed = tmp_path / f"{number}.sqlite.lzma"
        packed.write_bytes(lzma.compress(path.read_bytes(), form))
        before = set(tmp_path.iterdir())
        same(read(packed, name="n"), plain)
        assert set(tmp_path.iterdir()) == before
    seen = []
    with stream_tff(packed, features=SCHEMA, folder=tmp_path):
        (folder,) = set(tmp_path.iterdir()) - before
        seen = [(file.stat().st_mode & 0o777) for file in (folder, *folder.iterdir())]
    assert seen == [0o700, 0o600]


@pytest.mark.parametrize("kept", [0, 1, 13, 100, -1])
def test_truncated_lzma_is_refused_and_removed(kept, path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    packed = tmp_path / "some.sqlite.lzma"
    packed.write_bytes(lzma.compress(path.read_bytes(), lzma.FORMAT_ALONE)[:kept])
    before = set(tmp_path.iterdir())
    with pytest.raises(CorruptFile, match=r"some\.sqlite\.lzma is truncated"):
        read(packed)
    assert set(tmp_path.iterdir()) == before


def test_damaged_lzma_is_refused(path, tmp_path):
    whole = lzma.compress(path.read_bytes(), lzma.FORMAT_ALONE)
    packed = tmp_path / "some.sqlite.lzma"
    for content, what in (
        (whole + b"\0", "more bytes behind the end"),
        (b"\xff" + whole[1:], "damaged, or no LZMA stream"),
        (b"not lzma at all, but text", "damaged, or no LZMA stream"),
        (lzma.compress(b"text", lzma.FORMAT_ALONE), "not an SQLite file"),
    ):
        packed.write_bytes(content)
        with pytest.raises(CorruptFile, match=what):
            read(packed)


def test_sizes_have_limits(path, tmp_path, monkeypatch):
    packed = tmp_path / "some.sqlite.lzma"
    packed.write_bytes(lzma.compress(path.read_bytes(), lzma.FORMAT_ALONE))
    monkeypatch.setattr(sqlite_file, "MAX_IN_MEMORY_BYTES", 8000)
    for file in (path, packed):
        with pytest.raises(InputError, match="jaxpfl convert"):
            read(file)
        with stream_tff(file, features=SCHEMA) as stream:
            assert sum(len(batch.sizes) for batch in stream.batches) == 4
    monkeypatch.setattr(sqlite_file, "MAX_UNPACKED_BYTES", 8000)
    for file in (path, packed):
        with (
            pytest.raises(InputError, match="bytes that are allowed"),
            stream_tff(file, features=SCHEMA),
        ):
            pass


def test_sha256_is_of_the_file_as_given(path):
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(read(path, sha256=right.upper())) == 4
    with pytest.raises(CorruptFile, match=f"SHA-256 {right}, expected 00"):
        read(path, sha256="00")


def test_splits_are_named(path):
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO client_metadata VALUES ('x', 'heldout', 0)")
    connection.close()
    with pytest.raises(InputError, match=r"no split 'test'; it has 'heldout', 'train'"):
        read(path, split="test")
    with pytest.raises(InputError, match=r"no split is given; it has 'heldout', 'train'"):
        read(path)
    assert len(read(path, split="heldout")) == 1


BAD_BLOB = "UPDATE examples SET serialized_example_proto = ? WHERE rowid = 5"
# In order: a has rows 6-9, b none, d 1-3, the secret one 4-5.
DEFECTS = {
    "truncated": ([(BAD_BLOB, (row(1)[:-3],))], CorruptFile, "client 3, row 5: .*truncated"),
    "garbage": ([(BAD_BLOB, (SECRET.encode(),))], CorruptFile, "client 3, row 5: "),
    "empty": ([(BAD_BLOB, (b"",))], InputError, 'client 3, row 5: it has no feature "x"'),
    "dtype": (
        [(BAD_BLOB, (example({"x": SECRET.encode(), "t": b""}),))],
        InputError,
        'client 3, row 5: feature "x" holds bytes, expected integers',
    ),
    "shape": (
        [(BAD_BLOB, (example({"x": [1, 2], "t": b""}),))],
        InputError,
        'client 3, row 5: feature "x" does not hold the 1 integers',
    ),
    "extra": (
        [(BAD_BLOB, (example({"x": 1, "t": b"", SECRET: 1}),))],
        InputError,
        "client 3, row 5: it has a feature that is not declared; declared are x, t",
    ),
    "UTF-8": (
        [(BAD_BLOB, (example({"x": 1, "t": b"rosebud \xff"}),))],
        InputError,
        'client 3, row 5: feature "t": byte 9 is not valid UTF-8',
    ),
    "number": ([(BAD_BLOB, (7,))], InputError, "client 3, row 5: .* must be a blob"),
    "too few": (
        [("UPDATE client_metadata SET num_examples = 5 WHERE client_id = 'a'", ())],
        CorruptFile,
        "client 0: client_metadata states another number",
    ),
    "too many": (
        [("DELETE FROM examples WHERE rowid = 5", ())],
        CorruptFile,
        "client 3: client_metadata states another number",
    ),
    "no examples": (
        [("DELETE FROM examples WHERE client_id = 'd'", ())],
        CorruptFile,
        "client 2: client_metadata states another number",
    ),
    "unnamed first": (
        [("DELETE FROM client_metadata WHERE client_id = 'a'", ())],
        CorruptFile,
        "examples has a client here that client_metadata does not name",
    ),
    "unnamed last": (
        [("DELETE FROM client_metadata WHERE client_id LIKE 'rosebud%'", ())],
        CorruptFile,
        "client 2: the table examples has a client here that client_metadata does not name",
    ),
    "twice": (
        [("INSERT INTO client_metadata VALUES ('d', 'train', 3)", ())],
        CorruptFile,
        "client 3: client_metadata has this client twice",
    ),
    "negative": (
        [("UPDATE client_metadata SET num_examples = -1 WHERE client_id = 'd'", ())],
        InputError,
        "client 2: client_metadata must hold an id and a number",
    ),
    "no number": (
        [("UPDATE client_metadata SET num_examples = 'rosebud' WHERE client_id = 'd'", ())],
        InputError,
        "client 2: client_metadata must hold an id and a number",
    ),
    "id not UTF-8": (
        [
            ("UPDATE client_metadata SET client_id = CAST(x'64ff' AS TEXT) WHERE rowid = 1", ()),
            ("UPDATE examples SET client_id = CAST(x'64ff' AS TEXT) WHERE client_id = 'd'", ()),
        ],
        InputError,
        "client 2: its id is not valid UTF-8",
    ),
    "id a blob": (
        [("UPDATE examples SET client_id = x'61' WHERE rowid = 7", ())],
        CorruptFile,
        "client 0: client_metadata states another number",
    ),
    "no table": ([("DROP TABLE client_metadata", ())], InputError, "no table 'client_metadata'"),
    "other table": ([("DROP TABLE examples", ())], InputError, "no table 'examples'"),
    "no column": (
        [("ALTER TABLE examples RENAME COLUMN client_id TO other", ())],
        InputError,
        "table 'examples' has no column 'client_id'",
    ),
    "own rowid": (
        [("ALTER TABLE examples ADD COLUMN rowid INTEGER", ())],
        InputError,
        "'examples' must have SQLite's own rowid",
    ),
    "view": (
        [
            ("ALTER TABLE examples RENAME TO other", ()),
            ("CREATE VIEW examples AS SELECT * FROM other", ()),
        ],
        InputError,
        "no table 'examples'",
    ),
    "no clients": ([("DELETE FROM client_metadata", ())], InputError, "has no clients"),
}


@pytest.mark.parametrize("after, kind, what", DEFECTS.values(), ids=DEFECTS)
def test_defects_are_named_by_file_client_and_row(after, kind, what, tmp_path):
    path = write_file(tmp_path / "some.sqlite", clients(FOUR), after=after)
    with pytest.raises(kind, match=what) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and SECRET not in message.removeprefix(str(path))
    # Nothing chained shows it either.
    assert SECRET not in repr(caught.value.__context__ or "").replace(str(path), "")


@pytest.mark.parametrize("size", [1, 250, 2**22])
def test_rows_are_named_in_batches_of_any_size(size, tmp_path, monkeypatch):
    monkeypatch.setattr(tff_sqlite, "_BATCH_BYTES", size)
    monkeypatch.setattr(tff_sqlite, "_FETCHED", 1)
    for rowid, client in ((1, 2), (3, 2), (5, 3), (6, 0), (9, 0)):
        bad = [(BAD_BLOB.replace("5", str(rowid)), (row(1)[:-3],))]
        path = write_file(tmp_path / f"{rowid}.sqlite", clients(FOUR), after=bad)
        with pytest.raises(CorruptFile, match=f"client {client}, row {rowid}: "):
            read(path)


def test_tables_of_other_kinds_are_refused(tmp_path):
    key = ", PRIMARY KEY (client_id)) WITHOUT ROWID"
    tables = (EXAMPLES.replace(" NOT NULL)", " NOT NULL" + key), METADATA)
    path = write_file(tmp_path / "keyed.sqlite", {"a": [row(1)]}, tables=tables)
    with pytest.raises(InputError, match="must have SQLite's own rowid"):
        read(path)
    with sqlite3.connect(tmp_path / "virtual.sqlite") as connection:
        try:
            connection.execute("CREATE VIRTUAL TABLE examples USING fts4(client_id)")
        except sqlite3.OperationalError:
            pytest.skip("this SQLite has no virtual tables to try")
    connection.close()
    with pytest.raises(InputError, match="'examples' is not a plain table"):
        read(tmp_path / "virtual.sqlite")


def test_files_that_are_no_whole_sqlite_files(path, tmp_path):
    whole = path.read_bytes()
    cases = {
        b"": "is empty",
        b"SQLite format 3\0": "not an SQLite file, or truncated",
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
    with pytest.raises(InputError, match="there is no such file"):
        read(tmp_path / "absent.sqlite")


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
    with pytest.raises(CorruptFile, match=re.escape("long.sqlite, client 1, row 3: its SQLite")):
        read(path)


def test_a_message_beyond_the_limit_is_refused_by_row(path, monkeypatch):
    monkeypatch.setattr(sqlite_file, "MAX_VALUE_BYTES", 500)
    with sqlite3.connect(path) as connection:
        connection.execute(BAD_BLOB, (row(1, "x" * 600),))
    connection.close()
    with pytest.raises(InputError, match="client 3, row 5: longer than"):
        read(path)


def test_unfinished_writes_are_refused(path):
    path.with_name("some.sqlite-wal").write_bytes(b"pages")
    with pytest.raises(InputError, match=r"unfinished writes in .*some\.sqlite-wal"):
        read(path)


def test_other_encodings_are_refused(tmp_path):
    with sqlite3.connect(tmp_path / "wide.sqlite") as connection:
        connection.execute("PRAGMA encoding = 'UTF-16le'")
        connection.execute(EXAMPLES)
        connection.execute(METADATA)
    connection.close()
    with pytest.raises(InputError, match="must hold its texts in UTF-8"):
        read(tmp_path / "wide.sqlite")


def test_reading_writes_nothing(path, tmp_path):
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    odd = tmp_path / "a?b#c%20.sqlite"
    os.link(path, odd)
    path.chmod(0o400)
    read(path)
    read(odd)
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file != odd} == before


def test_sources(path, tmp_path):
    with pytest.raises(InputError, match=r"dataset \(one of celeba, cifar100, emnist"):
        open_population(str(path))
    with pytest.raises(InputError, match="dataset must be one of 'celeba', 'cifar100', 'emnist'"):
        open_population(f"{path}?dataset=emist")
    with pytest.raises(InputError, match="did you mean 'dataset'"):
        open_population(f"{path}?datasets=emnist")
    with pytest.raises(InputError, match=r"either dataset .* or features .* found neither"):
        read_tff(path)
    with pytest.raises(InputError, match="found both"):
        read_tff(path, "emnist", features=SCHEMA)
    with pytest.raises(InputError, match="form must be one of 'canonical', 'raw'"):
        read(path, form="tff")
    plays = {f"role {n}": [example({"snippets": b"Hark!"})] * n for n in range(4)}
    file = write_file(tmp_path / "plays.sqlite", plays, split="test")
    source = f"{file}?dataset=shakespeare&split=test"
    assert open_population(source).name == f"{file} [test]"
    assert sorted(open_population(f"{source}&min_examples=2").sizes()) == [0, 0, 2, 3]
    assert list(open_population(f"{source}&form=raw").columns) == ["snippets"]
