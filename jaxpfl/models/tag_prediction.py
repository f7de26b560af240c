"""Multi-label logistic regression on bags of words: the field's Stack Overflow tag prediction.

Reddi et al. 2021 ("Adaptive federated optimization", appendix C.2). With x_v the share of word v
among an example's words, out-of-vocabulary words included in the whole, and y_t whether it has tag
t, the loss of an example is sum_t of the cross-entropy of y_t and sigmoid(x W + b)_t.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxpfl.checks import positive_int
from jaxpfl.models.base import PAD, Batch, LossModel, Metrics, Params

_TOP = 5


@dataclass(frozen=True)
class TagPrediction(LossModel):
    """Predicts an example's tags; 5,000,500 parameters with 10,000 words and 500 tags.

    A batch holds "words" [B, L], ids of the example's words, and "tags" [B, K], ids of its tags,
    integers that are padded with -1. The id `words`, or `tags`, is any word, or tag, that is not in
    the vocabulary: it counts as one of the example's words, but is no input and no target.

    Attributes:
      words, tags: sizes of the two vocabularies.
    """

    words: int = 10_000
    tags: int = 500
    name: str = "tag_prediction"

    columns = ("words", "tags")

    def __post_init__(self):
        positive_int("words", self.words)
        positive_int("tags", self.tags)

    def init(self, key: Array) -> Params:
        """A Glorot-normal matrix [words, tags] and zero biases [tags]."""
        initialise = jax.nn.initializers.glorot_normal()
        kernel = initialise(key, (self.words, self.tags), jnp.float32)
        return {"kernel": kernel, "bias": jnp.zeros(self.tags, jnp.float32)}

    def logits(self, params: Params, words_BxL: Array) -> Array:
        """Float32 logits [B, tags]."""
        words_BxL = words_BxL.astype(jnp.int32)
        known_BxL = jnp.logical_and(words_BxL >= 0, words_BxL < self.words)
        rows_BxLxT = params["kernel"][jnp.where(known_BxL, words_BxL, 0)]
        sum_BxT = jnp.sum(jnp.where(known_BxL[..., None], rows_BxLxT, 0.0), axis=1)
        number_B = jnp.sum(words_BxL != PAD, axis=1, dtype=jnp.float32)
        return sum_BxT / jnp.maximum(number_B, 1.0)[:, None] + params["bias"][None, :]

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        """Mean over the real examples of their loss, which is summed over tags, and the metrics."""
        logits_BxT = self.logits(params, jnp.where(mask[:, None], batch["words"], PAD))
        tags_BxK = jnp.where(mask[:, None], batch["tags"], PAD).astype(jnp.int32)
        classes_T = jnp.arange(self.tags, dtype=jnp.int32)
        has_BxT = jnp.any(tags_BxK[:, :, None] == classes_T[None, None, :], axis=1)
        # -y log sigmoid(l) - (1 - y) log(1 - sigmoid(l)), finite for every finite l.
        nll_BxT = jax.nn.softplus(logits_BxT) - jnp.where(has_BxT, logits_BxT, 0.0)
        loss_sum = jnp.sum(jnp.where(mask[:, None], nll_BxT, 0.0))
        count = jnp.sum(mask, dtype=jnp.float32)
        likeliest_BxF = jax.lax.top_k(logits_BxT, min(_TOP, self.tags))[1]
        found_BxF = jnp.take_along_axis(has_BxT, likeliest_BxF, axis=1)
        return loss_sum / jnp.maximum(count, 1.0), {
            "loss_sum": loss_sum,
            "correct": jnp.sum(found_BxF, dtype=jnp.float32),
            "relevant": jnp.sum(has_BxT, dtype=jnp.float32),
            "count": count,
        }
