"""MAUVE: how alike two corpora are, by the hidden states of a language model (0 .. 1).

Pillutla et al. 2021, "MAUVE: Measuring the gap between neural text and human text using divergence
frontiers" (arXiv 2102.01454). The last token's hidden states of both corpora, scaled to length 1
and projected on the principal axes that hold 90 % of their variance, are clustered together by
k-means, a tenth as many clusters as a corpus has texts and at most 500. With p, q the corpora's
shares of the clusters and r = w p + (1 - w) q, the score is the area under the curve

    (exp(-5 KL(q | r)), exp(-5 KL(p | r))),    0 < w < 1.

To each count 1/2 is added, as in MAUVE* of Pillutla et al. 2023, "MAUVE scores for generative
models: theory and practice": without it the score depends on clusters that one corpus misses.

The score depends on the number of texts: compare equal numbers only, beside the score of real texts
against other real texts, which is below 1. It depends on the model, too.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import special

from jaxpfl.errors import InputError
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.layers import packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.generation.language_model import LanguageModel, prompt_ids
from jaxpfl.text.microbatches import dealt, filled, placed, read
from jaxpfl.text.tokenisers.base import pad

LEAST_TEXTS = 2_500
_VARIANCE, _TEXTS_PER_CLUSTER, _MOST_CLUSTERS, _SCALE, _WEIGHTS = 0.9, 10, 500, 5.0, 25
# The starts and the steps of k-means, as in the authors' own program.
_STARTS, _STEPS = 5, 500
# Texts are padded to a multiple of so many tokens.
_MULTIPLE = 8


def mauve(one_NxH: np.ndarray, other_MxH: np.ndarray, *, seed: int = 0) -> float:
    """The MAUVE of two corpora by their texts' `last_states`; `seed` is of k-means.

    Raises:
      InputError: a corpus has fewer than `LEAST_TEXTS` texts, too few for the score to mean much.
    """
    fewest = min(len(one_NxH), len(other_MxH))
    if fewest < LEAST_TEXTS:
        raise InputError(f"MAUVE needs {LEAST_TEXTS:,} texts of each corpus, found {fewest:,}")
    # Imported late, because importing scikit-learn takes a second.
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    rows_NxH = np.concatenate([one_NxH, other_MxH]).astype(np.float64)
    rows_NxH /= np.maximum(np.linalg.norm(rows_NxH, axis=1, keepdims=True), 1e-30)
    rows_NxD = PCA(_VARIANCE, svd_solver="full").fit_transform(rows_NxH).astype(np.float32)
    clusters = min(fewest // _TEXTS_PER_CLUSTER, _MOST_CLUSTERS)
    settings: dict[str, Any] = {"n_init": _STARTS, "max_iter": _STEPS, "random_state": seed}
    label_N = KMeans(clusters, **settings).fit_predict(rows_NxD)
    p_K, q_K = (
        np.bincount(labels, minlength=clusters) + 0.5
        for labels in np.split(label_N, [len(one_NxH)])
    )
    return frontier_area(p_K / p_K.sum(), q_K / q_K.sum())


def frontier_area(p_K: np.ndarray, q_K: np.ndarray) -> float:
    """The area under the divergence curve of two distributions; 1 where they are equal."""
    w_Wx1 = np.linspace(1e-6, 1 - 1e-6, _WEIGHTS)[:, None]
    mixed_WxK = w_Wx1 * p_K + (1 - w_Wx1) * q_K
    x_W, y_W = (
        np.exp(-_SCALE * special.rel_entr(side_K, mixed_WxK).sum(axis=1)) for side_K in (q_K, p_K)
    )
    # From q on, x falls from 1, where y is nearly 0, to 0, where y is 1.
    return float(-np.trapezoid([0, *y_W, 1], [1, *x_W, 0]))


def last_states(
    writer: LanguageModel, texts: Sequence[str], *, microbatch_size: int = 32
) -> np.ndarray:
    """The last norm's output at the last token of each text, float32 [texts, H].

    A text follows the start token, if there is one, and no message around it; one that is longer
    than the model's positions is cut.
    """
    model, ids = writer.model, prompt_ids(writer.without_chat().tokeniser, texts)
    ids = [row[: model.config.positions] for row in ids]
    length_N = np.array([len(row) for row in ids])
    width_N = np.minimum(-(-length_N // _MULTIPLE) * _MULTIPLE, model.config.positions)
    params = packed_on_cpu(placed(writer.params, writer.mesh))
    states_NxH = np.zeros((len(ids), model.config.hidden_size), np.float32)
    for width in np.unique(width_N):
        rows = np.flatnonzero(width_N == width)
        for start in range(0, len(rows), microbatch_size):
            chosen = rows[start : start + microbatch_size]
            indices, _ = filled(chosen, microbatch_size, writer.mesh)
            tokens_BxL = pad([ids[i] for i in indices], int(width))
            given = dealt((tokens_BxL, length_N[indices]), writer.mesh)
            states_NxH[chosen] = read(_last(model, params, *given))[: len(chosen)]
    return states_NxH


@partial(jax.jit, static_argnums=0)
def _last(model: Decoder, params: Params, tokens_BxL: Array, length_B: Array) -> Array:
    hidden_BxLxH = model.hidden(params, tokens_BxL)
    last_Bx1x1 = (length_B - 1)[:, None, None]
    return jnp.take_along_axis(hidden_BxLxH, last_Bx1x1, axis=1)[:, 0].astype(jnp.float32)
