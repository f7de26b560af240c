"""The metrics of a model on examples in batches: one compiled program for all who score it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl.data.cohort import batches
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Static
from jaxpfl.models.base import Metrics, summarise

Batches = Sequence[tuple[dict[str, Any], Any]]
"""Columns [batch, ...] and mask bool [batch] of each batch."""


class Pending(NamedTuple):
    """The metric sums of several batches, which the device may still be computing."""

    sums: list[Metrics]

    def result(self) -> dict[str, float]:
        """What `models.summarise` makes of the sums of all batches; waits for them."""
        fetched = jax.device_get(self.sums)
        # Added on the host in float64, because a float32 count is exact only up to 2^24.
        return summarise(
            jax.tree.map(lambda *parts: np.sum(np.array(parts, np.float64), axis=0), *fetched)
        )


def in_batches(columns: Mapping[str, np.ndarray], size: int) -> Batches:
    """All examples of columns [examples, ...], in their order; `InputError` if there are none."""
    if not (number := len(next(iter(columns.values())))):
        raise InputError("there are no examples to score a model on")
    in_order = zip(*batches(np.arange(number), size), strict=True)
    return [({name: x[rows] for name, x in columns.items()}, mask) for rows, mask in in_order]


def on_one_device(params: Any) -> Any:
    """The same parameters; what all devices hold whole, on one: others would compute the same."""

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return jax.device_put(leaf, jax.local_devices()[0])
        return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf

    return jax.tree.map(placed, params)


def score(model: Static, params: Any, batches: Batches) -> Pending:
    """Dispatches the scoring of `params` and returns without waiting."""
    return Pending([_sums(model, params, *batch) for batch in batches])


@partial(jax.jit, static_argnames="model")
def _sums(model: Static, params: Any, batch: dict[str, jax.Array], mask: jax.Array) -> Metrics:
    return model.function.evaluate(params, batch, mask)
