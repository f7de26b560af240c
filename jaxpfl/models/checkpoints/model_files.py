"""Reading the small files of published models, and importing libraries that may be missing."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.errors import InputError


def require(module: str, extra: str) -> Any:
    """Imports a library of an optional extra.

    Raises:
      InputError: the library cannot be imported; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this needs {module}, which cannot be imported ({error}): "
            f"pip install 'jaxpfl[{extra}]'"
        ) from error


def expect_file(path: Path) -> Path:
    """Returns `path`, which must be a file.

    Raises:
      InputError: there is no such file.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    return path


def finite(what: str, values: np.ndarray) -> np.ndarray:
    """Returns `values`; refuses NaN and infinities in them, which the message says `what` has."""
    if not np.isfinite(values).all():
        raise InputError(f"{what} holds values that are not finite")
    return values


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Reads the object in a JSON file; with `optional`, a file that is missing gives an empty one.

    Raises:
      InputError: there is no such file.
      CorruptFile: the file does not hold a JSON object in UTF-8.
    """
    if optional and not path.is_file():
        return {}
    return files.read_record(expect_file(path))
