"""A stored population is not trusted because its hashes are right: whoever made it computed them.

A hash shows that a file is as it was written, not that it makes sense: a column of objects would be
read as addresses, and an id that ends behind its file would end the process.
"""

import json

import numpy as np
import pytest

from jaxpfl.data import Population, storage
from jaxpfl.data.folders import check_folder
from jaxpfl.errors import CorruptFile
from tests.data.populations import SECRET, sign, sign_buffers, small
from tests.refusals import refusal


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
        refusal(lambda: Population.load(saved), "saved", CorruptFile)
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
    refusal(lambda: Population.load(saved), "manifest.json: column 'label'", CorruptFile)


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
    refusal(lambda: dict(Population.load(saved).columns), "saved", CorruptFile)
    columns[name]["buffers"] = []
    sign(saved, columns=columns)
    refusal(lambda: Population.load(saved), "another number of buffers", CorruptFile)


def int64s(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def ids(content: bytes, *edges: int) -> dict[str, bytes]:
    """Of one letter each, where no edges are given."""
    given = edges or range(len(content) + 1)
    return {"client_ids.edges": int64s(*given), "client_ids.values": content}


@pytest.mark.parametrize(
    "buffers",
    [
        {"offsets.values": int64s(0, 1, 3, 6)},
        {"offsets.values": int64s(1, 1, 3, 6, 10)},
        {"offsets.values": int64s(0, 3, 1, 6, 10)},
        {"offsets.values": int64s(0, 1, 3, 60, 10)},
        {"offsets.values": int64s(0, 1, 3, 6, 60)},
        ids(b"abc"),
        ids(b"abcc"),
        ids(b"abcde"),
        ids(b"abcd", 0, 1, 2, 3, 2**40),
        ids(b"abcd", 0, 3, 2, 3, 4),
        ids(b"abcd", 0, -1, 2, 3, 4),
        ids(b"abc\xff"),
    ],
)
def test_clients_that_are_none_are_refused_and_do_not_end_the_process(buffers, saved):
    """TRUST 5, 6, 39: one altered byte did."""
    for name, content in buffers.items():
        (saved / name).write_bytes(content)
    sign_buffers(saved)
    for read in (Population.load, lambda folder: check_folder(folder, progress=False)):
        with pytest.raises(CorruptFile, match="saved") as raised:
            read(saved)
        assert SECRET not in str(raised.value)
