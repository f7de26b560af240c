"""LoRA: low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685).

A linear map x W becomes x W + alpha / rank (x A) B with A [in, rank] and B [rank, out]. A is drawn
uniformly within +-1 / sqrt(in) and B is zero at first, so that training starts from the base model.
Only A and B are trained:

    model, params = lora.attach(model, params, LoRA(rank=4, alpha=8.0), key)
    adapters, base = adapter_trees.split(params)
    loss = lambda a: model.loss(adapter_trees.join(a, base), batch, mask)[0]
    gradients = jax.grad(loss)(adapters)

No function here changes an array that it is given: `detach` returns the arrays of the base
themselves, and `merge` makes new ones. The base may be bfloat16 or int8; adapters are float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params, is_traced
from jaxpfl.models.decoder.config import PROJECTIONS, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.layers.initial import uniform


def attach(
    model: Decoder, params: Params, lora: LoRA, key: Array
) -> tuple[Decoder, dict[str, Any]]:
    """The model with adapters, and its parameters: the same base arrays, and new adapters.

    The adapters of projection i of `PROJECTIONS` are drawn from `fold_in(key, i)`.
    """
    if model.lora is not None:
        raise InputError("the model has adapters already: merge or detach them first")
    layers = params["layers"]
    targets = [name for name in lora.targets if name in layers]
    if not targets:
        raise InputError(f"a {model.name} model has none of the targets {lora.targets}")
    kernels = {name: layers[name]["kernel_int8" if model.int8 else "kernel"] for name in targets}
    # A dry run traces shapes alone, of any size.
    if not is_traced((kernels, key)):
        shapes = [kernel.shape for kernel in kernels.values()]
        sizes = sum(depth * (inputs + outputs) for depth, inputs, outputs in shapes)
        checks.fits_memory(f"adapters of rank {lora.rank:,}", 4 * lora.rank * sizes)
    adapted = dict(layers)
    for name in targets:
        depth, inputs, outputs = kernels[name].shape
        bound = inputs**-0.5
        own_key = jax.random.fold_in(key, PROJECTIONS.index(name))
        shape = (depth, inputs, lora.rank)
        adapted[name] = dict(layers[name]) | {
            "a": uniform(own_key, shape, bound),
            "b": jnp.zeros((depth, lora.rank, outputs), jnp.float32),
        }
    return dataclasses.replace(model, lora=lora), dict(params) | {"layers": adapted}


def detach(model: Decoder, params: Params) -> tuple[Decoder, dict[str, Any]]:
    """The model without its adapters: the base, in the same arrays."""
    return dataclasses.replace(model, lora=None), adapter_trees.split(params)[1]


def merge(model: Decoder, params: Params) -> tuple[Decoder, dict[str, Any]]:
    """The model with W + alpha / rank A B in place of every adapted W, computed in float32.

    The merged weights have the dtype of the base; rounding to bfloat16 can lose small adapters. The
    given parameters do not change, so they serve to undo the merge.
    """
    if model.lora is None:
        raise InputError("the model has no adapters to merge")
    if model.int8:
        raise InputError("adapters cannot be merged into int8 weights: use the model unmerged")
    scale = jnp.float32(model.lora.scale)
    adapters, base = adapter_trees.split(params)
    layers = dict(base["layers"])
    for name, adapter in adapters.items():
        kernel = layers[name]["kernel"]
        update = jnp.matmul(adapter["a"], adapter["b"], precision="highest") * scale
        layers[name] = dict(layers[name]) | {
            "kernel": (kernel.astype(jnp.float32) + update).astype(kernel.dtype)
        }
    return dataclasses.replace(model, lora=None), dict(base) | {"layers": layers}
