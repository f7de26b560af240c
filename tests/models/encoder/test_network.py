"""BERT, ALBERT and RoBERTa: masks, groups, losses; their logits are in test_golden_transformers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder
from tests.refusals import refusal
from tests.trees import drawn

SIZES = dict(
    vocab_size=40, hidden_size=12, layers=3, heads=3, inner_size=20, positions=9,
    initializer_range=0.4,
)  # fmt: skip
BERT = EncoderConfig(**SIZES | {"layers": 2}, norm_epsilon=1e-3)
ALBERT = EncoderConfig("albert", **SIZES, activation="gelu_new", embedding_size=5, groups=2)
ROBERTA = EncoderConfig("roberta", **SIZES, activation="gelu_new", segments=1, pad=1)
MODELS = {
    "bert": Encoder(BERT),
    "albert": Encoder(ALBERT),
    "bert with a head": Encoder(BERT, head=True),
    "roberta with a head": Encoder(ROBERTA, head=True),
    "causal bert": Encoder(BERT, causal=True, head=True),
}


def _batch():
    rng = np.random.default_rng(0)
    tokens_BxL = rng.integers(0, 40, (4, 7), np.int32)
    lengths_B = np.array([7, 4, 1, 6])
    return tokens_BxL, np.arange(7)[None, :] < lengths_B[:, None]


def test_layers_of_a_group_share_their_parameters():
    """Of three layers in two groups, the first two; each may have its own, which are then equal."""
    model, tokens = MODELS["albert"], _batch()[0]
    params = drawn(model, scale=0.4)
    own = {"layer_0": params["layer_0"], "layer_1": params["layer_0"], "layer_2": params["layer_1"]}
    other = Encoder(dataclasses.replace(ALBERT, groups=3))
    found = jax.jit(other.hidden)(params | own, tokens)
    expected = jax.jit(model.hidden)(params, tokens)
    np.testing.assert_allclose(found, expected, atol=3e-5)


@pytest.mark.parametrize("kind", ["albert", "roberta with a head", "causal bert"])
def test_padding_may_lie_in_front_where_positions_count_real_tokens_and_hold_anything(kind):
    """What masked positions hold makes no difference at all; minus one masks by itself."""
    model = MODELS[kind]
    params = drawn(model, scale=0.4)
    tokens_BxL, mask_BxL = _batch()
    hidden = jax.jit(model.hidden)
    expected = np.asarray(hidden(params, tokens_BxL, mask_BxL))
    other_BxL = np.where(mask_BxL, tokens_BxL, (tokens_BxL + 11) % 40)
    other = np.asarray(hidden(params, other_BxL, mask_BxL))
    np.testing.assert_array_equal(other[mask_BxL], expected[mask_BxL])
    minus = np.where(mask_BxL, tokens_BxL, -1)
    found = np.asarray(hidden(params, minus))
    np.testing.assert_allclose(found[mask_BxL], expected[mask_BxL], atol=2e-6)
    shifted = np.roll(minus[3], 1)
    assert shifted[0] == -1
    moved = np.asarray(hidden(params, np.tile(shifted, (4, 1))))[0, 1:]
    alike = np.allclose(moved, expected[3, :6], atol=1e-5)
    assert alike == (model.config.model_type == "roberta")


@pytest.mark.parametrize(
    "kind", [pytest.param("bert", marks=pytest.mark.long), "roberta with a head", "causal bert"]
)
def test_a_row_without_real_tokens_is_finite_and_so_is_the_gradient(kind):
    model = MODELS[kind]
    params = drawn(model, scale=0.4)
    tokens_BxL, mask_BxL = _batch()
    mask_BxL[1] = False

    def total(p):
        hidden_BxLxH = model.hidden(p, tokens_BxL, mask_BxL)
        return jnp.sum(jnp.where(mask_BxL[:, :, None], hidden_BxLxH, 0.0))

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


CAUSAL = Encoder(dataclasses.replace(BERT, layers=1, groups=1), causal=True, head=True)


def test_next_token_loss_and_accuracy_are_those_of_the_logits():
    params = drawn(CAUSAL, scale=0.4)
    tokens_BxL, mask_BxL = _batch()
    tokens_BxL = np.where(mask_BxL, tokens_BxL, -1)
    rows = np.array([True, True, True, False])
    logits_BxLxV = np.float64(CAUSAL.logits(params, jax.jit(CAUSAL.hidden)(params, tokens_BxL)))
    nll, hits = [], 0
    for tokens, logits in zip(tokens_BxL[:3], logits_BxLxV, strict=False):
        real = tokens[tokens >= 0]
        for here, target in zip(logits, real[1:], strict=False):
            nll.append(np.log(np.exp(here - here.max()).sum()) + here.max() - here[target])
            hits += int(here.argmax() == target)
    loss, metrics = jax.jit(CAUSAL.loss)(params, {"tokens": tokens_BxL}, rows)
    np.testing.assert_allclose(loss, np.mean(nll), rtol=1e-5)
    evaluated = jax.jit(CAUSAL.evaluate)(params, {"tokens": tokens_BxL}, rows)
    for found in (metrics, evaluated):
        np.testing.assert_allclose(found["loss_sum"], np.sum(nll), rtol=1e-5)
        assert (found["count"], found["correct"]) == (len(nll), hits)


def read(**changed):
    return EncoderConfig.from_dict(BERT.to_dict() | {"use_cache": True} | changed)


ONES = np.ones(4, bool)
REFUSED = {
    lambda: read(model_type="xlnet"): "model_type one of 'bert', found 'xlnet'",
    lambda: read(hidden_act="swish"): "activation must be one of",
    lambda: read(position_embedding_type="relative_key"): '"absolute", found "relative_key"',
    lambda: read(add_cross_attention=True): "add_cross_attention must be false, found true",
    lambda: read(intermediate_size=0): "inner_size must be at least 1",
    lambda: read(hidden_size=13): "hidden_size must be a multiple of heads = 3",
    lambda: read(hidden_size="12"): "hidden_size must be a whole number",
    lambda: read(num_hidden_layers=0): "layers must be at least 1",
    lambda: read(layer_norm_eps=math.nan): "norm_epsilon must be a finite number",
    lambda: read(layer_norm_eps=1e-50): "norm_epsilon must be from 1.18e-38 to 3.4e",
    lambda: read(initializer_range=1e39): "initializer_range must be from",
    lambda: read(model_type="roberta", pad_token_id=9): "embeddings must be above pad_token_id",
    lambda: read(model_type="albert", inner_group_num=2): "inner_group_num must be 1, found 2",
    lambda: EncoderConfig(embedding_size=5): "embedding_size must be 768 in bert, found 5",
    lambda: EncoderConfig("albert", layers=4, groups=5): "groups must not exceed layers = 4",
    lambda: Encoder(ALBERT, causal=True): "one of 'bert', 'roberta', found",
    lambda: MODELS["bert"].logits({}, np.zeros((4, 9, 12), np.float32)): "no language-model head",
    lambda: MODELS["bert with a head"].loss({}, {"tokens": _batch()[0]}, ONES): "only a causal",
    lambda: MODELS["bert"].hidden({}, np.zeros((1, 10), np.int32)): "at most 9 tokens, found 10",
}


@pytest.mark.parametrize(("call", "words"), REFUSED.items(), ids=REFUSED.values())
def test_what_is_not_computed_is_refused(call, words):
    refusal(call, words)


def test_robertas_positions_are_those_that_tokens_can_have():
    values = ROBERTA.to_dict()
    assert (values["max_position_embeddings"], values["pad_token_id"]) == (11, 1)
    shapes = jax.eval_shape(Encoder(ROBERTA).init, jax.random.key(0))
    assert shapes["embeddings"]["position"].shape == (11, 12)


def test_albert_groups():
    config = EncoderConfig("albert", layers=12, groups=5)
    assert [config.group(i) for i in range(12)] == [int(i / (12 / 5)) for i in range(12)]
