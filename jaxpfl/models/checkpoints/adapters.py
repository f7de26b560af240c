"""Adapters in a folder: adapter_config.json and adapter_model.safetensors.

Settings and names are those of the library PEFT, which reads what is written here, and whose own
adapters of our decoders are read here; see `adapter_settings` for what is refused. In a file, A is
[rank, inputs] and B [outputs, rank], separately for every layer.

GPT-2's queries, keys and values are one matrix in its checkpoints. An adapter of rank R on it is
read as three of rank R with the same A. Ours, of rank r each, are written as one of rank 3 r:

    A = [A_q; A_k; A_v]        B = diag(B_q, B_k, B_v)        alpha = 3 alpha

with zeros for a projection that has no adapter. Read again, it is split into the same adapters, bit
by bit, unless PEFT trained it further and B is no longer block-diagonal. Then it is read as three
of rank 3 r, and the adapters of the other maps get the same rank by zeros.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints import adapter_settings
from jaxpfl.models.checkpoints.adapter_settings import FUSED, AdapterSettings, modules
from jaxpfl.models.checkpoints.model_files import finite
from jaxpfl.models.checkpoints.safetensors_files import (
    Described,
    Tensors,
    open_file,
    replace_files,
    write_file,
    write_json,
)
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import PROJECTIONS
from jaxpfl.models.decoder.network import Decoder

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_LEAVES = {"a": "lora_A", "b": "lora_B"}

Adapters = dict[str, dict[str, np.ndarray]]
"""{name: {"a": [layers, inputs, rank], "b": [layers, rank, outputs]}}, of projections or modules"""


def save(folder: str | Path, model: Decoder, params: Params, *, base: str | None = None) -> None:
    """Writes the adapters of a model, without its base (see `jaxpfl.models.decoder.lora.attach`).

    They replace the adapters that the folder holds. A crash leaves the old ones, the new ones, or a
    folder without adapter_config.json, which `load` refuses.

    Args:
      base: the folder or the hub name of the base, which PEFT looks up; None leaves it open.

    Raises:
      InputError: the model has no adapters, or one is not finite.
    """
    if model.lora is None:
        raise InputError("the model has no adapters to save")
    adapters, _ = lora.split(params)
    described, sources = {}, {}
    for module, own in modules(model).items():
        if not set(own) & set(adapters):
            continue
        for leaf in _LEAVES:
            shape, dtype = _stored(adapters, own, leaf)
            for layer in range(model.config.layers):
                name = _name(model, module, layer, leaf)
                described[name] = Described(shape, dtype)
                sources[name] = (own, leaf, layer)

    def read(name: str) -> np.ndarray:
        return _matrix(adapters, *sources[name])

    settings = adapter_settings.described(model, tuple(adapters), base)
    replace_files(
        Path(folder),
        {
            WEIGHTS: lambda path: write_file(path, described, read),
            CONFIG: lambda path: write_json(path, settings),
        },
    )


def load(folder: str | Path, model: Decoder, params: Params) -> tuple[Decoder, dict[str, Any]]:
    """The model with the adapters in a folder, and its parameters, which share the base's arrays.

    Args:
      model, params: the base that the adapters were trained with, without adapters.

    Raises:
      InputError: a file is missing, the model has adapters already, a setting is not supported or
        not known, or a tensor is missing, unexpected, of another shape or not finite.
      CorruptFile: a file is broken.
    """
    folder = Path(folder)
    if model.lora is not None:
        raise InputError("the model has adapters already: merge or detach them first")
    settings = adapter_settings.read(folder / CONFIG, model)
    adapters = _read(folder / WEIGHTS, model, params, settings)
    rank = max(each["a"].shape[-1] for each in adapters.values())
    found = dataclasses.replace(
        settings.lora,
        rank=rank,
        # Three times the rank only with three times the alpha, so that the scale is the same.
        alpha=settings.lora.alpha * (rank // settings.lora.rank),
        targets=tuple(name for name in PROJECTIONS if name in adapters),
    )
    padded = {name: _widened(each, rank) for name, each in adapters.items()}
    joined = lora.join(jax.tree.map(jnp.array, padded), params)
    return dataclasses.replace(model, lora=found), joined


def _read(path: Path, model: Decoder, params: Params, settings: AdapterSettings) -> Adapters:
    """The adapters of the projections; those of a fused matrix may have another rank."""
    adapters: Adapters = {}
    with open_file(path) as file:
        tensors = Tensors(path, {name: (path, file) for name in file.keys()})  # noqa: SIM118
        unused = set(tensors)
        for module, own in modules(model).items():
            if own[0] not in settings.lora.targets:
                continue
            tripled = settings.tripled and module == FUSED
            rank = settings.lora.rank * (3 if tripled else 1)
            kernels = [params["layers"][name] for name in own]
            shapes = [each["kernel_int8" if model.int8 else "kernel"].shape for each in kernels]
            layers, inputs, _ = shapes[0]
            ends = np.cumsum([shape[-1] for shape in shapes])
            sizes = {"a": (layers, inputs, rank), "b": (layers, rank, int(ends[-1]))}
            names = {
                (leaf, layer): _name(model, module, layer, leaf)
                for leaf in sizes
                for layer in range(layers)
            }
            # All of them before memory is taken for the rank that the settings claim.
            for (leaf, _), name in names.items():
                unused.discard(name)
                tensors.check(name, sizes[leaf][:0:-1])
            whole = {leaf: np.empty(size, np.float32) for leaf, size in sizes.items()}
            for (leaf, layer), name in names.items():
                whole[leaf][layer] = tensors.finite(name).T
            cut = dict(zip(own, np.split(whole["b"], ends[:-1], axis=-1), strict=True))
            shared = {name: {"a": whole["a"], "b": part} for name, part in cut.items()}
            blocks = _blocks(shared) if tripled else None
            adapters |= shared if blocks is None else blocks
        if unused:
            raise InputError(f"{path}: tensor {min(unused)!r} is not an adapter of this model")
    return adapters


def _blocks(shared: Adapters) -> Adapters | None:
    """Adapters of a third of the rank, without those that are zero; None if B has other blocks."""
    found: Adapters = {}
    for number, (name, each) in enumerate(shared.items()):
        a = np.split(each["a"], len(shared), axis=-1)[number]
        parts = np.split(each["b"], len(shared), axis=-2)
        b = parts.pop(number)
        if any(part.any() for part in parts):
            return None
        if a.any() or b.any():
            found[name] = {"a": a, "b": b}
    # Adapters without any value are still adapters.
    return found or None


def _widened(adapter: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """The same adapter at a higher rank: the new directions are zero."""
    more = rank - adapter["a"].shape[-1]
    return {
        "a": np.pad(adapter["a"], ((0, 0), (0, 0), (0, more))),
        "b": np.pad(adapter["b"], ((0, 0), (0, more), (0, 0))),
    }


def _stored(adapters: Params, own: tuple[str, ...], leaf: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a matrix in the file: A [rank, inputs] or B [outputs, rank]."""
    some = next(adapters[name] for name in own if name in adapters)
    _, first, last = some[leaf].shape
    parts = len(own)
    shape = (parts * last, first) if leaf == "a" else (parts * last, parts * first)
    return shape, some[leaf].dtype.name


def _matrix(adapters: Params, own: tuple[str, ...], leaf: str, layer: int) -> np.ndarray:
    """A matrix as it is in the file; of several projections, see the module's docstring."""
    shape, dtype = _stored(adapters, own, leaf)
    if len(own) == 1:
        return finite(f"adapter {own[0]}/{leaf}", np.asarray(adapters[own[0]][leaf][layer])).T
    whole = np.zeros(shape, dtype)
    height, width = shape[0] // len(own), shape[1] // (len(own) if leaf == "b" else 1)
    for number, name in enumerate(own):
        if name in adapters:
            values = finite(f"adapter {name}/{leaf}", np.asarray(adapters[name][leaf][layer]))
            left = number * width if leaf == "b" else 0
            whole[number * height : (number + 1) * height, left : left + width] = values.T
    return whole


def _name(model: Decoder, module: str, layer: int, leaf: str) -> str:
    """The name of a matrix in the file."""
    before = "base_model.model." + ("transformer.h" if model.name == "gpt2" else "model.layers")
    return f"{before}.{layer}.{module}.{_LEAVES[leaf]}.weight"
