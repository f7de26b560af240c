"""Evaluates a public model on a device's own examples, for `data.selection`: PRIVATE results."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Static
from jaxpfl.models.base import Classifier, Params


def correct_examples(
    model: Classifier, params: Params, population: Population, *, batch_size: int = 256
) -> np.ndarray:
    """Whether the model's most likely class is the label's, bool [examples]. PRIVATE.

    A tie goes to the lowest class. An example with logits that are not finite is incorrect. The
    model is public, such as a `models.CNN`; the population has the columns "image" [H, W, C] and
    "label", whole numbers.

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
    logits_NxV = logits(model, params, images, batch_size=batch_size)
    return (logits_NxV.argmax(axis=1) == labels) & np.isfinite(logits_NxV).all(axis=1)


def logits(
    model: Classifier, params: Params, image_NxHxWxC: np.ndarray, *, batch_size: int = 256
) -> np.ndarray:
    """A classifier's logits, float [N, classes], in batches of one shape: one program for all."""
    batches = []
    for start in range(0, max(1, len(image_NxHxWxC)), batch_size):
        image_BxHxWxC = image_NxHxWxC[start : start + batch_size]
        padding = ((0, batch_size - len(image_BxHxWxC)), *[(0, 0)] * (image_NxHxWxC.ndim - 1))
        batches.append(_logits(Static(model), params, np.pad(image_BxHxWxC, padding)))
    return np.concatenate(batches)[: len(image_NxHxWxC)]


@partial(jax.jit, static_argnums=0)
def _logits(model: Static, params: Params, image_BxHxWxC: Any) -> jax.Array:
    return model.function.logits(params, image_BxHxWxC)
