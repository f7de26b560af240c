"""Parquet files, as `datasets`, pandas and polars write them.

Policy:
- Only the columns that are wanted are read. Their content is validated: offsets, UTF-8, and the
  checksums of pages where a file has them.
- A file is refused whose row groups would not fit the memory once they are unpacked, before they
  are. Where a file may hold a long text once and refer to it often, it is read in batches of fewer
  rows.
- Errors name the file and the row, from 1.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from jaxpfl import checks
from jaxpfl.data.readers.fields import Fields, Rows
from jaxpfl.errors import CorruptFile, InputError

_ROWS = 2**15
_BATCH_BYTES = 2**28


def read_parquet(path: Path, fields: Fields) -> Iterator[Rows]:
    """The rows of a file, in blocks."""
    first = 1
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            fields.require_schema(str(path), file.schema_arrow)
            for batch in _batches(path, file, fields.names):
                batch.validate(full=True)
                numbers = range(first, first + len(batch))
                if len(batch):
                    columns = fields.columns(str(path), batch)
                    yield fields.rows(str(path), numbers, columns)
                first += len(batch)
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        # Arrow's own message may quote values.
        raise CorruptFile(f"{path}: truncated, damaged or no Parquet file") from None


def _batches(
    path: Path, file: parquet.ParquetFile, names: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    columns = range(len(file.schema))
    paths = {index: f"{file.schema.column(index).path}." for index in columns}
    heads = tuple(f"{name}." for name in names)
    wanted = [index for index in columns if paths[index].startswith(heads)]
    texts = [i for i in wanted if file.schema.column(i).physical_type == "BYTE_ARRAY"]
    read_dictionary = [file.schema.column(index).path for index in texts]
    with parquet.ParquetFile(path, read_dictionary=read_dictionary) as dictionaries:
        for group in range(file.metadata.num_row_groups):
            # The first row comes first: `RowGroupMetaData.column` ends the process where the
            # footer is damaged, while reading raises an error. Its dictionaries are the group's.
            first = next(
                dictionaries.iter_batches(1, row_groups=[group], columns=list(names)), None
            )
            if first is None:
                continue
            chunks = [file.metadata.row_group(group).column(index) for index in wanted]
            # Numbers that are repeated take less than a bit each, and eight bytes once unpacked.
            size = sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in chunks)
            checks.fits_memory(f"{path}: row group {group + 1}, unpacked,", size)
            rows = min(_ROWS, max(1, _BATCH_BYTES // max(1, *map(_longest, first.columns))))
            yield from file.iter_batches(rows, row_groups=[group], columns=list(names))


def _longest(column: pa.Array) -> int:
    """The bytes of the longest text that rows of a column may refer to."""
    if not isinstance(column, pa.DictionaryArray) or pa.types.is_integer(column.dictionary.type):
        return 1
    lengths = pc.call_function("binary_length", [column.dictionary])
    return pc.call_function("max", [lengths]).as_py() or 1
