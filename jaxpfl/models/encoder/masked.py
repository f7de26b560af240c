"""The training of a masked language model: an encoder that predicts the tokens that were hidden.

BERT (Devlin et al. 2019), section 3.1, without next-sentence prediction and with every chosen token
replaced by the mask token.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl.models.base import PAD, Batch, LossModel, Metrics, Params
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.models.layers.output_layer import next_token_loss

_SHARE = 0.3


@dataclass(frozen=True)
class MaskedTokens(LossModel):
    """An encoder with a head as a `jaxpfl.models.base.Model`, by its loss on masked tokens.

    A batch holds "tokens" and "given", int32 [B, L], as `masked_rows` makes them. The targets are
    the tokens where "given" is `mask_id`.
    """

    encoder: Encoder
    mask_id: int
    columns = ("tokens", "given")
    name = "masked"

    def init(self, key: Array) -> Params:
        return self.encoder.init(key)

    def loss(self, params: Params, batch: Batch, mask: Array) -> tuple[Array, Metrics]:
        given_BxL = jnp.where(mask[:, None], batch["given"], PAD)
        targets_BxL = jnp.where(given_BxL == self.mask_id, batch["tokens"], PAD)
        hidden_BxLxH = self.encoder.hidden(params, given_BxL)
        flat_NxH = hidden_BxLxH.reshape(-1, hidden_BxLxH.shape[-1])
        layer = self.encoder.output_layer(params, flat_NxH)
        return next_token_loss(*layer, targets_BxL.reshape(-1))


def masked_rows(
    rows_NxL: np.ndarray, mask_id: int, ends: tuple[int, int], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The columns "tokens" and "given" [N, L + 2]: framed rows, and the same with masked tokens.

    Three of ten tokens are masked, uniformly drawn; the two `ends` and `PAD` never are.
    """
    framed_NxM = np.pad(rows_NxL, ((0, 0), (1, 1)), constant_values=PAD)
    framed_NxM[:, 0] = ends[0]
    framed_NxM[np.arange(len(rows_NxL)), 1 + (rows_NxL != PAD).sum(axis=1)] = ends[1]
    hidden_NxL = (rng.random(rows_NxL.shape) < _SHARE) & (rows_NxL != PAD)
    given_NxM = framed_NxM.copy()
    given_NxM[:, 1:-1][hidden_NxL] = mask_id
    return {"tokens": framed_NxM, "given": given_NxM}
