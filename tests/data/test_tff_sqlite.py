"""TFF's files: read exactly as TFF reads them."""

import json
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.readers import tff_sqlite
from jaxpfl.data.readers.tff_examples import SCHEMAS, Feature, Schema
from jaxpfl.data.readers.tff_sqlite import stream_tff
from jaxpfl.errors import InputError
from tests.data.tff_files import FOUR, SCHEMA, SECRET, clients, example, read, row, write_file

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLE = {
    "label": Feature("int32"),
    "pixels": Feature("float32", (4, 4)),
    "score": Feature("int64"),
    "tokens": Feature("text"),
}


@pytest.fixture(scope="session")
def fixtures(data_folder):
    folder = data_folder.parent / "fixtures" / "tff"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: TFF's own files are not at hand")
    return folder


@pytest.fixture
def path(tmp_path):
    return write_file(tmp_path / "some.sqlite", clients(FOUR))


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
    features = SCHEMAS[dataset].features if dataset else SAMPLE
    population = read(fixtures / f"{file}.sqlite", schema=Schema(features, "client"), split=split)
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


def test_canonical_columns_are_what_models_read(fixtures):
    def opened(name):
        return open_population(f"{fixtures}/tff_{name}_synthetic.sqlite?dataset={name}")

    emnist = opened("emnist")
    plain = Schema(SCHEMAS["emnist"].features, "client")
    raw = read(fixtures / "tff_emnist_synthetic.sqlite", schema=plain)
    image = emnist.columns["image"]
    assert image.dtype == np.float32 and image.shape == (20, 28, 28, 1)
    assert (image[..., 0] == 1 - raw.columns["pixels"]).all() and image[:, 0, 0].max() == 0
    assert (emnist.columns["label"] == np.tile(np.arange(10), 2)).all()
    assert emnist.unit == "writer"
    words = opened("stackoverflow")
    assert list(words.columns) == ["text", "creation_date", "score", "tags", "title", "type"]
    assert words.columns["text"][1].as_py() == "css3 does finally define the"
    assert opened("shakespeare").columns["text"].to_pylist()[-6:-4] == ["Hark!", "When?"]


def test_small_letters_of_emnist_36_have_the_labels_of_capitals(tmp_path):
    pixels = np.ones((28, 28), np.float32)
    examples = [example({"pixels": pixels, "label": label}) for label in (0, 9, 10, 35, 36, 61)]
    path = write_file(tmp_path / "e.sqlite", {"writer": examples})
    found = open_population(f"{path}?dataset=emnist_36")
    assert found.columns["label"].tolist() == [0, 9, 10, 35, 10, 35]


def test_images_of_integers(tmp_path):
    generator = np.random.default_rng(0)
    small = generator.integers(0, 256, (32, 32, 3))
    cifar = example({"image": small, "label": 7, "coarse_label": 3})
    found = open_population(f"{write_file(tmp_path / 'c.sqlite', {'0': [cifar]})}?dataset=cifar100")
    assert found.columns["image"].dtype == np.uint8 and (found.columns["image"][0] == small).all()
    assert found.columns["label"].dtype == np.int32


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
    monkeypatch.setattr(tff_sqlite, "_BATCH_BYTES", rows_at_once)
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
    with stream_tff(path, SCHEMA, "train") as stream:
        assert max(len(batch.columns["x"]) for batch in stream.batches) <= max(3, rows_at_once)


def test_clients_without_examples_stay_and_splits_are_named(tmp_path):
    none = read(write_file(tmp_path / "none.sqlite", {"a": [], "b": []}))
    assert none.sizes().tolist() == [0, 0] and none.columns["x"].dtype == np.int64
    held_out = ("INSERT INTO client_metadata VALUES ('x', 'heldout', 0)", ())
    path = write_file(tmp_path / "some.sqlite", clients(FOUR), after=[held_out])
    population = read(path, split="train")
    assert population.client_ids.to_pylist() == ["a", "b", "d", f"{SECRET} c"]
    assert population.sizes().tolist() == [4, 0, 3, 2]
    for split, said in (("test", "no split 'test'"), (None, "no split is given")):
        with pytest.raises(InputError, match=f"{said}; it has 'heldout', 'train'"):
            read(path, split=split)
    assert len(read(path, split="heldout")) == 1


def test_reading_writes_nothing(path, tmp_path):
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    odd = tmp_path / "a?b#c%20.sqlite"
    os.link(path, odd)
    path.chmod(0o400)
    read(path)
    read(odd)
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file != odd} == before


def test_sources(path, tmp_path):
    for query in ("", "?dataset=emist"):
        with pytest.raises(InputError, match="dataset must be one of 'cifar100', 'emnist', 'em"):
            open_population(f"{path}{query}")
    plays = {f"role {n}": [example({"snippets": b"Hark!"})] * n for n in range(4)}
    file = write_file(tmp_path / "plays.sqlite", plays, split="test")
    source = f"{file}?dataset=shakespeare&split=test"
    assert open_population(source).name == f"{file} [test]"
    assert sorted(open_population(f"{source}&min_examples=2").sizes()) == [0, 0, 2, 3]
