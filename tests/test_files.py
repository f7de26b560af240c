"""JSON and .npz files that anybody may have written: read whole, or refused with their name."""

import io
import json
import zipfile

import numpy as np
import pytest

from jaxpfl import checks, files
from jaxpfl.errors import CorruptFile, InputError
from tests.refusals import refusal

HOSTILE = {
    "deep": b"[" * 100_000,
    "deep, and whole": b"[" * 65 + b"]" * 65,
    "half a surrogate pair": b'"\\ud800"',
    "digits": b"9" * 5_000,
    "NUL": b'{"a": 1}\0',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "nothing": b"",
    "half": b'{"a": ',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_json_is_refused_with_its_file(content, tmp_path):
    """TRUST 39"""
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"x\.json: is not a JSON file; it has \d+ bytes"):
        files.read_json(path)


def test_the_deepest_json_and_whole_pairs_are_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"[" * 64 + b"]" * 64)
    files.read_json(path)
    path.write_text(json.dumps({"text": "\U0001f600 é"}))
    assert files.read_json(path) == {"text": "\U0001f600 é"}


def test_a_json_file_is_not_read_beyond_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_JSON_BYTES", 10)
    path = tmp_path / "x.json"
    path.write_bytes(b"7" * 11)
    refusal(lambda: files.read_json(path), "must have at most 10 bytes, found 11", CorruptFile)


FIELDS = {"run": str, "rounds": int, "loss": float, "private": bool, "note": str | None}
RECORD = {"run": "a", "rounds": 3, "loss": 1, "private": False, "note": None}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"run": 7}, "the field 'run' must be text, found a whole number"),
        ({"rounds": True}, "the field 'rounds' must be a whole number, found true or false"),
        ({"rounds": 1.0}, "the field 'rounds' must be a whole number, found a number"),
        ({"loss": "1"}, "the field 'loss' must be a number, found text"),
        ({"private": 1}, "the field 'private' must be true or false, found a whole number"),
        ({"note": []}, "the field 'note' must be text or null, found a list"),
    ],
)
def test_a_field_of_another_type_is_named_and_its_value_is_not(changed, sentence, tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, RECORD)
    assert files.read_record(path, FIELDS) == RECORD
    files.write_json(path, RECORD | changed)
    with pytest.raises(CorruptFile, match=sentence):
        files.read_record(path, FIELDS)
    (name,) = changed
    files.write_json(path, {key: value for key, value in RECORD.items() if key != name})
    with pytest.raises(CorruptFile, match=f"the field {name!r} is missing, expected"):
        files.read_record(path, FIELDS)
    files.write_json(path, [RECORD])
    with pytest.raises(CorruptFile, match="must hold a JSON object, found a list"):
        files.read_record(path, FIELDS)


ARRAYS = {
    "numbers": np.arange(6, dtype=np.float32).reshape(2, 3),
    "rows": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "one": np.array(5),
    "none": np.zeros((0, 3), np.uint8),
    "flags": np.array([True, False]),
    "texts": np.array(["é", "long"]),
}


def test_arrays_come_back_bit_for_bit(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(files.npz(ARRAYS))
    found = files.read_npz(path)
    assert list(found) == list(ARRAYS)
    for name, expected in ARRAYS.items():
        np.testing.assert_array_equal(found[name], expected, strict=True)


def _npz(header: str, content: bytes = b"\0" * 8, **options) -> bytes:
    text = header.encode().ljust(117) + b"\n"
    array = b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + content
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        archive.writestr("a.npy", array)
    return buffer.getvalue()


def _header(dtype: str = "<f8", shape: str = "(1,)", fortran: str = "False") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': {fortran}, 'shape': {shape}, }}"


HOSTILE_ARRAYS = {
    "a shape of terabytes": _npz(_header(shape="(1000000000000,)")),
    "a product beyond 64 bits": _npz(_header(shape="(4294967296, 4294967296, 4294967296)")),
    "texts of no bytes": _npz(_header(dtype="<U0", shape="(1000000000000,)"), b""),
    "rows of 1e30 columns": _npz(_header(shape=f"(0, {10**30})"), b""),
    "a negative shape": _npz(_header(shape="(-1,)")),
    "objects": _npz(_header(dtype="|O")),
    "a text of gigabytes": _npz(_header(dtype="<U999999999")),
    "another order": _npz(_header(fortran="0")),
    "a nested header": _npz("(" * 5_000),
    "fewer bytes": _npz(_header(), b"\0" * 7),
    "more bytes": _npz(_header(), b"\0" * 9),
    "zeros by the million, packed": _npz(
        _header(shape="(10000000,)"), bytes(80_000_000), compression=zipfile.ZIP_DEFLATED
    ),
    "an altered byte": _npz(_header(), b"\1" * 8).replace(b"\1" * 8, b"\1" * 7 + b"\2"),
    "a cut archive": _npz(_header())[:-5],
    "no archive": b"PK",
}


def test_the_archive_of_these_tests_is_one():
    file = io.BytesIO(_npz(_header()))
    assert np.load(file, allow_pickle=False)["a"].tolist() == [0.0]


@pytest.mark.parametrize("content", HOSTILE_ARRAYS.values(), ids=HOSTILE_ARRAYS.keys())
def test_an_array_that_is_not_what_it_claims_is_refused(content, tmp_path, monkeypatch):
    """TRUST 39: before any memory is taken for it."""
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    asked, empty = [0], np.empty

    def counted(size, dtype):
        asked.append(size)
        return empty(min(size, len(content)), dtype)

    monkeypatch.setattr(np, "empty", counted)
    with pytest.raises(CorruptFile, match=r"x\.npz: is not an \.npz file of numbers and texts"):
        files.read_npz(path)
    assert max(asked) <= len(content)
    with pytest.raises(CorruptFile, match=r"y\.npz: cannot be read: No such file"):
        files.read_npz(tmp_path / "y.npz")


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5_000], ids=["large", "low", "larger"])
def test_a_number_that_nothing_holds_is_refused_by_name(value):
    """TRUST 9: its digits are not printed, which Python refuses for thousands of them."""
    refusal(lambda: checks.real("x", value), "x must be a finite number, found a larger")
    if value > 0:
        with pytest.raises(InputError, match=r"x must be below 2\^63, found a larger"):
            checks.positive_int("x", value)
        with pytest.raises(InputError, match=r"x must be below 2\^128, found a larger"):
            checks.non_negative_int("x", value)


def test_what_exceeds_the_memory_is_refused_with_its_size():
    checks.fits_memory("x", 1)
    with pytest.raises(InputError, match=r"x would take 1,073,741,824 GiB, but this machine has"):
        checks.fits_memory("x", 2**60)
