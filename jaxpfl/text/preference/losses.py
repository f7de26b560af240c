"""Losses of a decoder's responses: DPO and IPO of pairs, GRPO of all responses to a prompt.

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
from jax import Array


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
