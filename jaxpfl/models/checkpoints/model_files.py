"""Reading files of published models: JSON, digests, and libraries that may be missing."""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

from jaxpfl.errors import CorruptFile, InputError


def require(module: str, extra: str) -> Any:
    """Imports a library of an optional extra, or says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this needs {module}, which cannot be imported ({error}): "
            f"pip install 'jaxpfl[{extra}]'"
        ) from error


def read_json(path: str | Path) -> Any:
    """The value in a JSON file.

    Raises:
      InputError: there is no such file.
      CorruptFile: it is not JSON in UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not a JSON file: {error}") from error


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
