"""Log-probabilities of responses' tokens; a prompt is read once for all of its responses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params, negative_log_likelihood
from jaxpfl.models.decoder.layers import packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.progress import track
from jaxpfl.text.microbatches import dealt, filled, placed, read
from jaxpfl.text.preference.groups import Groups, Rows, lengths, rows, widths

# Logits in memory at a time; in float32 they take a quarter of a GiB.
_LOGITS_AT_ONCE = 2**26


def log_probabilities(
    model: Decoder,
    params: Params,
    groups: Groups,
    *,
    microbatch_size: int = 24,
    multiple: int = 64,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Log-probabilities of all responses' tokens, in nats, float32 [N, G, T]; 0 where none is.

    Args:
      multiple: rows are padded to a multiple of this many tokens.
      mesh: the devices along its axis "data" share the groups.
    """
    check_fits(model, groups)
    params = packed_on_cpu(placed(params, mesh))
    width_N = widths(groups, multiple)
    order = np.argsort(-width_N, kind="stable")
    log_NxGxT = np.zeros(groups.responses_NxGxT.shape, np.float32)
    starts = range(0, len(groups), microbatch_size)
    for start in track(starts, "log-probabilities", progress=progress):
        chosen = order[start : start + microbatch_size]
        indices, _ = filled(chosen, microbatch_size, mesh)
        given = dealt(rows(groups[indices], int(np.max(width_N[chosen]))), mesh)
        log_NxGxT[chosen] = read(_jitted(model, params, given))[: len(chosen)]
    return log_NxGxT


def of_tokens(model: Decoder, params: Params, read: Rows) -> Array:
    """`log_probabilities` of some rows, float32 [B, G, T]; differentiable in the parameters."""
    hidden_BxRxH = model.hidden(params, read.tokens_BxR, read.positions_BxR, read.branch_BxR)
    batch = hidden_BxRxH.shape[0]
    place_BxM, target_BxM = (x.reshape(batch, -1) for x in (read.place_BxGxT, read.target_BxGxT))
    picked_BxMxH = jnp.take_along_axis(hidden_BxRxH, place_BxM[:, :, None], axis=1)

    def picked(hidden_BxMxH: Array, target_BxM: Array) -> Array:
        logits_NxV = model.logits(params, hidden_BxMxH.reshape(-1, hidden_BxMxH.shape[-1]))
        log_N = -negative_log_likelihood(logits_NxV, target_BxM.reshape(-1))
        return log_N.reshape(target_BxM.shape)

    # Blocks along the responses, because the groups are on different devices.
    places = target_BxM.shape[1]
    block = min(max(_LOGITS_AT_ONCE // (model.vocab_size * batch), 1), places)
    if block == places:
        log_BxM = picked(picked_BxMxH, target_BxM)
    else:
        blocks = -(-places // block)
        rest = ((0, 0), (0, blocks * block - places))
        hidden = jnp.pad(picked_BxMxH, (*rest, (0, 0))).reshape(batch, blocks, block, -1)
        target = jnp.pad(target_BxM, rest, constant_values=PAD).reshape(batch, blocks, block)
        log_blocks = lax.map(
            lambda arguments: jax.checkpoint(picked)(*arguments),
            (jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(target, 0, 1)),
        )
        log_BxM = jnp.swapaxes(log_blocks, 0, 1).reshape(batch, -1)[:, :places]
    return jnp.where(target_BxM != PAD, log_BxM, 0.0).reshape(read.target_BxGxT.shape)


_jitted = jax.jit(of_tokens, static_argnums=0)


def check_fits(model: Decoder, groups: Groups) -> None:
    """Refuses groups that are too long for the model, or have ids beyond its vocabulary."""
    for ids in (groups.prompt_NxP, groups.responses_NxGxT):
        # A network would read another token in its place.
        if ids.size and not PAD <= ids.min() <= ids.max() < model.vocab_size:
            last = f"{model.vocab_size - 1}, the model's vocabulary, or {PAD} as padding"
            raise InputError(f"groups must have token ids in 0 .. {last}, found others")
    tokens = lengths(groups)
    longest_N = tokens[:, 0] + np.max(tokens[:, 1:], axis=1)
    row = int(np.argmax(longest_N))
    if longest_N[row] > model.config.positions:
        most = f"{model.config.positions}, the number of the model's positions"
        expected = f"tokens in prompt and response, expected at most {most}"
        raise InputError(f"group {row} has {longest_N[row]} {expected}")
