"""Log-probabilities of pairs of responses, whose prompt is read once for both."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params, negative_log_likelihood
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.progress import track
from jaxpfl.text.microbatches import dealt, filled, placed
from jaxpfl.text.preference.pairs import Pairs, Rows, lengths, padded_lengths, rows

# Logits in memory at a time; in float32 they take a quarter of a GiB.
_LOGITS_AT_ONCE = 2**26


def log_probabilities(
    model: Decoder,
    params: Params,
    pairs: Pairs,
    *,
    microbatch_size: int = 24,
    multiple: int = 64,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Log-probabilities of the chosen and the rejected responses, sums over tokens, in nats.

    Returns:
      float32 [N, 2].

    Args:
      microbatch_size: pairs on the accelerator at a time.
      multiple: rows are padded to a multiple of this many tokens.
      mesh: the devices along its axis "data" share the pairs.

    Raises:
      InputError: a pair has more tokens than the model has positions.
    """
    check_fits(model, pairs)
    params = placed(params, mesh)
    width_N, response = padded_lengths(pairs, multiple)
    order = np.argsort(-width_N, kind="stable")
    found_Nx2 = np.zeros((len(pairs), 2), np.float32)
    starts = range(0, len(pairs), microbatch_size)
    for start in track(starts, "log-probabilities", progress=progress):
        chosen = order[start : start + microbatch_size]
        indices, _ = filled(chosen, microbatch_size, mesh)
        read = dealt(rows(pairs[indices], int(np.max(width_N[chosen])), response), mesh)
        found_Nx2[chosen] = np.asarray(_jitted(model, params, read))[: len(chosen)]
    return found_Nx2


def sums(model: Decoder, params: Params, read: Rows) -> Array:
    """Log-probabilities of both responses, float32 [B, 2]; differentiable in the parameters."""
    hidden_BxRxH = model.hidden(params, read.tokens_BxR, read.positions_BxR, read.branch_BxR)
    batch = hidden_BxRxH.shape[0]
    place_BxG, target_BxG = (x.reshape(batch, -1) for x in (read.place_Bx2xT, read.target_Bx2xT))
    picked_BxGxH = jnp.take_along_axis(hidden_BxRxH, place_BxG[:, :, None], axis=1)

    def picked(hidden_BxGxH: Array, target_BxG: Array) -> Array:
        logits_NxV = model.logits(params, hidden_BxGxH.reshape(-1, hidden_BxGxH.shape[-1]))
        found_N = -negative_log_likelihood(logits_NxV, target_BxG.reshape(-1))
        return found_N.reshape(target_BxG.shape)

    # Blocks along the response, because the pairs are on different devices.
    places = target_BxG.shape[1]
    block = min(max(_LOGITS_AT_ONCE // (model.vocab_size * batch), 1), places)
    if block == places:
        found_BxG = picked(picked_BxGxH, target_BxG)
    else:
        blocks = -(-places // block)
        rest = ((0, 0), (0, blocks * block - places))
        hidden = jnp.pad(picked_BxGxH, (*rest, (0, 0))).reshape(batch, blocks, block, -1)
        target = jnp.pad(target_BxG, rest, constant_values=PAD).reshape(batch, blocks, block)
        found = lax.map(
            lambda each: jax.checkpoint(picked)(*each),
            (jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(target, 0, 1)),
        )
        found_BxG = jnp.swapaxes(found, 0, 1).reshape(batch, -1)[:, :places]
    found_BxG = jnp.where(target_BxG != PAD, found_BxG, 0.0)
    return jnp.sum(found_BxG.reshape(read.target_Bx2xT.shape), axis=-1)


_jitted = jax.jit(sums, static_argnums=0)


def check_fits(model: Decoder, pairs: Pairs) -> None:
    """Refuses pairs that are too long for the model."""
    tokens_Nx3 = lengths(pairs)
    longest_N = tokens_Nx3[:, 0] + np.max(tokens_Nx3[:, 1:], axis=1)
    row = int(np.argmax(longest_N))
    if longest_N[row] > model.config.positions:
        raise InputError(
            f"pair {row} has {longest_N[row]} tokens in prompt and response, expected at most "
            f"{model.config.positions}, the number of the model's positions"
        )
