"""Evaluates a public model on a device's own examples; the results are PRIVATE.

In a deployment every client runs this on its own data. The results select examples to train on
(`data.selection`), or leave the client as part of a noisy sum (`algorithms.federated_metrics`).
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.models.base import Params


class Classifier(Protocol):
    """A hashable classifier of images, with float logits [B, classes]."""

    def logits(self, params: Params, image_BxHxWxC: jax.Array) -> jax.Array: ...


def correct_examples(
    model: Classifier, params: Params, population: Population, *, batch_size: int = 256
) -> np.ndarray:
    """Whether the model's most likely class is the label's, bool [examples]. PRIVATE.

    A tie goes to the lowest class. An example with logits that are not finite is incorrect.

    Args:
      model, params: e.g. a `models.CNN` and its parameters; public.
      population: with the columns "image" [H, W, C] and "label", whole numbers.
      batch_size: examples per dispatch, which bounds a device's memory.

    Raises:
      InputError: a column is missing or of another kind.
    """
    batch_size = checks.positive_int("batch_size", batch_size)
    for name in ("image", "label"):
        if not isinstance(population.columns.get(name), np.ndarray):
            raise InputError(
                f"correct_examples needs a column {name!r} of numbers, found "
                f"{', '.join(population.columns)}"
            )
    images, labels = population.columns["image"], population.columns["label"]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise InputError(f"column 'label' must hold whole numbers, found {labels.dtype}")
    pending = []
    for start in range(0, len(labels), batch_size):
        image_BxHxWxC = images[start : start + batch_size]
        missing = batch_size - len(image_BxHxWxC)
        if missing:
            padding = ((0, missing), *[(0, 0)] * (images.ndim - 1))
            image_BxHxWxC = np.pad(image_BxHxWxC, padding)
        pending.append(_most_likely(model, params, image_BxHxWxC))
    if not pending:
        return np.zeros(0, bool)
    classes = np.concatenate([np.asarray(batch) for batch in pending])[: len(labels)]
    # Not finite counts as wrong, whatever the label.
    return (classes == labels) & (classes >= 0)


@partial(jax.jit, static_argnums=0)
def _most_likely(model: Classifier, params: Params, image_BxHxWxC: Any) -> jax.Array:
    """The class of each image, int32 [B]; -1 where the logits are not finite."""
    logits_BxV = model.logits(params, image_BxHxWxC)
    finite_B = jnp.all(jnp.isfinite(logits_BxV), axis=1)
    return jnp.where(finite_B, jnp.argmax(logits_BxV, axis=1).astype(jnp.int32), jnp.int32(-1))
