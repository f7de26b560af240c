"""A stored population is not trusted because its hashes are right: whoever made it computed them.

A hash shows that a file is as it was written, not that it makes sense: a column of objects would be
read as addresses, and an id that ends behind its file would end the process.
"""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population, storage
from jaxpfl.data.check import check
from jaxpfl.errors import CorruptFile
from jaxpfl.files import sha256_file
from tests.data.populations import SECRET, small


@pytest.fixture
def saved(tmp_path):
    small().save(tmp_path / "saved")
    return tmp_path / "saved"


def sign(folder, **changed):
    """Writes the manifest with these fields, and with the hashes that fit them."""
    path = folder / "manifest.json"
    manifest, clients = json.loads(path.read_text()), folder / "clients.arrow"
    described = {"bytes": clients.stat().st_size, "sha256": sha256_file(clients)}
    manifest["files"]["clients.arrow"] = described
    manifest |= changed
    del manifest["sha256"]
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


VALUES = (None, 7, -1, True, "x", [], {}, 2**64, {"a": 1}, {"label": []})


@pytest.mark.parametrize("name", storage._FIELDS)
def test_a_field_of_another_type_is_refused(name, saved):
    """TRUST 6, 39"""
    path = saved / "manifest.json"
    sound = path.read_text()
    for value in VALUES:
        if isinstance(value, str) and isinstance(json.loads(sound)[name], str):
            continue  # a name is as good as another
        sign(saved, **{name: value})
        with pytest.raises(CorruptFile, match="saved"):
            Population.load(saved)
        path.write_text(sound)


@pytest.mark.parametrize(
    "type_",
    [
        {"dtype": "object", "shape": []},
        {"dtype": "O", "shape": []},
        {"dtype": "U1000000000", "shape": []},
        {"dtype": ">i4", "shape": []},
        {"dtype": "complex64", "shape": []},
        {"dtype": "int32", "shape": [0]},
        {"dtype": "int32", "shape": [-1]},
        {"dtype": "int32", "shape": [2**62, 2**62]},
        {"dtype": "int32", "shape": [1.0]},
        {"dtype": "int32", "shape": [1] * 40},
        {"dtype": "int32", "shape": [None]},
        {"dtype": "uint16", "shape": [None]},
        {"dtype": "uint16", "shape": [None], "encoding": {"vocabulary_size": "many"}},
        {"dtype": "text", "shape": [1]},
        {"dtype": 4, "shape": []},
        {"dtype": "int32"},
        "int32",
    ],
    ids=str,
)
def test_a_type_that_no_column_has_is_refused(type_, saved):
    """TRUST 7, 39: bytes of a file are never taken for addresses."""
    columns = manifest_of(saved)["columns"] | {"label": type_}
    sign(saved, columns=columns)
    with pytest.raises(CorruptFile, match=r"manifest\.json: column 'label'"):
        Population.load(saved)


@pytest.mark.parametrize(
    "changed",
    [
        {"first": -8},
        {"first": 2**63},
        {"first": 1},
        {"bytes": 2**62},
        {"bytes": -1},
        {"bytes": 1.0},
        {"blocks": "zz" * 32},
        {"blocks": "ab"},
        {"blocks": None},
    ],
    ids=str,
)
def test_a_buffer_that_lies_elsewhere_is_refused(changed, saved):
    """TRUST 6, 39"""
    buffers = manifest_of(saved)["buffers"]
    buffers["label"][0] |= changed
    sign(saved, buffers=buffers)
    with pytest.raises(CorruptFile, match="saved"):
        dict(Population.load(saved).columns)


def test_other_files_than_a_population_has_are_not_looked_at(saved):
    """TRUST 39"""
    outside = saved.parent / "outside"
    outside.write_text("x")
    listed = {"../outside": {"bytes": 1, "sha256": sha256_file(outside)}}
    sign(saved, files=manifest_of(saved)["files"] | listed)
    with pytest.raises(CorruptFile, match="lists other files"):
        Population.load(saved)


def write_clients(folder, table):
    with pa.ipc.new_file(str(folder / "clients.arrow"), table.schema) as writer:
        writer.write_table(table)
    sign(folder)


def test_ids_that_end_behind_their_file_do_not_end_the_process(saved):
    """TRUST 6, 39: one altered byte did."""
    path = saved / "clients.arrow"
    whole = path.read_bytes()
    # The edges of the ids: each as it is, but for its highest bytes.
    first = pa.ipc.open_file(pa.memory_map(str(path))).read_all()["client_id"].chunk(0)
    edges = np.frombuffer(first.buffers()[1], np.int64)[: len(first) + 1].tobytes()
    at = whole.index(edges)
    for place in range(at, at + len(edges)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        path.write_bytes(damaged)
        sign(saved)
        with pytest.raises(CorruptFile, match="saved") as raised:
            Population.load(saved).client_ids.to_pylist()
        assert SECRET not in str(raised.value)
        with pytest.raises(CorruptFile):
            check(saved, progress=False)


@pytest.mark.parametrize(
    "columns",
    [
        {"client_id": ["a", "b", "c", "d"]},
        {"client_id": [1, 2, 3, 4], "first": [0, 1, 3, 6]},
        {"client_id": ["a", "b", "c", None], "first": [0, 1, 3, 6]},
        {"client_id": ["a", "b", "c", "d"], "first": [0, 1, None, 6]},
        {"client_id": ["a", "b", "c"], "first": [0, 1, 3]},
        {"client_id": ["a", "b", "c", "d"], "first": [1, 1, 3, 6]},
        {"client_id": ["a", "b", "c", "d"], "first": [0, 3, 1, 6]},
        {"client_id": ["a", "b", "c", "c"], "first": [0, 1, 3, 6]},
        {"client_id": ["a", "b", "c", "d"], "first": [0, 1, 3, 60]},
    ],
    ids=str,
)
def test_clients_that_are_none_are_refused(columns, saved):
    """TRUST 5, 6"""
    kinds = {"client_id": pa.large_string(), "first": pa.int64()}
    arrays = {
        name: pa.array(values, None if values[0] == 1 and name == "client_id" else kinds[name])
        for name, values in columns.items()
    }
    write_clients(saved, pa.table(arrays))
    with pytest.raises(CorruptFile, match="saved"):
        Population.load(saved)


def test_an_empty_file_of_examples_is_refused(saved):
    """TRUST 6: an empty file cannot be mapped."""
    (saved / "examples.arrow").write_bytes(b"")
    manifest = manifest_of(saved)
    listed = manifest["files"] | {
        "examples.arrow": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    }
    buffers = {name: [] for name in manifest["columns"]}
    sign(saved, files=listed, buffers=buffers)
    with pytest.raises(CorruptFile, match="saved"):
        Population.load(saved)
