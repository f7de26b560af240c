"""TRUST 39: small files that unpack to more than there is are refused before they are unpacked."""

import gzip
import os
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from jaxpfl.data.readers.arrow_files import read_arrow
from jaxpfl.data.readers.fields import Fields
from jaxpfl.errors import CorruptFile, InputError

TEXTS = ["a" * 5_000, "b" * 5_000]


@pytest.fixture
def small_machine(monkeypatch):
    """Has 64 MiB of memory."""
    known = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**14}
    really = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: known.get(name) or really(name))


def packed(path, table: pa.Table, stream: bool = False) -> bytes:
    """An Arrow file whose buffers are compressed."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    return path.read_bytes()


def at_offset(content, at: int) -> int:
    """Where an offset of a flatbuffer leads."""
    return at + struct.unpack_from("<I", content, at)[0]


def entry_of(content, table: int, field: int) -> tuple[int, int]:
    """Where a flatbuffer says that a table has a field, and where that field is."""
    entry = table - struct.unpack_from("<i", content, table)[0] + 4 + 2 * field
    return entry, table + struct.unpack_from("<H", content, entry)[0]


def clients(texts) -> pa.Table:
    return pa.table({"client": ["u"] * len(texts), "text": texts})


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("shape", ["plain", "dictionary"])
def test_an_arrow_file_that_says_it_unpacks_to_terabytes_is_refused(tmp_path, stream, shape):
    path = tmp_path / "a.arrow"
    table = clients(TEXTS)
    if shape == "dictionary":
        table = table.set_column(1, "text", table["text"].dictionary_encode())
    content = packed(path, table, stream)
    assert jp.data.open(path).num_examples == 2
    # Before each compressed buffer stands how large it will be; before that, offsets end with it.
    head, size, tail = content.rpartition(struct.pack("<q", 10_000))
    assert size
    path.write_bytes(head + struct.pack("<q", 2**42) + tail)
    with pytest.raises(InputError, match=r"a\.arrow: .* would take 8,192 GiB, but this machine"):
        jp.data.open(path)
    path.write_bytes(head + struct.pack("<q", 9_999) + tail)
    with pytest.raises(CorruptFile, match="truncated, damaged or no Arrow file"):
        jp.data.open(path)


def test_a_batch_larger_than_memory_is_refused_and_smaller_ones_are_read(tmp_path, small_machine):
    path = tmp_path / "a.arrow"
    packed(path, clients(["a" * 1_000_000] * 40))
    assert path.stat().st_size < 2_000_000
    with pytest.raises(InputError, match="its largest batch, unpacked and copied once, would take"):
        jp.data.open(path)
    with pa.ipc.new_file(
        path,
        clients([]).cast(pa.schema([("client", pa.string()), ("text", pa.string())])).schema,
        options=pa.ipc.IpcWriteOptions(compression="zstd"),
    ) as writer:
        writer.write_table(clients(["a" * 1_000_000] * 10), max_chunksize=1)
    assert jp.data.open(path).num_examples == 10


def test_compression_as_arrow_0_17_named_it_is_counted(tmp_path, small_machine):
    path = tmp_path / "a.arrow"
    table = clients(["a" * 1_000_000] * 40)
    version = pa.ipc.MetadataVersion.V4
    options = pa.ipc.IpcWriteOptions(compression="zstd", metadata_version=version)
    with pa.ipc.new_stream(str(path), table.schema, options=options) as writer:
        named = {"ARROW:experimental_compression": "ZSTD"}
        writer.write_batch(table.to_batches()[0], custom_metadata=named)
    content = bytearray(path.read_bytes())
    # The second message, without the field that later versions name the compression in.
    second = content.index(b"\xff\xff\xff\xff", 8)
    batch = at_offset(content, entry_of(content, at_offset(content, second + 8), 2)[1])
    struct.pack_into("<H", content, entry_of(content, batch, 3)[0], 0)
    path.write_bytes(content)
    assert len(content) < 5_000
    with pa.ipc.open_stream(str(path)) as stream:
        assert stream.read_all()["text"][39].as_py() == "a" * 1_000_000
    with pytest.raises(InputError, match="its largest batch, unpacked and copied once, would take"):
        jp.data.open(path)


def test_a_dictionary_counts_as_often_as_a_file_lists_it(tmp_path, small_machine):
    """Arrow appends a delta to the dictionary each time, uncompressed ones, too."""
    path = tmp_path / "a.arrow"
    kinds = {"client": pa.string(), "text": pa.dictionary(pa.int32(), pa.string())}
    schema, deltas = pa.schema(kinds), pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(str(path), schema, options=deltas) as writer:
        for texts in (["a"], ["a", "b" * 100_000]):
            column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), texts)
            writer.write_batch(pa.record_batch([["u"], column], schema=schema))
    assert jp.data.open(path).num_examples == 2
    content = bytearray(path.read_bytes()[:-10])
    footer = len(content) - struct.unpack("<i", path.read_bytes()[-10:-6])[0]
    field = entry_of(content, at_offset(content, footer), 2)[1]
    listed = at_offset(content, field)
    first, delta = content[listed + 4 : listed + 28], content[listed + 28 : listed + 52]
    content += b"\0" * (-(len(content) - footer + 4) % 8)
    struct.pack_into("<I", content, field, len(content) - field)
    content += struct.pack("<I", 1 + 1_000) + first + delta * 1_000
    content += struct.pack("<i", len(content) - footer) + b"ARROW1"
    path.write_bytes(content)
    with pytest.raises(InputError, match="its largest batch, unpacked and copied once, would take"):
        jp.data.open(path)


def test_a_damaged_footer_does_not_end_the_process(tmp_path):
    """TRUST 6: pyarrow's `RowGroupMetaData.column` throws what Python cannot catch."""
    path = tmp_path / "a.parquet"
    parquet.write_table(clients(["a text", "another"]), path)
    whole, refused = path.read_bytes(), 0
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(footer, len(whole)):
        for value in (48, 127):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                jp.data.open(path)
            except (CorruptFile, InputError):
                refused += 1
    assert refused


