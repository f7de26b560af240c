"""Parquet files: what a footer may say, and what is not unpacked."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from jaxpfl import checks
from jaxpfl.data.readers.fields import Fields
from jaxpfl.data.readers.table import read_parquet
from jaxpfl.errors import CorruptFile, InputError
from tests.data.tff_files import varint
from tests.refusals import refusal


def test_dates_and_nested_columns_are_refused_with_their_type(tmp_path):
    path = tmp_path / "x.parquet"
    day = pa.array([0], pa.timestamp("s"))
    parquet.write_table(pa.table({"client": ["a"], "text": ["x"], "day": day}), path)
    refusal(lambda: jp.data.open(f"{path}?columns=day"), "field 'day' must be a string, boolean")
    refusal(lambda: jp.data.open(f"{path}?text=day"), "found timestamp")


def test_a_file_with_invalid_strings_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    broken = pa.array([b"\xff"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"client": ["a"], "text": broken}), path)
    refusal(lambda: jp.data.open(path), "damaged", CorruptFile)


def test_a_damaged_footer_does_not_end_the_process(tmp_path):
    """TRUST 6: pyarrow's `RowGroupMetaData.column` throws what Python cannot catch."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"client": ["u", "u"], "text": ["a text", "another"]}), path)
    whole, refused = path.read_bytes(), 0
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(footer, len(whole), 2):
        for value in (48, 127):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                jp.data.open(path)
            except (CorruptFile, InputError):
                refused += 1
    assert refused


def test_a_row_group_larger_than_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "machine_memory", lambda: 2**26)
    path = tmp_path / "a.parquet"
    zeros = pa.array(np.zeros(10_000_000, np.int64))
    parquet.write_table(pa.table({"client": zeros, "x": zeros}), path, row_group_size=10**7)
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match=r"a\.parquet: row group 1, unpacked, would take"):
        jp.data.open(f"{path}?client=client&features=x")


@pytest.mark.parametrize("footer", ["true", "false"])
def test_one_text_in_many_rows_is_unpacked_row_by_row(tmp_path, footer):
    """At 2^15 rows at once, these 60 kB would be 34 GB, whatever size the footer states."""
    path = tmp_path / "a.parquet"
    indices = pa.array(np.zeros(40_000, np.int32))
    texts = pa.DictionaryArray.from_arrays(indices, ["a" * 2**20])
    parquet.write_table(pa.table({"text": texts}), path, compression="zstd")
    assert path.stat().st_size < 60_000
    if footer == "false":
        stated = parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size
        content, known = path.read_bytes(), b"\x16" + varint(2 * stated)
        assert known in content
        path.write_bytes(content.replace(known, b"\x16" + b"\x80" * (len(known) - 2) + b"\0"))
        assert parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 0
    rows = next(read_parquet(path, Fields([("text", "text")])))
    assert 1 <= len(rows.numbers) and rows.columns["text"].nbytes < 2**29
    assert rows.columns["text"][0].as_py() == "a" * 2**20


def test_lists_of_texts_are_refused_before_they_are_unpacked(tmp_path):
    """These 70 kB would be 4 GB in one row."""
    path = tmp_path / "a.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**16, np.int32)), ["a" * 2**16])
    table = pa.table({"x": pa.ListArray.from_arrays([0, 2**16], texts)})
    parquet.write_table(table, path, compression="zstd")
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(InputError, match="row 1: field 'x' must be .*, found list"):
        next(read_parquet(path, Fields([("x", "value")])))
    assert pa.default_memory_pool().max_memory() < before + 2**29


def test_views_of_texts_are_read_and_rows_without_one_left_out(tmp_path):
    texts = pa.array(["x", None, "a text that lies outside of its view"], pa.string_view())
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"client": ["a", "b", "c"], "text": texts}), path)
    found = jp.data.open(f"{path}?missing=drop")
    assert found.columns["text"].to_pylist() == ["x", texts[2].as_py()]
