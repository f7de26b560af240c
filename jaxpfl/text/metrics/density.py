"""How probable sentences are to a language model: the criterion of task T6.

Augenstein et al. 2020, section 2.1: a language model of public text gives each private sentence a
density, "and use this to filter [...] the decentralized samples". Here it is the mean log
probability of a sentence's tokens, so that long sentences are not rare ones. That of clients'
sentences is PRIVATE; of public ones, and of those that a private model generated, it is public.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl.checks import real
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.recurrent import RecurrentModel
from jaxpfl.text.metrics.oov import check_token_rows

_BATCH = 512


def log_densities(model: RecurrentModel, params: Params, tokens_NxL: np.ndarray) -> np.ndarray:
    """The mean log probability, in nats, of the tokens of each row, float64 [N].

    A row, as of `Vocabulary.encode`, has the ids of a sentence after its beginning, then padding.
    A row without a token to predict has density 0, the greatest.
    """
    tokens_NxL = np.asarray(tokens_NxL)
    check_token_rows("tokens", tokens_NxL)
    found = []
    for start in range(0, len(tokens_NxL), _BATCH):
        tokens_BxL = tokens_NxL[start : start + _BATCH]
        padding = ((0, _BATCH - len(tokens_BxL)), (0, 0))
        padded_BxL = np.pad(tokens_BxL, padding, constant_values=PAD)
        found.append(np.asarray(_densities(model, params, padded_BxL))[: len(tokens_BxL)])
    return np.concatenate([np.zeros(0), *found])


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
