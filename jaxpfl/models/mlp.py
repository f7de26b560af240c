"""A classifier of rows of numbers: a hidden layer, or none for logistic regression."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.checked import Checked, NonNegativeInt, PositiveInt
from jaxpfl.models.base import Classifier, Params
from jaxpfl.models.layers.initial import glorot_uniform


@dataclass(frozen=True)
class MLP(Checked, Classifier):
    """Features to classes; batches hold "features" float [B, features] and "label" int32 [B].

    Each feature x becomes arcsinh(x), which is x near 0 and sign(x) log(2 |x|) far from it: the
    scale of private features is not known, and raw ones of size 10,000 would let the gradient of a
    single one use up the clip norm. `hidden` is the width of the layer of rectified linear units; 0
    is logistic regression.
    """

    features: PositiveInt
    classes: PositiveInt
    hidden: NonNegativeInt = 64
    name: Literal["classifier_mlp"] = "classifier_mlp"

    columns = ("features", "label")

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.features,)

    def init(self, key: Array) -> Params:
        """Glorot-uniform kernels and zero biases."""
        sizes = [self.features, *([self.hidden] if self.hidden else []), self.classes]
        return {
            f"layer_{place}": {
                "kernel": glorot_uniform(jax.random.fold_in(key, place), shape),
                "bias": jnp.zeros(shape[1], jnp.float32),
            }
            for place, shape in enumerate(zip(sizes, sizes[1:], strict=False))
        }

    def logits(self, params: Params, features_BxF: Array) -> Array:
        x_BxF = jnp.arcsinh(features_BxF.astype(jnp.float32))
        for place in range(len(params)):
            layer = params[f"layer_{place}"]
            x_BxF = jax.nn.relu(x_BxF) if place else x_BxF
            x_BxF = x_BxF @ layer["kernel"] + layer["bias"][None, :]
        return x_BxF
