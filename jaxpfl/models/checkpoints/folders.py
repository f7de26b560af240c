"""A trained model in a folder, whatever the model.

    folders.save("exported", model, params)
    model, params = folders.load("exported")

Published architectures are written as Hugging Face has them (`pretrained`), adapters as PEFT has
them (`adapters`), all others with names of ours (`jaxpfl_models`).
"""

from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.models.base import Model, Params
from jaxpfl.models.checkpoints import adapters, hub, jaxpfl_models, model_files, pretrained
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder

_BASE = "base_model_name_or_path"


def reader(model: Model, base: str | None = None) -> str:
    """What reads the files of a model besides `jaxpfl.load`, in words."""
    if isinstance(model, Decoder) and model.lora is not None:
        return f"PEFT, beside `{base}`"
    own = isinstance(model, Decoder | Encoder)
    return "`transformers`" if own else "any library that reads safetensors"


def save(folder: str | Path, model: Any, params: Params, *, base: str | None = None) -> None:
    """Writes a model; of one with adapters these alone, with the name of their `base`."""
    if isinstance(model, Decoder) and model.lora is not None:
        adapters.save(folder, model, params, base=base)
    elif isinstance(model, Decoder | Encoder):
        pretrained.save(folder, model, params)
    else:
        jaxpfl_models.save(folder, model, params)


def load(folder: str | Path, own: Model | None = None) -> tuple[Any, Params]:
    """The model in a folder, and its parameters, with the base that adapters belong to.

    `own` is the model of functions of one's own, see `jaxpfl_models.load`. Errors are those of the
    format's reader; no file is executed.
    """
    folder = files.user_path(folder)
    path = folder / adapters.CONFIG
    if not path.is_file():
        if "model_type" in model_files.read_object(folder / "config.json"):
            return pretrained.load(folder)
        return jaxpfl_models.load(folder, own)
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
