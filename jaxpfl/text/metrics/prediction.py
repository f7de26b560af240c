"""How well language models predict text, from all tokens of a row before the one to predict.

Next-token accuracy and perplexity are those of a decoder. The density of a sentence is that of task
T6: Augenstein et al. 2020, section 2.1, give each private sentence one by a model of public text,
"and use this to filter [...] the decentralized samples". Here it is the mean log probability of its
tokens, so that long sentences are not rare ones. That of clients' sentences is PRIVATE; of public
ones, and of those that a private model generated, it is public.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxpfl.checks import positive_int, real
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Metrics, Model, Params, summarise
from jaxpfl.models.recurrent import RecurrentModel
from jaxpfl.text.metrics.oov import check_token_rows
from jaxpfl.text.microbatches import dealt, filled, placed

_BATCH = 512
"""Sentences whose densities are computed at a time."""


def evaluate(
    model: Model,
    params: Params,
    tokens_NxL: np.ndarray,
    *,
    batch_size: int = 16,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Next-token accuracy and perplexity of a decoder, over the real targets of all rows.

    Every real token except a row's first is a target; padding does not count.

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


def log_densities(model: RecurrentModel, params: Params, tokens_NxL: np.ndarray) -> np.ndarray:
    """The mean log probability, in nats, of the tokens of each row, float64 [N].

    A row, as of `Vocabulary.encode`, has the ids of a sentence after its beginning, then padding.
    A row without a token to predict has density 0, the greatest.
    """
    tokens_NxL = np.asarray(tokens_NxL)
    check_token_rows("tokens", tokens_NxL)
    densities = [np.zeros(0)]
    for start in range(0, len(tokens_NxL), _BATCH):
        tokens_BxL = tokens_NxL[start : start + _BATCH]
        padding = ((0, _BATCH - len(tokens_BxL)), (0, 0))
        padded_BxL = np.pad(tokens_BxL, padding, constant_values=PAD)
        densities.append(np.asarray(_densities(model, params, padded_BxL))[: len(tokens_BxL)])
    return np.concatenate(densities)


def unlikely(
    model: RecurrentModel, params: Params, tokens_NxL: np.ndarray, threshold: float
) -> np.ndarray:
    """T6: the sentences whose log density is below a PUBLIC threshold, bool [examples]. PRIVATE."""
    return log_densities(model, params, tokens_NxL) < real("threshold", threshold)


@partial(jax.jit, static_argnums=0)
def _densities(model: RecurrentModel, params: Params, tokens_BxL: Array) -> Array:
    targets_BxT = tokens_BxL[:, 1:]
    logits_BxTxV = model.logits(params, jnp.maximum(tokens_BxL[:, :-1], 0))
    picked_BxTx1 = jnp.maximum(targets_BxT, 0)[..., None]
    log_BxT = jnp.take_along_axis(jax.nn.log_softmax(logits_BxTxV), picked_BxTx1, axis=-1)[..., 0]
    real_BxT = targets_BxT != PAD
    count_B = jnp.maximum(jnp.sum(real_BxT, axis=1, dtype=jnp.float32), 1)
    return jnp.sum(jnp.where(real_BxT, log_BxT, 0.0), axis=1) / count_B
