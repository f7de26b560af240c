"""ImageNet's weights of torchvision's ResNet-18, with the names of the library timm.

    model, params = torchvision_files.load("resnet18.tv_in1k", MultiLabelResNet(), key)

A folder has model.safetensors, as timm/resnet18.tv_in1k of the Hugging Face hub: "conv1.weight",
"bn1.running_mean", "layer2.0.downsample.0.weight", ... Its output layer is not read.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params, named_leaves
from jaxpfl.models.checkpoints.model_files import open_tensors
from jaxpfl.models.resnet import MultiLabelResNet

_NAMES = {
    "stem": "conv1", "stem_norm": "bn1", "convolution_1": "conv1", "norm_1": "bn1",
    "convolution_2": "conv2", "norm_2": "bn2", "projection": "downsample.0",
    "projection_norm": "downsample.1",
}  # fmt: skip


def load(folder: str | Path, model: MultiLabelResNet, key: Array) -> tuple[Any, Params]:
    """The model with a folder's statistics, and its parameters; `key` draws the output layer.

    Raises:
      InputError: a tensor is missing, unexpected, of another shape or dtype, or not finite.
      CorruptFile: the file is broken.
    """
    # Only the output layer is drawn.
    output = jax.jit(lambda key: {name: model.init(key)[name] for name in ("kernel", "bias")})(key)
    drawn = jax.eval_shape(model.init, key) | output
    leaves, statistics = named_leaves(drawn), []
    places = [f"layer{i + 1}.{j}" for i, n in enumerate(model.stages) for j in range(n)]
    names = _NAMES | {f"block_{i}": place for i, place in enumerate(places)}
    with open_tensors(folder) as tensors:
        unused = {name for name in tensors if not name.startswith("fc.")}

        def read(name: str, shape: tuple[int, ...]) -> Array:
            tensors.require(name, shape)
            unused.discard(name)
            return jnp.array(tensors.finite(name), jnp.float32)

        for leaf, old in leaves.items():
            path, _, last = leaf.rpartition(".")
            if not path:  # of the output layer
                continue
            stem, turned = ".".join(names[part] for part in path.split(".")), old.ndim == 4
            shape = tuple(old.shape[i] for i in (3, 2, 0, 1)) if turned else old.shape
            weights = read(f"{stem}.{'bias' if last == 'shift' else 'weight'}", shape)
            leaves[leaf] = weights.transpose(2, 3, 1, 0) if turned else weights
            if last == "scale":
                moments = (read(f"{stem}.running_{name}", shape) for name in ("mean", "var"))
                statistics.append((path, *(tuple(moment.tolist()) for moment in moments)))
        for name in sorted(name for name in unused if not name.endswith("num_batches_tracked")):
            raise InputError(f"{tensors.file(name)}: tensor {name!r} is not part of {model.name}")
    model = dataclasses.replace(model, statistics=tuple(statistics))
    return model, jax.tree.unflatten(jax.tree.structure(drawn), leaves.values())
