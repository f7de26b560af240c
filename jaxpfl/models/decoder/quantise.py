"""Weights as 8-bit integers, for a base model that is used but not trained.

Every output of a linear map has its own scale (Dettmers et al. 2022, vector-wise quantisation):
W[i, o] is stored as round(W[i, o] / s_o) with s_o = max_i |W[i, o]| / 127, so no weight changes by
more than s_o / 2. Embeddings, norms, biases and the output layer are not quantised, and adapters of
a quantised model are float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.config import PROJECTIONS
from jaxpfl.models.decoder.network import Decoder


def quantise(model: Decoder, params: Params) -> tuple[Decoder, dict[str, Any]]:
    """The model with int8 weights in its layers, and its parameters; half of bfloat16's memory."""
    if model.int8:
        raise InputError("the model has int8 weights already")
    layers = dict(params["layers"])
    for name in PROJECTIONS:
        if name in layers:
            part = dict(layers[name])
            part["kernel_int8"], part["kernel_scale"] = _rounded(part.pop("kernel"))
            layers[name] = part
    return dataclasses.replace(model, int8=True), dict(params) | {"layers": layers}


@jax.jit
def _rounded(kernel_NxIxO: Array) -> tuple[Array, Array]:
    def one(kernel_IxO: Array) -> tuple[Array, Array]:
        wide_IxO = kernel_IxO.astype(jnp.float32)
        highest_O = jnp.max(jnp.abs(wide_IxO), axis=0)
        # The scale of a column of zeros is one, so that nothing is divided by zero.
        scale_O = jnp.where(highest_O > 0, highest_O / 127, jnp.float32(1))
        return jnp.round(wide_IxO / scale_O[None]).astype(jnp.int8), scale_O

    # One layer at a time, so that there is never a float32 copy of all of them.
    return jax.lax.map(one, kernel_NxIxO)
