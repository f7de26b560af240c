"""Converts any source of clients to a folder that opens without being read.

The folder is mapped into memory (see `data.storage`), so that a population may be larger than the
memory. Files of TensorFlow Federated, and tables that are grouped on the disk, are converted while
they are read, in memory that does not grow with their size.
"""

import os
import time
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.data.open import streamed
from jaxpfl.data.storage import write
from jaxpfl.data.stream import Encoder
from jaxpfl.errors import InputError
from jaxpfl.progress import Progress


def convert(
    source: str, out: str | Path, encoder: Encoder | None = None, *, progress: bool = True
) -> dict[str, Any]:
    """Writes the population of `source`, as for `data.open`, to the new folder `out`.

    `out` is complete or absent. It is written as `.NAME.partial`; the next call removes the files
    that a killed process left there. It contains private data and gets mode 0700.

    Args:
      encoder: writes token ids in place of the texts and all other columns, such as a
        `text.Vocabulary`.

    Returns:
      The folder, and PRIVATE: numbers of clients and examples, bytes written and seconds taken.

    Raises:
      InputError: the folder exists already, or the source is not valid.
      CorruptFile: the source is truncated or damaged.
    """
    out = files.user_path(out)
    if out.exists():
        raise InputError(f"{out}: the folder to write must be new, but it exists already")
    began = time.monotonic()
    with Progress("converting", progress=progress, step="example") as bar:
        clients, examples = write(out, streamed(source), encoder, bar)
    return {
        "out": str(out),
        "clients": clients,
        "examples": examples,
        "bytes": sum(entry.stat().st_size for entry in os.scandir(out)),
        "seconds": round(time.monotonic() - began, 3),
    }