def test_a_row_group_larger_than_memory_is_refused(tmp_path, small_machine):
    path = tmp_path / "a.parquet"
    zeros = pa.array(np.zeros(10_000_000, np.int64))
    parquet.write_table(pa.table({"client": zeros, "x": zeros}), path, row_group_size=10**7)
    assert path.stat().st_size < 100_000
    with pytest.raises(InputError, match=r"a\.parquet: row group 1, unpacked, would take"):
        jp.data.open(f"{path}?client=client&features=x")


def varint(number: int) -> bytes:
    """A whole number as Parquet's footer has it."""
    left, found = 2 * number, b""
    while left >= 128:
        found, left = found + bytes([left % 128 + 128]), left // 128
    return found + bytes([left])


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
        content, known = path.read_bytes(), b"\x16" + varint(stated)
        assert known in content
        path.write_bytes(content.replace(known, b"\x16" + b"\x80" * (len(known) - 2) + b"\0"))
        assert parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 0
    rows = next(read_arrow(path, Fields([("text", "text")])))
    assert 1 <= len(rows.numbers) and rows.columns["text"].nbytes < 2**29
    assert rows.columns["text"][0].as_py() == "a" * 2**20


@pytest.mark.parametrize("held", ["dictionary", "view"])
def test_one_text_in_many_rows_of_an_arrow_file_is_unpacked_row_by_row(tmp_path, held):
    """At 2^15 rows at once, this megabyte would be 34 GB."""
    path = tmp_path / "a.arrow"
    indices = pa.array(np.zeros(40_000, np.int32))
    texts = pa.DictionaryArray.from_arrays(indices, ["a" * 2**20])
    if held == "view":
        one = pa.array(["a" * 2**20], pa.string_view()).buffers()
        views = np.tile(np.frombuffer(one[1], np.uint8)[:16], 40_000)
        buffers = [None, pa.py_buffer(views), one[2]]
        texts = pa.Array.from_buffers(pa.string_view(), 40_000, buffers)
    table = pa.table({"text": texts})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    assert path.stat().st_size < 2_000_000
    rows = next(read_arrow(path, Fields([("text", "text")])))
    assert 1 <= len(rows.numbers) and rows.columns["text"].nbytes < 2**29
    assert rows.columns["text"][0].as_py() == "a" * 2**20


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_lists_of_texts_are_refused_before_they_are_unpacked(tmp_path, name):
    """These 70 kB would be 4 GB in one row."""
    path = tmp_path / name
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**16, np.int32)), ["a" * 2**16])
    table = pa.table({"x": pa.ListArray.from_arrays([0, 2**16], texts)})
    if name.endswith(".parquet"):
        parquet.write_table(table, path, compression="zstd")
    else:
        packed(path, table)
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(InputError, match="row 1: field 'x' must be .*, found list"):
        next(read_arrow(path, Fields([("x", "value")])))
    assert pa.default_memory_pool().max_memory() < before + 2**29


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.parquet"])
def test_rows_that_exceed_memory_together_are_refused(tmp_path, small_machine, name):
    path = tmp_path / name
    text = "a" * 100_000
    if name.endswith(".parquet"):
        parquet.write_table(clients([text] * 500), path, row_group_size=50)
    else:
        row = f'{{"client": "u", "text": "{text}"}}\n' if "json" in name else f"u,{text}\n"
        head = "" if "json" in name else "client,text\n"
        path.write_bytes(gzip.compress((head + row * 500).encode()))
    with pytest.raises(InputError, match=f"{name}: its rows, in memory, would take"):
        jp.data.open(path)
