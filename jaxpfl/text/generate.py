"""Sentences drawn from a language model, on the device, by ancestral sampling."""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpfl.checks import positive, positive_int
from jaxpfl.models.base import Params
from jaxpfl.text.vocabulary import BOS, EOS, PAD, Vocabulary

_BATCH = 64


class Recurrent(Protocol):
    """A hashable language model that reads one token at a time."""

    @property
    def vocab_size(self) -> int: ...

    def initial_carry(self, batch: int) -> Any: ...

    def step(self, params: Params, tokens_B: Array, carry: Any) -> tuple[Array, Any]: ...


def sample_tokens(
    model: Recurrent,
    params: Params,
    keys_N: Array,
    *,
    max_tokens: int = 20,
    temperature: float = 1.0,
) -> np.ndarray:
    """Token ids int32 [N, max_tokens]: what follows bos, up to and with eos, then padding.

    Each request has its own typed key, and token t is drawn with `fold_in(key, t)` in a batch of
    fixed size: a request gives the same tokens whatever else is asked for. Padding and
    beginning of sentence are never drawn. Logits are divided by `temperature`.
    """
    positive_int("max_tokens", max_tokens)
    positive("temperature", temperature)
    number = keys_N.shape[0]
    scale = np.float32(temperature)
    parts = []
    for start in range(0, number, _BATCH):
        # Repeating requests to fill the batch keeps one compiled program for any number.
        rows = np.minimum(np.arange(start, start + _BATCH), number - 1)
        parts.append(np.asarray(_sample(model, max_tokens, params, keys_N[rows], scale)))
    if not parts:
        return np.zeros((0, max_tokens), np.int32)
    return np.concatenate(parts)[:number]


@partial(jax.jit, static_argnums=(0, 1))
def _sample(
    model: Recurrent, max_tokens: int, params: Params, keys_B: Array, temperature: Array
) -> Array:
    batch = keys_B.shape[0]
    # Ids that are never drawn.
    banned_V = jnp.isin(jnp.arange(model.vocab_size), jnp.array([PAD, BOS]))

    def step(state: tuple[Array, Array, Any], t: Array) -> tuple[tuple[Array, Array, Any], Array]:
        tokens_B, done_B, carry = state
        logits_BxV, carry = model.step(params, tokens_B, carry)
        logits_BxV = jnp.where(banned_V[None, :], -jnp.inf, logits_BxV / temperature)
        step_keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, t)
        drawn_B = jax.vmap(jax.random.categorical)(step_keys_B, logits_BxV).astype(jnp.int32)
        drawn_B = jnp.where(done_B, PAD, drawn_B)
        return (drawn_B, jnp.logical_or(done_B, drawn_B == EOS), carry), drawn_B

    start = (
        jnp.full(batch, BOS, jnp.int32),
        jnp.zeros(batch, bool),
        model.initial_carry(batch),
    )
    tokens_TxB = lax.scan(step, start, jnp.arange(max_tokens))[1]
    return tokens_TxB.T


def generate(
    model: Recurrent,
    params: Params,
    vocabulary: Vocabulary,
    key: Array,
    number: int,
    *,
    max_tokens: int = 20,
    temperature: float = 1.0,
) -> list[str]:
    """`number` sentences; sentence i is a function of (params, key, i) and the settings only."""
    positive_int("number", number)
    keys_N = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(number))
    tokens_NxT = sample_tokens(
        model, params, keys_N, max_tokens=max_tokens, temperature=temperature
    )
    return [vocabulary.decode(row) for row in tokens_NxT]
