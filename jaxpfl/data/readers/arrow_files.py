"""Parquet files, and Arrow's own files and streams (.arrow), as `datasets` and Feather write them.

Policy:
- Only the columns that are wanted are read. Their content is validated: offsets, UTF-8, and the
  checksums of Parquet's pages where it has them. Arrow's files have none.
- A stream without its end mark is refused as truncated.
- Errors name the file and the row, from 1.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

PARQUET = ".parquet"
ARROW = ".arrow"

_ROWS = 2**15
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
        yield from file.iter_batches(_ROWS, columns=list(fields.names))


def _arrow(path: Path, fields: Fields) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as mapped:
        fields.require(str(path), _opened(mapped).schema.names)
        for batch in batches(mapped):
            for start in range(0, len(batch), _ROWS):
                yield batch.select(list(fields.names)).slice(start, _ROWS)


def batches(mapped: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file or stream.

    Raises:
      ArrowInvalid: it is neither, or a stream without its end mark, so truncated.
    """
    opened = _opened(mapped)
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
