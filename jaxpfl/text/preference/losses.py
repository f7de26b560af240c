"""Losses of responses by their log-probabilities: DPO and IPO of pairs, GRPO of all of a prompt.

Sources: Rafailov et al. 2023, "Direct Preference Optimization", equation 7; Azar et al. 2024, "A
General Theoretical Paradigm to Understand Learning from Human Preferences" (IPO), equation 17. With
y_w chosen over y_l for prompt x and log pi(y | x) the SUM of the response's token log-probabilities
(in both losses, as both papers have it; some libraries take IPO's mean),

    h    = log pi(y_w|x) / pi_ref(y_w|x) - log pi(y_l|x) / pi_ref(y_l|x)
    DPO  = -log sigmoid(tau h)
    IPO  = (h - 1 / (2 tau))^2

Shao et al. 2024, "DeepSeekMath", equations 3 and 4: with the advantage A of a response and, for
each of its tokens t, the ratio r_t = pi / pi_written to the model that wrote it,

    KL_t = pi_ref / pi - log(pi_ref / pi) - 1
    GRPO = mean over a prompt's responses of the mean over each one's tokens of
               tau KL_t - min(r_t A, clip(r_t, 1 - c, 1 + c) A)

This is the loss of TRL's GRPOTrainer with loss_type "grpo", importance_sampling_level "token",
scale_rewards "group", epsilon = c and beta = tau. There are two differences: TRL adds 1e-4 to the
standard deviation that advantages are divided by, and its probabilities are those at the sampling
temperature, where these are the model's own.
"""

from typing import Any, NamedTuple

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
        most = f"{model.config.positions}, the model's positions"
        raise InputError(f"group {row} has {longest_N[row]} tokens in all, expected at most {most}")


class Objective(NamedTuple):
    """The loss that is minimised; the fields are those of `PreferenceSettings`."""

    loss: str
    tau: float
    clip_ratio: float


class Constants(NamedTuple):
    """The terms of a loss that stay the same throughout a tuning: float32.

    Attributes:
      reference_BxGxT: log-probabilities by the model without adapters.
      written_BxGxT: for GRPO, log-probabilities by the model that wrote the responses.
      advantage_BxG: for GRPO, see `groups.advantages`.
    """

    reference_BxGxT: Any
    written_BxGxT: Any = None
    advantage_BxG: Any = None


def log_ratio(policy_Bx2xT: Array, reference_Bx2xT: Array) -> Array:
    """h of the equations at the head of this file, from log-probabilities: float32 [B], nats."""
    chosen_B, rejected_B = jnp.sum(policy_Bx2xT - reference_Bx2xT, axis=-1).T
    return chosen_B - rejected_B


def dpo(h_B: Array, tau: float) -> Array:
    """DPO's loss of each pair: float32 [B]; finite, with finite gradients, for finite input."""
    return jax.nn.softplus(-tau * h_B)


def ipo(h_B: Array, tau: float) -> Array:
    """IPO's loss of each pair: float32 [B], in squared nats."""
    return jnp.square(h_B - 1.0 / (2.0 * tau))


def grpo(
    policy_BxGxT: Array, constants: Constants, is_token_BxGxT: Array, tau: float, clip_ratio: float
) -> dict[str, Array]:
    """GRPO's "loss" of each group, its "kl" (nats per token) and the share "clipped" of tokens.

    All are float32 [B], and means over responses of means over tokens. Clipped are the tokens that
    give no gradient because their ratio has gone further than `clip_ratio` to the better.
    """
    token_BxGxT = is_token_BxGxT.astype(jnp.float32)
    tokens_BxGx1 = jnp.maximum(jnp.sum(token_BxGxT, axis=2, keepdims=True), 1)
    weight_BxGxT = token_BxGxT / tokens_BxGx1
    # As many as there are responses; a group without a token weighs nothing.
    responses_Bx1x1 = jnp.sum(weight_BxGxT, axis=(1, 2), keepdims=True)
    weight_BxGxT = weight_BxGxT / jnp.maximum(responses_Bx1x1, 0.5)
    advantage_BxGx1 = constants.advantage_BxG[:, :, None]
    ratio_BxGxT = jnp.exp(policy_BxGxT - constants.written_BxGxT)
    gain_BxGxT = ratio_BxGxT * advantage_BxGx1
    most_BxGxT = jnp.clip(ratio_BxGxT, 1 - clip_ratio, 1 + clip_ratio) * advantage_BxGx1
    away_BxGxT = constants.reference_BxGxT - policy_BxGxT
    kl_BxGxT = jnp.expm1(away_BxGxT) - away_BxGxT
    measures = {
        "loss": tau * kl_BxGxT - jnp.minimum(gain_BxGxT, most_BxGxT),
        "kl": kl_BxGxT,
        "clipped": (gain_BxGxT > most_BxGxT).astype(jnp.float32),
    }
    return {name: jnp.sum(weight_BxGxT * values, axis=(1, 2)) for name, values in measures.items()}


def measured(
    objective: Objective, policy_BxGxT: Array, constants: Constants, is_token_BxGxT: Array
) -> dict[str, Array]:
    """The "loss" of each group and its other metrics, see `Tuned.record`: float32 [B]."""
    loss, tau, clip_ratio = objective
    if loss == "grpo":
        return grpo(policy_BxGxT, constants, is_token_BxGxT, tau, clip_ratio)
    h_B = log_ratio(policy_BxGxT, constants.reference_BxGxT)
    loss_B = {"dpo": dpo, "ipo": ipo}[loss](h_B, tau)
    return {"loss": loss_B, "margin": tau * h_B, "accuracy": (h_B > 0).astype(jnp.float32)}
