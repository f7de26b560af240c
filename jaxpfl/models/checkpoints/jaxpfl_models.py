"""Networks that jaxpfl alone knows, such as `CNN`, as files: safetensors and a config.json.

    jaxpfl_models.save("exported", model, params)
    model, params = jaxpfl_models.load("exported")

config.json has {"library": "jaxpfl", "architecture": NAME} and the settings of the model of that
name. A tensor's name is the path to the parameter, as in "layer_0.kernel"; its shape is ours.
Functions of one's own (`models.own`) are in no file: `load` takes the model for its tensors.
Published architectures have `pretrained` instead.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import files, models
from jaxpfl.errors import InputError
from jaxpfl.models.base import Model, Params, named_leaves
from jaxpfl.models.checkpoints import model_files
from jaxpfl.models.checkpoints.safetensors_files import open_tensors, write_folder

_OWN = "OwnModel"
_ARCHITECTURES: dict[str, Any] = {
    name: getattr(models, name)
    for name in (
        *("CIFGLanguageModel", "CNN", "GAN", "LSTMLanguageModel", "MLP", "MultiLabelResNet"),
        *(_OWN, "ResNet"),
    )
}
_LIBRARY = "jaxpfl"
# Trained parameters do not need the prior that they began with; functions are in no file.
_LEFT_OUT = ("output_bias_prior", "init_fn", "loss_fn", "metrics_fn")


def save(folder: str | Path, model: Model, params: Params) -> None:
    """Writes config.json and model.safetensors, in place of a model that the folder holds.

    `load` gives the parameters back bit by bit.
    """
    # A class of one's own may have a name of ours, and its functions are in no file, either.
    classes = {class_: name for name, class_ in _ARCHITECTURES.items()}
    architecture = classes.get(type(model), _OWN)
    leaves = model_files.check_parameters(model, params, ("float32",))
    settings = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(_ARCHITECTURES[architecture])
        if field.name not in _LEFT_OUT
    }
    write_folder(
        folder,
        {"library": _LIBRARY, "architecture": architecture, **settings},
        leaves,
        lambda name: model_files.finite(f"parameter {name}", np.asarray(leaves[name])),
    )


def load(folder: str | Path, own: Model | None = None) -> tuple[Any, Params]:
    """The model in a folder that `save` wrote, and its parameters, on the default device.

    Args:
      own: the model of one's own functions whose parameters these are; None for any other.

    Raises:
      InputError: a file is missing, or the files are not of a model of ours, or do not fit.
      CorruptFile: a file is broken.
    """
    folder = files.user_path(folder)
    path = folder / "config.json"
    settings = model_files.read_object(path)
    if settings.pop("library", None) != _LIBRARY:
        raise InputError(
            f"{path}: library must be {_LIBRARY!r}: models of other libraries are read by "
            "checkpoints.pretrained"
        )
    architecture = settings.pop("architecture", None)
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        names = ", ".join(map(repr, _ARCHITECTURES))
        raise InputError(f"{path}: architecture must be one of {names}, found {architecture!r}")
    fixed = {key: _fixed(value) for key, value in settings.items()}
    if (own is None) == (architecture == _OWN):
        hint = "functions of one's own, which are in no file: jaxpfl.load(FOLDER, own=MODEL)"
        hint = hint if own is None else f"a {architecture}, which needs no `own`"
        raise InputError(f"{path}: the parameters are of {hint}")
    try:
        model_files.check_sizes(fixed, layers=100)
        model = _ARCHITECTURES[architecture](**fixed) if own is None else own
        expected = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InputError(f"{path}: does not describe a {architecture}: {error}") from None
    shapes = named_leaves(expected)
    with open_tensors(folder) as tensors:
        for name in sorted(set(tensors) - shapes.keys()):
            raise InputError(f"{tensors.file(name)}: tensor {name!r} is not part of the model")
        read = []
        for name, shape in shapes.items():
            tensors.require(name, shape.shape)
            read.append(jnp.array(tensors.finite(name), jnp.float32))
    return model, jax.tree.unflatten(jax.tree.structure(expected), read)


def _fixed(value: Any) -> Any:
    """A setting from JSON: tuples where JSON has lists."""
    return tuple(map(_fixed, value)) if isinstance(value, list) else value
