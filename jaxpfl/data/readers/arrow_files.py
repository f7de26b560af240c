"""Parquet files, and Arrow's own files and streams (.arrow), as `datasets` and Feather write them.

Policy:
- Only the columns that are wanted are read. Their content is validated: offsets, UTF-8, and the
  checksums of Parquet's pages where it has them. Arrow's files have none.
- A stream without its end mark is refused as truncated.
- A file is refused whose batches or row groups would not fit the memory once they are unpacked,
  before they are. Where a file may hold a long text once and refer to it often, it is read in
  batches of fewer rows.
- Errors name the file and the row, from 1.
"""

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from jaxpfl import checks
from jaxpfl.data.readers.fields import Fields, Rows, is_text
from jaxpfl.data.readers.unpacked_arrow import most_unpacked
from jaxpfl.errors import CorruptFile, InputError

_PARQUET = ".parquet"
_ROWS = 2**15
_BATCH_BYTES = 2**28
_BYTES = "BYTE_ARRAY"
_FILE_MARK = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a Parquet or Arrow file, in blocks."""
    read = _parquet if path.name.endswith(_PARQUET) else _arrow
    first = 1
    try:
        for batch in read(path, fields):
            if len(batch):
                numbers = range(first, first + len(batch))
                yield fields.conformed(
                    str(path), numbers, {name: batch[name] for name in fields.names}
                )
            first += len(batch)
    except (InputError, pa.ArrowException, OSError, ValueError) as error:
        raise _error(path, error) from None


def _error(path: Path, error: Exception) -> InputError:
    if isinstance(error, InputError):
        return error
    if isinstance(error, OSError) and error.strerror:
        return InputError(f"{path} cannot be read: {error.strerror}")
    what = "Parquet" if path.name.endswith(_PARQUET) else "Arrow"
    return CorruptFile(f"{path}: truncated, damaged or no {what} file")


def _parquet(path: Path, fields: Fields) -> Iterator[pa.RecordBatch]:
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        fields.require(str(path), file.schema_arrow.names)
        fields.require_types(str(path), file.schema_arrow)
        for batch in row_batches(path, file, fields.names):
            batch.validate(full=True)
            yield batch


def row_batches(
    path: Path, file: parquet.ParquetFile, names: Collection[str]
) -> Iterator[pa.RecordBatch]:
    """The batches of some columns of a Parquet file, of so many rows that each fits the memory."""
    groups = range(file.metadata.num_row_groups)
    wanted = _wanted(file.schema, names)
    texts = [wanted[index] for index in wanted if file.schema.column(index).physical_type == _BYTES]
    rows = []
    with parquet.ParquetFile(path, read_dictionary=texts) as known:
        for group in groups:
            # The first row comes first: `RowGroupMetaData.column` ends the process where the
            # footer is damaged, while reading raises an error.
            first = next(known.iter_batches(1, row_groups=[group], columns=list(names)), None)
            if first is not None:
                size = _unpacked_size(file.metadata.row_group(group), wanted)
                checks.fits_memory(f"{path}: row group {group + 1}, unpacked,", size)
            rows.append(_rows_at_once(0 if first is None else _longest_of(first)))
    for number, alike in itertools.groupby(groups, rows.__getitem__):
        yield from file.iter_batches(number, row_groups=list(alike), columns=list(names))


def _wanted(schema: parquet.ParquetSchema, names: Collection[str]) -> dict[int, str]:
    """The columns that are wanted, and all in them: their paths by their positions."""
    heads = tuple(f"{name}." for name in names)
    paths = {index: schema.column(index).path for index in range(len(schema))}
    return {index: path for index, path in paths.items() if f"{path}.".startswith(heads)}


def _unpacked_size(group: parquet.RowGroupMetaData, columns: Collection[int]) -> int:
    """The bytes of these columns of a row group, as its footer states them."""
    chunks = [group.column(index) for index in columns]
    # Numbers that are repeated take less than a bit each, and eight bytes once unpacked.
    return sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in chunks)


def _longest_of(batch: pa.RecordBatch) -> int:
    return max(map(_longest, batch.columns), default=0)


def _longest(column: pa.Array) -> int:
    """The bytes of the longest text of a column that may refer to it in many rows; else 0."""
    if isinstance(column, pa.ExtensionArray):
        return _longest(column.storage)
    if pa.types.is_string_view(column.type):
        # The length is the first of the four numbers that each text has.
        numbers = np.frombuffer(column.buffers()[1] or b"", np.int32)
        first = 4 * column.offset
        return int(numbers[first : first + 4 * len(column) : 4].max(initial=0))
    if isinstance(column, pa.DictionaryArray) and is_text(column.type.value_type):
        lengths = pc.call_function("binary_length", [column.dictionary])
        return pc.call_function("max", [lengths]).as_py() or 0
    return 0


def _rows_at_once(longest: int) -> int:
    return min(_ROWS, max(1, _BATCH_BYTES // max(1, longest)))


def _arrow(path: Path, fields: Fields) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as mapped:
        fields.require(str(path), _opened(mapped).schema.names)
        for batch in batches(path, mapped):
            wanted = batch.select(list(fields.names))
            wanted.validate(full=True)
            rows = _rows_at_once(_longest_of(wanted))
            yield from (wanted.slice(start, rows) for start in range(0, len(wanted), rows))


def batches(path: Path, mapped: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file or stream."""
    opened = _opened(mapped)
    mapped.seek(0)
    content = memoryview(mapped.read_buffer(mapped.size())).cast("B")
    # What a reader makes of a batch takes as much again.
    size = 2 * most_unpacked(content)
    checks.fits_memory(f"{path}: its largest batch, unpacked and copied once,", size)
    if isinstance(opened, pa.RecordBatchFileReader):
        yield from (opened.get_batch(index) for index in range(opened.num_record_batches))
        return
    mapped.seek(max(0, mapped.size() - len(_END_OF_STREAM)))
    if mapped.read() != _END_OF_STREAM:
        raise pa.ArrowInvalid("a stream without its end mark")
    yield from _opened(mapped)


def _opened(mapped: pa.MemoryMappedFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    mapped.seek(0)
    is_file = mapped.read(len(_FILE_MARK)) == _FILE_MARK
    mapped.seek(0)
    return pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
