"""A stored population is not trusted because its hashes are right: whoever made it computed them.

A hash shows that a file is as it was written, not that it makes sense: a column of objects would be
read as addresses, and an id that ends behind its file would end the process.
"""

import contextlib
import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population, storage
from jaxpfl.data.check import check
from jaxpfl.data.content import Growing
from jaxpfl.errors import CorruptFile
from tests.data.populations import SECRET, sign, small


@pytest.fixture
def saved(tmp_path):
    small().save(tmp_path / "saved")
    return tmp_path / "saved"


def columns_of(folder):
    return json.loads((folder / "manifest.json").read_text())["columns"]


VALUES = (None, 7, -1, True, "x", [], {}, [3], 2**64, {"a": 1}, {"label": []})


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
    columns = columns_of(saved)
    described = type_ if isinstance(type_, str) else columns["label"] | {"shape": None} | type_
    sign(saved, columns=columns | {"label": described})
    with pytest.raises(CorruptFile, match=r"manifest\.json: column 'label'"):
        Population.load(saved)


@pytest.mark.parametrize("name", ["label", "text"])
@pytest.mark.parametrize(
    "changed",
    [
        {"bytes": 7},
        {"bytes": 2**62},
        {"bytes": -1},
        {"bytes": 0, "blocks": ""},
        {"bytes": 1.0},
        {"blocks": "zz" * 32},
        {"blocks": "ab"},
        {"blocks": ""},
        {"blocks": "00" * 32},
        {"blocks": None},
    ],
    ids=str,
)
def test_a_buffer_that_is_another_is_refused(name, changed, saved):
    """TRUST 6, 39"""
    columns = columns_of(saved)
    columns[name]["buffers"][0] |= changed
    sign(saved, columns=columns)
    if changed.get("bytes") == 0:  # an empty file cannot be mapped
        next(saved.glob("1.values" if name == "label" else "3.edges")).write_bytes(b"")
    with pytest.raises(CorruptFile, match="saved"):
        dict(Population.load(saved).columns)
    columns[name]["buffers"] = []
    sign(saved, columns=columns)
    with pytest.raises(CorruptFile, match="another number of buffers"):
        Population.load(saved)


def write_clients(folder, name, column):
    """Replaces the clients' ids or offsets, with hashes that fit them."""
    with contextlib.ExitStack() as stack:
        paths = sorted(folder.glob(f"{name}.*"))
        grown = Growing(column, [stack.enter_context(path.open("wb")) for path in paths])
        grown.append(column)
        sign(folder, **{name: grown.synced()})


def texts(edges: list[int], content: bytes) -> pa.Array:
    buffers = pa.py_buffer(np.array(edges)), pa.py_buffer(content)
    return pa.LargeStringArray.from_buffers(len(edges) - 1, *buffers)


@pytest.mark.parametrize(
    ("edges", "content"),
    [
        ([0, 1, 2, 3, 2**40], b"abcd"),
        ([0, 3, 2, 3, 4], b"abcd"),
        ([0, -1, 2, 3, 4], b"abcd"),
        ([0, 1, 2, 3, 4], b"abc\xff"),
    ],
    ids=str,
)
def test_ids_that_end_behind_their_file_do_not_end_the_process(edges, content, saved):
    """TRUST 6, 39: one altered byte did."""
    column = texts([0, 1, 2, 3, 4], content)
    write_clients(saved, "client_ids", column)
    path = saved / "client_ids.edges"
    path.write_bytes(np.array(edges, np.int64).tobytes())
    stored = json.loads((saved / "manifest.json").read_text())["client_ids"]
    stored[0]["blocks"] = hashlib.sha256(path.read_bytes()).hexdigest()
    sign(saved, client_ids=stored)
    for read in (Population.load, lambda folder: check(folder, progress=False)):
        with pytest.raises(CorruptFile, match="saved") as raised:
            read(saved)
        assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offsets", [0, 1, 3, 6]),
        ("offsets", [1, 1, 3, 6, 10]),
        ("offsets", [0, 3, 1, 6, 10]),
        ("offsets", [0, 1, 3, 60, 10]),
        ("offsets", [0, 1, 3, 6, 60]),
        ("client_ids", ["a", "b", "c"]),
        ("client_ids", ["a", "b", "c", "c"]),
        ("client_ids", ["a", "b", "c", "d", "e"]),
    ],
    ids=str,
)
def test_clients_that_are_none_are_refused(name, values, saved):
    """TRUST 5, 6"""
    kind = pa.large_string()
    write_clients(saved, name, np.array(values) if name == "offsets" else pa.array(values, kind))
    with pytest.raises(CorruptFile, match="saved"):
        Population.load(saved)
