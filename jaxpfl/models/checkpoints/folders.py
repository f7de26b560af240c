"""A trained model in a folder, whatever the model.

    folders.save("exported", model, params)
    model, params = folders.load("exported")

Published architectures are written as Hugging Face has them (`pretrained`), adapters as PEFT has
them (`adapters`), and all others, such as `CNN`, as safetensors and a config.json of ours. That has
{"library": "jaxpfl", "architecture": NAME} and the settings of the model of that name. A tensor's
name is the path to the parameter, as in "layer_0.kernel"; its shape is ours. Functions of one's own
(`models.own`) are in no file: `load` takes the model for its tensors.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import files, models
from jaxpfl.checks import one_of
from jaxpfl.errors import InputError
from jaxpfl.models.base import Model, Params, named_leaves
from jaxpfl.models.checkpoints import adapters, hub, model_files, pretrained
from jaxpfl.models.checkpoints.model_files import open_tensors, write_folder
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder

_BASE = "base_model_name_or_path"

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


def reader(model: Model, base: str | None = None) -> str:
    """What reads the files of a model besides `jaxpfl.load`, in words."""
    if isinstance(model, Decoder) and model.lora is not None:
        return f"PEFT, beside `{base}`"
    own = isinstance(model, Decoder | Encoder)
    return "`transformers`" if own else "any library that reads safetensors"


def save(folder: str | Path, model: Any, params: Params, *, base: str | None = None) -> None:
    """Writes a model, in place of one in the folder; `load` gives the parameters back bit by bit.

    Of a model with adapters these alone are written, with the name of their `base`.
    """
    if isinstance(model, Decoder) and model.lora is not None:
        adapters.save(folder, model, params, base=base)
    elif isinstance(model, Decoder | Encoder):
        pretrained.save(folder, model, params)
    else:
        _save_own(folder, model, params)


def load(folder: str | Path, own: Model | None = None) -> tuple[Any, Params]:
    """The model in a folder, and its parameters, with the base that adapters belong to.

    Args:
      own: the model of one's own functions whose parameters these are; None for any other.

    Raises:
      InputError: a file is missing, or the files are of no model that is known here, or do not fit.
      CorruptFile: a file is broken. No file is executed.
    """
    folder = files.user_path(folder)
    path = folder / adapters.CONFIG
    if not path.is_file():
        config = folder / "config.json"
        if "model_type" in (settings := model_files.read_object(config)):
            return pretrained.load(folder)
        return _own(config, settings, own)
    settings = model_files.read_object(path)
    name, revision = settings.get(_BASE), settings.get("revision")
    if not isinstance(name, str):
        raise InputError(f"{path}: {_BASE} must name the base of the adapters, found {name!r}")
    # A base that was written with the adapters lies in their folder, or beside it.
    beside = [place / name for place in (folder, folder.parent) if (place / name).is_dir()]
    base = beside[0] if beside else hub.resolve(f"{name}@{revision}" if revision else name)
    model, params = pretrained.load(base)
    if not isinstance(model, Decoder):
        raise InputError(f"{path}: the base must be a decoder, found an encoder in {base}")
    return adapters.load(folder, model, params)


def _save_own(folder: str | Path, model: Model, params: Params) -> None:
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


def _own(path: Path, settings: dict[str, Any], own: Model | None) -> tuple[Any, Params]:
    """The model that a config.json of ours describes, and its parameters."""
    if settings.pop("library", None) != _LIBRARY:
        what = "models of other libraries are read by checkpoints.pretrained"
        raise InputError(f"{path}: library must be {_LIBRARY!r}: {what}")
    stated = settings.pop("architecture", None)
    architecture = one_of(f"{path}: architecture", stated, tuple(_ARCHITECTURES))
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
    with open_tensors(path.parent) as tensors:
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
