"""JSON lines, plain or gzip'd: one example a line, with its client and its text.

    {"client": "c17", "text": "hello there"}

Policy for text, the same on every platform: the file is UTF-8, and a line that is not is refused
with its number; an escaped lone surrogate becomes U+FFFD; NUL and any other character are kept
(the vocabulary's normalisation deals with them); empty lines are skipped; a line may have up to
16 MiB. Lines of a client need not stand together: they are merged. Clients come in the order of
their first line, and a client's examples in the order of the file.
"""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError

MAX_LINE_BYTES = 16 * 2**20


def read(path: Path, client: str = "client", text: str = "text") -> Population:
    """Reads a file; `client` and `text` are the fields' names.

    Raises:
      CorruptFile: truncated or damaged gzip, a line that is no JSON object or not UTF-8.
      InputError: a field is missing or not of its type. Both name the file and the line.
    """
    owners: dict[str, int] = {}
    owner_of: list[int] = []
    texts: list[str] = []
    for number, line in _lines(path):
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{path}: line {number} is not UTF-8") from error
        except ValueError as error:
            raise CorruptFile(f"{path}: line {number} is not JSON") from error
        if not isinstance(record, dict):
            raise CorruptFile(f"{path}: line {number} is not a JSON object")
        identifier, content = record.get(client), record.get(text)
        if isinstance(identifier, int) and not isinstance(identifier, bool):
            identifier = str(identifier)
        if not isinstance(identifier, str):
            raise InputError(f"{path}: line {number} needs a field {client!r} (str or int)")
        if not isinstance(content, str):
            raise InputError(f"{path}: line {number} needs a field {text!r} (str)")
        owner_of.append(owners.setdefault(identifier, len(owners)))
        texts.append(_storable(content))
    owner = np.asarray(owner_of, np.int64)
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(owners)) if len(owner) else np.zeros(0, np.int64)
    column = pa.array(texts, pa.large_string())
    return Population(
        {"text": column.take(pa.array(order))},
        np.concatenate([[0], np.cumsum(counts)]),
        pa.array([_storable(name) for name in owners], pa.large_string()),
        path.name,
        "client",
    )


def _storable(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


def _lines(path: Path):
    """(number from 1, line as bytes) of the lines that are not empty."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(f"{path}: line {number} is longer than 16 MiB")
                line = line.strip()
                if line:
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorruptFile(
            f"{path}: the gzip stream is truncated or damaged after line {number}"
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
