"""Parquet files, and Arrow's own files and streams (.arrow), as `datasets` and Feather write them.

Policy:
- Only the columns that are wanted are read. Their content is validated: offsets, UTF-8, and the
  checksums of Parquet's pages where it has them. Arrow's files have none.
- A stream without its end mark is refused as truncated.
- A file is refused whose batches or row groups would not fit the memory once they are unpacked,
  before they are. A text that a Parquet file holds once and refers to often is read in batches of
  fewer rows.
- Errors name the file and the row, from 1.
"""

import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from jaxpfl import checks
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.data.readers.unpacked_arrow import most_unpacked
from jaxpfl.errors import CorruptFile, InputError

PARQUET = ".parquet"
ARROW = ".arrow"

_ROWS = 2**15
_BATCH_BYTES = 2**28
_FILE_MARK = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a Parquet or Arrow file, in blocks.

    Raises:
      InputError: a field is missing or of another kind, or the file cannot be read.
      CorruptFile: the file is truncated or damaged.
    """
    what = "Parquet" if path.name.endswith(PARQUET) else "Arrow"
    first = 1
    try:
        for batch in _parquet(path, fields) if what == "Parquet" else _arrow(path, fields):
            batch.validate(full=True)
            if len(batch):
                numbers = range(first, first + len(batch))
                found = {name: batch[name] for name in fields.names}
                yield fields.conformed(str(path), numbers, found)
            first += len(batch)
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        raise CorruptFile(f"{path}: truncated, damaged or no {what} file") from None


def _parquet(path: Path, fields: Fields) -> Iterator[pa.RecordBatch]:
    with parquet.ParquetFile(path, page_checksum_verification=True) as file:
        fields.require(str(path), file.schema_arrow.names)
        yield from row_batches(path, file, fields.names)


def row_batches(
    path: Path, file: parquet.ParquetFile, names: Collection[str]
) -> Iterator[pa.RecordBatch]:
    """The batches of some columns of a Parquet file, of so many rows that each fits the memory.

    Raises:
      InputError: a row group does not, by what the file itself says of it.
    """
    groups = range(file.metadata.num_row_groups)
    rows = [_rows_at_once(path, file.metadata, group, names) for group in groups]
    for number, alike in itertools.groupby(groups, rows.__getitem__):
        yield from file.iter_batches(number, row_groups=list(alike), columns=list(names))


def _rows_at_once(
    path: Path, metadata: parquet.FileMetaData, group: int, names: Collection[str]
) -> int:
    held = metadata.row_group(group)
    chunks = [held.column(index) for index in range(held.num_columns)]
    heads = tuple(f"{name}." for name in names)
    wanted = [each for each in chunks if f"{each.path_in_schema}.".startswith(heads)]
    # Numbers that are repeated take less than a bit each, and eight bytes once they are unpacked.
    size = sum(max(each.total_uncompressed_size, 8 * each.num_values) for each in wanted)
    checks.fits_memory(f"{path}: row group {group + 1}, unpacked,", size)
    texts = [
        each.path_in_schema
        for each in wanted
        if each.physical_type == "BYTE_ARRAY"
        and each.has_dictionary_page
        and _ROWS * each.total_uncompressed_size > _BATCH_BYTES
    ]
    longest = max((_longest(path, group, each) for each in texts), default=0)
    return min(_ROWS, max(1, _BATCH_BYTES // max(1, longest)))


def _longest(path: Path, group: int, column: str) -> int:
    """The bytes of the longest text that a column of a row group holds once, for all its rows."""
    with parquet.ParquetFile(path, read_dictionary=[column]) as file:
        first = next(file.iter_batches(1, row_groups=[group], columns=[column]), None)
    if first is None or not pa.types.is_dictionary(first.column(0).type):
        return 0
    lengths = pc.call_function("binary_length", [first.column(0).dictionary])
    return pc.call_function("max", [lengths]).as_py() or 0


def _arrow(path: Path, fields: Fields) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as mapped:
        fields.require(str(path), _opened(mapped).schema.names)
        for batch in batches(path, mapped):
            for start in range(0, len(batch), _ROWS):
                yield batch.select(list(fields.names)).slice(start, _ROWS)


def batches(path: Path, mapped: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file or stream.

    Raises:
      InputError: one does not fit the memory once it is unpacked.
      ArrowInvalid: it is neither, or a stream without its end mark, so truncated.
    """
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
