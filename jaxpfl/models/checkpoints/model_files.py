"""Small files and parameters of models: their readers and checks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.lazy import require as require
from jaxpfl.models.base import Model, Params, named_leaves

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes of parameters in files and in memory."""


def expect_file(path: Path) -> Path:
    """Returns `path`; raises `InputError` unless it is a file."""
    if not path.is_file():
        raise InputError(f"there is no file {path}{files.where(path)}")
    return path


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; with `optional`, a missing file gives an empty one."""
    if optional and not path.is_file():
        return {}
    return files.read_record(expect_file(path))


def finite(what: str, values: np.ndarray) -> np.ndarray:
    """Returns `values`; refuses NaN and infinities in them, which the message says `what` has."""
    if not np.isfinite(values).all():
        raise InputError(f"{what} holds values that are not finite")
    return values


def check_parameters(model: Model, params: Params, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """The leaves of a model's parameters, by name."""
    leaves = named_leaves(params)
    shapes = named_leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))))
    for name in sorted(leaves.keys() ^ shapes.keys()):
        what = "is missing" if name in shapes else "is not part of the model"
        raise InputError(f"parameter {name} {what}")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name].shape or leaf.dtype.name not in dtypes:
            raise InputError(
                f"parameter {name} must be {' or '.join(dtypes)} {list(shapes[name].shape)}, found "
                f"{leaf.dtype} {list(leaf.shape)}"
            )
    return leaves


def check_sizes(settings: Mapping[str, Any], *, layers: int) -> None:
    """Refuses sizes, and more `layers`, far above any model's, before one is built."""
    for name, value in settings.items():
        most = layers if name in ("layers", "stages") else 2**24
        for number in jax.tree.leaves(value):
            if isinstance(number, int) and number > most:
                raise InputError(f"{name} must be at most {most}, found a larger number")
