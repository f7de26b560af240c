"""Next-token accuracy and perplexity of a language model.

A text is tokenised once. Every real token except a row's first is a target, predicted from those
before it; padding does not count.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import Metrics, Model, Params, summarise
from jaxpfl.text.microbatches import dealt, filled, placed


def evaluate(
    model: Model,
    params: Params,
    tokens_NxL: np.ndarray,
    *,
    batch_size: int = 16,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Next-token accuracy and perplexity of a decoder, over the real targets of all rows.

    Args:
      tokens_NxL: int32 ids, padded with -1 on the right.
      batch_size: rows on the accelerator at a time.
      mesh: the devices along its axis "data" share each batch, see `preference.optimisation.tune`.

    Returns:
      "accuracy" (top-1, 0 .. 1), "loss" (nats per target), "perplexity" (exp of the loss) and
      "count" of targets; NaN when there is none.
    """
    positive_int("batch_size", batch_size)
    if not len(tokens_NxL):
        raise InputError("tokens: there are no texts to evaluate on")
    params = placed(params, mesh)
    totals: dict[str, float] = {}
    for start in range(0, len(tokens_NxL), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(tokens_NxL)))
        rows, real_B = filled(chosen, batch_size, mesh)
        tokens_BxL, real_B = dealt((tokens_NxL[rows], real_B), mesh)
        metrics = jax.device_get(_evaluated(model, params, tokens_BxL, real_B))
        # Summed in float64, because float32 cannot count beyond 16 million.
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in metrics.items()}
    return summarise(totals)  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnums=0)
def _evaluated(model: Model, params: Params, tokens_BxL: Any, real_B: Any) -> Metrics:
    return model.evaluate(params, {"tokens": tokens_BxL}, real_B)
