"""A classifier of rows of numbers: a hidden layer, or none for logistic regression."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.checks import non_negative_int, positive_int
from jaxpfl.models.base import Batch, Metrics, Params, masked_loss, require_below, require_shape


@dataclass(frozen=True)
class MLP:
    """Features to classes; batches hold "features" float [B, features] and "label" int32 [B].

    Each feature x becomes arcsinh(x), which is x near 0 and sign(x) log(2 |x|) far from it: the
    scale of private features is not known, and raw ones of size 10,000 would let the gradient of a
    single one use up the clip norm.

    Attributes:
      features: number of features.
      classes: number of classes; labels are 0 .. classes - 1.
      hidden: width of the hidden layer of rectified linear units; 0 for logistic regression.

    Raises:
      InputError: a size is not a whole number, or too small.
    """

    features: int
    classes: int
    hidden: int = 64
    name: str = "classifier_mlp"

    columns = ("features", "label")

    def __post_init__(self):
        positive_int("features", self.features)
        positive_int("classes", self.classes)
        non_negative_int("hidden", self.hidden)

    def init(self, key: Array) -> Params:
        """Glorot-uniform kernels and zero biases, from a typed key."""
        initialise = jax.nn.initializers.glorot_uniform()
        sizes = [self.features, *([self.hidden] if self.hidden else []), self.classes]
        return {
            f"layer_{place}": {
                "kernel": initialise(jax.random.fold_in(key, place), shape, jnp.float32),
                "bias": jnp.zeros(shape[1], jnp.float32),
            }
            for place, shape in enumerate(zip(sizes, sizes[1:], strict=False))
        }

    def logits(self, params: Params, features_BxF: Array) -> Array:
        """Float32 logits [B, classes]."""
        x_BxF = jnp.arcsinh(features_BxF.astype(jnp.float32))
        for place in range(len(params)):
            layer = params[f"layer_{place}"]
            x_BxF = jax.nn.relu(x_BxF) if place else x_BxF
            x_BxF = x_BxF @ layer["kernel"] + layer["bias"][None, :]
        return x_BxF

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises `InputError` if the columns do not fit the settings."""
        require_shape(columns, "features", (self.features,))
        require_below(columns, "label", "classes", self.classes)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean cross-entropy over the real examples, see `jaxpfl.models.base.Model.loss`."""
        features = jnp.where(mask[:, None], batch["features"], 0)
        return masked_loss(self.logits(params, features), batch["label"], mask)

    def evaluate(self, params: Params, batch: Batch, mask: Array) -> Metrics:
        """Sums of loss, correct predictions and examples."""
        return self.loss(params, batch, mask)[1]
