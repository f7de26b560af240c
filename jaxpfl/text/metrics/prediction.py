"""The density of sentences, which is that of task T6.

Augenstein et al. 2020, section 2.1, give each private sentence one by a model of public text, "and
use this to filter [...] the decentralized samples". Here it is the mean log probability of its
tokens, so that long sentences are not rare ones. That of clients' sentences is PRIVATE; of public
ones, and of those that a private model generated, it is public.
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
"""Rows whose log probabilities are computed at a time."""


def log_densities(model: RecurrentModel, params: Params, tokens_NxL: np.ndarray) -> np.ndarray:
    """The mean log probability, in nats, of the tokens of each row, float64 [N].

    A row, as of `Vocabulary.encode`, has the ids of a sentence after its beginning, then padding.
    A row without a token to predict has density 0, the greatest.
    """
    tokens_NxL = np.asarray(tokens_NxL)
    check_token_rows("tokens", tokens_NxL)
    count_N = np.sum(tokens_NxL[:, 1:] != PAD, axis=1)
    return log_probabilities(model, params, tokens_NxL) / np.maximum(count_N, 1)


def log_probabilities(
    model: RecurrentModel,
    params: Params,
    tokens_NxL: np.ndarray,
    never: np.ndarray | None = None,
) -> np.ndarray:
    """The log probability in nats of each row given its first token, float64 [N].

    The log softmax is computed in float32, and its sum over a row in float64. A token that is never
    drawn, of which `never`, bool [V], is true, gives -inf; padding counts as nothing.
    """
    never_V = np.zeros(model.vocab_size, bool) if never is None else never
    log_N = np.zeros(len(tokens_NxL), np.float64)
    for start in range(0, len(tokens_NxL), _BATCH):
        # The last row is repeated to fill a batch, and written again with the same result.
        rows = np.minimum(np.arange(start, start + _BATCH), len(tokens_NxL) - 1)
        log_BxT = _log_of_tokens(model, params, tokens_NxL[rows], never_V)
        log_N[rows] = np.asarray(log_BxT, np.float64).sum(axis=1)
    return log_N


@partial(jax.jit, static_argnums=0)
def _log_of_tokens(
    model: RecurrentModel, params: Params, tokens_BxL: Array, never_V: Array
) -> Array:
    """The log probability of each token but the first, float32 [B, L - 1]; 0 of padding."""
    read_BxL = jnp.maximum(tokens_BxL, 0)
    logits_BxTxV = model.logits(params, read_BxL[:, :-1])
    log_BxTxV = jax.nn.log_softmax(jnp.where(never_V[None, None], -jnp.inf, logits_BxTxV))
    log_BxT = jnp.take_along_axis(log_BxTxV, read_BxL[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(tokens_BxL[:, 1:] != PAD, log_BxT, 0.0)


def unlikely(
    model: RecurrentModel, params: Params, tokens_NxL: np.ndarray, threshold: float
) -> np.ndarray:
    """T6: the sentences whose log density is below a PUBLIC threshold, bool [examples]. PRIVATE."""
    return log_densities(model, params, tokens_NxL) < real("threshold", threshold)
