"""A tiny decoder, responses to prompts, and their log-probabilities in rows of their own."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.preference import optimisation as preference
from jaxpfl.text.preference.groups import Groups, advantages, groups_of
from jaxpfl.text.preference.optimisation import PreferenceSettings

CONFIGS = {
    "gpt2": DecoderConfig("gpt2", 31, 16, 2, 2, positions=24, initializer_range=0.3),
    "llama": DecoderConfig("llama", 31, 16, 2, 4, kv_heads=2, positions=24, initializer_range=0.3),
}
SETTINGS = PreferenceSettings(
    tau=0.3, batch_size=4, learning_rate=0.01, final_learning_rate=0.003, multiple=8
)
GRPO = dataclasses.replace(SETTINGS, loss="grpo")


def tiny_model(name: str = "llama", key: int = 0) -> tuple[Decoder, Any]:
    """A tiny model whose adapters are not the identity."""
    plain = Decoder(CONFIGS[name])
    model, params = lora.attach(
        plain, plain.init(jax.random.key(key)), LoRA(2, 4.0), jax.random.key(key + 1)
    )
    adapters, base = adapter_trees.split(params)
    generator = np.random.default_rng(key)
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(size=leaf.shape).astype(np.float32) * 0.2),
        adapters,
    )
    return model, adapter_trees.join(adapters, base)


def _ids(generator: np.random.Generator, most: int) -> np.ndarray:
    return generator.integers(0, 31, generator.integers(1, most + 1)).astype(np.int32)


def some_pairs(number: int = 7, seed: int = 0) -> Groups:
    generator = np.random.default_rng(seed)
    prompts, *both = ([_ids(generator, most) for _ in range(number)] for most in (9, 7, 7))
    return groups_of(prompts, [*zip(*both, strict=True)], prompt_tokens=8, total_tokens=14)


def some_groups() -> Groups:
    """Seven prompts with four responses each, one with three and one with two."""
    generator = np.random.default_rng(1)
    prompts = [_ids(generator, 9) for _ in range(7)]
    responses = [[_ids(generator, 7) for _ in range(4)] for _ in range(7)]
    responses[2][1] = responses[5][0] = responses[5][3] = np.zeros(0, np.int32)
    used = np.array([[len(response) > 0 for response in group] for group in responses])
    _, advantage = advantages(generator.normal(size=(7, 4)), used)
    return groups_of(prompts, responses, advantage, prompt_tokens=8, total_tokens=14)


@partial(jax.jit, static_argnums=0)
def separately(model: Decoder, params: Any, copies: tuple[np.ndarray, ...]) -> jax.Array:
    """[N, G, T]: each response in a row of its own, after its own copy of the prompt."""
    tokens_MxL, place_NxGxT, is_token_NxGxT = copies
    hidden = model.hidden(params, tokens_MxL[:, :-1])
    log_p = jax.nn.log_softmax(model.logits(params, hidden))
    picked = jnp.take_along_axis(log_p, jnp.maximum(tokens_MxL, 0)[:, 1:, None], axis=-1)
    placed = jnp.take_along_axis(picked[:, :, 0], place_NxGxT.reshape(len(tokens_MxL), -1), axis=1)
    return jnp.where(is_token_NxGxT, placed.reshape(place_NxGxT.shape), 0.0)


def copies(groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of prompt and response [N G, 20], and where those of the response are predicted."""
    tokens, is_token = [], groups.responses_NxGxT >= 0
    place = np.zeros(is_token.shape, np.int32)
    for row, prompt in enumerate(groups.prompt_NxP):
        prompt = prompt[prompt >= 0]
        for number, response in enumerate(groups.responses_NxGxT[row]):
            ids = [*prompt, *response[response >= 0]]
            tokens.append([*ids, *[-1] * (20 - len(ids))])
            place[row, number] = len(prompt) - 1 + np.arange(len(response))
    return np.array(tokens, np.int32), np.where(is_token, place, 0), is_token


def of_one_batch(model, params, groups, objective, known):
    """Metrics and gradient of all groups at once."""
    adapters, base = adapter_trees.split(params)
    weight = jnp.full(len(groups), 1 / len(groups), jnp.float32)
    (_, metrics), gradients = preference._gradients(
        model, objective, adapters, base, preference.rows(groups, 40), known, weight
    )
    return metrics, gradients


def assert_close(found, expected):
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale)
