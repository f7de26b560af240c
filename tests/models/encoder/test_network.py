"""BERT, ALBERT and RoBERTa against a plain float64 computation, and the invariances of a mask."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder

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
    "albert with a head": Encoder(ALBERT, head=True),
    "roberta with a head": Encoder(ROBERTA, head=True),
    "causal bert": Encoder(BERT, causal=True, head=True),
    "causal roberta": Encoder(ROBERTA, causal=True, head=True),
}


def _params(model):
    """Parameters without zeros and ones, so that every one of them matters."""
    rng = np.random.default_rng(1)

    def drawn(keys, leaf):
        mean = 1.0 if keys[-1].key == "scale" else 0.0
        return rng.normal(mean, 0.4, leaf.shape).astype(np.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(1))
    return jax.tree.map_with_path(drawn, shapes)


def _batch():
    rng = np.random.default_rng(0)
    tokens_BxL = rng.integers(0, 40, (4, 7), np.int32)
    lengths_B = np.array([7, 4, 1, 6])
    return tokens_BxL, np.arange(7)[None, :] < lengths_B[:, None]


ERF = np.vectorize(math.erf)
REFERENCE_ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + ERF(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def _reference(model, params, tokens):
    """One unpadded row in float64, token by token and head by head: [L, H], and [L, V] if any."""
    config = model.config
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    heads, features = config.heads, config.hidden_size // config.heads

    def norm(p, x):
        return p["scale"] * (x - x.mean()) / math.sqrt(x.var() + config.norm_epsilon) + p["bias"]

    def linear(p, x):
        return x @ p["kernel"] + p["bias"]

    e = params["embeddings"]
    first = 2 if config.model_type == "roberta" else 0
    rows = [
        norm(e["norm"], e["word"][t] + e["position"][i + first] + e["segment"][0])
        for i, t in enumerate(tokens)
    ]
    if "widen" in params:
        rows = [linear(params["widen"], x) for x in rows]
    for i in range(config.layers):
        group = {0: 0, 1: 0, 2: 1}[i] if "widen" in params else i
        p = params[f"layer_{group}"]
        qkv = [linear(p["qkv"], x).reshape(3, heads, features) for x in rows]
        after = []
        for position, x in enumerate(rows):
            seen = qkv[: position + 1] if model.causal else qkv
            parts = []
            for h in range(heads):
                w = np.array(
                    [np.exp(qkv[position][0, h] @ m[1, h] / math.sqrt(features)) for m in seen]
                )
                parts.append(sum(wi * m[2, h] for wi, m in zip(w / w.sum(), seen, strict=True)))
            y = norm(p["attention_norm"], x + linear(p["attention"], np.concatenate(parts)))
            inner = REFERENCE_ACTIVATIONS[config.activation](linear(p["up"], y))
            after.append(norm(p["output_norm"], y + linear(p["down"], inner)))
        rows = after
    if not model.head:
        return np.array(rows), None
    activation = "gelu" if config.model_type == "roberta" else config.activation
    head, logits = params["head"], []
    for x in rows:
        inner = norm(head["norm"], REFERENCE_ACTIVATIONS[activation](linear(head["dense"], x)))
        logits.append([inner @ word + c for word, c in zip(e["word"], head["bias"], strict=True)])
    return np.array(rows), np.array(logits)


@pytest.mark.parametrize("kind", MODELS)
def test_equals_a_plain_float64_computation_of_unpadded_rows(kind):
    model = MODELS[kind]
    params = _params(model)
    tokens_BxL, mask_BxL = _batch()
    hidden_BxLxH = jax.jit(model.hidden)(params, tokens_BxL, mask_BxL)
    assert hidden_BxLxH.dtype == jnp.float32
    logits_BxLxV = model.logits(params, hidden_BxLxH) if model.head else None
    for row, (tokens, mask) in enumerate(zip(tokens_BxL, mask_BxL, strict=True)):
        hidden, logits = _reference(model, params, tokens[mask])
        np.testing.assert_allclose(hidden_BxLxH[row][mask], hidden, atol=3e-5)
        if logits_BxLxV is not None:
            np.testing.assert_allclose(logits_BxLxV[row][mask], logits, atol=1e-4)


@pytest.mark.parametrize("kind", ["albert", "roberta with a head", "causal bert"])
def test_padding_may_lie_in_front_where_positions_count_real_tokens_and_hold_anything(kind):
    """What masked positions hold makes no difference at all; minus one masks by itself."""
    model = MODELS[kind]
    params = _params(model)
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
    params = _params(model)
    tokens_BxL, mask_BxL = _batch()
    mask_BxL[1] = False

    def total(p):
        hidden_BxLxH = model.hidden(p, tokens_BxL, mask_BxL)
        return jnp.sum(jnp.where(mask_BxL[:, :, None], hidden_BxLxH, 0.0))

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


CAUSAL = Encoder(dataclasses.replace(BERT, layers=1, groups=1), causal=True, head=True)


def test_next_token_loss_and_accuracy_equal_the_float64_reference():
    params = _params(CAUSAL)
    tokens_BxL, mask_BxL = _batch()
    tokens_BxL = np.where(mask_BxL, tokens_BxL, -1)
    rows = np.array([True, True, True, False])
    nll, hits = [], 0
    for tokens in tokens_BxL[:3]:
        real = tokens[tokens >= 0]
        _, logits = _reference(CAUSAL, params, real)
        for here, target in zip(logits, real[1:], strict=False):
            nll.append(np.log(np.exp(here - here.max()).sum()) + here.max() - here[target])
            hits += int(here.argmax() == target)
    loss, metrics = jax.jit(CAUSAL.loss)(params, {"tokens": tokens_BxL}, rows)
    np.testing.assert_allclose(loss, np.mean(nll), rtol=1e-5)
    evaluated = jax.jit(CAUSAL.evaluate)(params, {"tokens": tokens_BxL}, rows)
    for found in (metrics, evaluated):
        np.testing.assert_allclose(found["loss_sum"], np.sum(nll), rtol=1e-5)
        assert (found["count"], found["correct"]) == (len(nll), hits)


def test_the_gradient_of_the_loss_is_that_of_the_plain_cross_entropy():
    params = _params(CAUSAL)
    tokens_BxL = _batch()[0]

    def plain(params):
        logits = CAUSAL.logits(params, CAUSAL.hidden(params, tokens_BxL))[:, :-1]
        log_p = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_p, tokens_BxL[:, 1:, None], axis=-1))

    def loss(params):
        return CAUSAL.loss(params, {"tokens": tokens_BxL}, np.ones(4, bool))[0]

    found, expected = jax.jit(lambda p: (jax.grad(loss)(p), jax.grad(plain)(p)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_what_a_model_cannot_do_is_said():
    tokens_BxL = _batch()[0]
    plain, masked = MODELS["bert"], MODELS["bert with a head"]
    params = jax.jit(masked.init)(jax.random.key(0))
    with pytest.raises(InputError, match="has no language-model head"):
        plain.logits(jax.jit(plain.init)(jax.random.key(0)), np.zeros((4, 9, 12), np.float32))
    with pytest.raises(InputError, match="only a causal encoder predicts the next token"):
        masked.loss(params, {"tokens": tokens_BxL}, np.ones(4, bool))
    with pytest.raises(InputError, match="at most 9 tokens, found 10"):
        masked.hidden(params, np.zeros((1, 10), np.int32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "xlnet"}, "model_type must be one of 'bert', .* found 'xlnet'"),
        ({"hidden_act": "swish"}, "activation must be one of"),
        ({"position_embedding_type": "relative_key"}, r'must be "absolute", found "relative_key"'),
        ({"add_cross_attention": True}, "add_cross_attention must be false, found true"),
        ({"intermediate_size": 0}, "inner_size must be at least 1"),
        ({"hidden_size": 13}, "hidden_size must be a multiple of heads = 3"),
        ({"hidden_size": "12"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "layers must be at least 1"),
        ({"layer_norm_eps": math.nan}, "norm_epsilon must be a finite number"),
        ({"layer_norm_eps": 1e-50}, "norm_epsilon must be from 1.18e-38 to 3.4e"),
        ({"initializer_range": 1e39}, "initializer_range must be from"),
        (
            {"model_type": "roberta", "pad_token_id": 9},
            "max_position_embeddings must be above pad_token_id",
        ),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(changed, message):
    values = BERT.to_dict() | {"use_cache": True}
    with pytest.raises(InputError, match=message):
        EncoderConfig.from_dict({**values, **changed})


def test_only_what_transformers_makes_causal_can_be():
    with pytest.raises(InputError, match="must be one of 'bert', 'roberta', found"):
        Encoder(ALBERT, causal=True)


def test_robertas_positions_are_those_that_tokens_can_have():
    values = ROBERTA.to_dict()
    assert (values["max_position_embeddings"], values["pad_token_id"]) == (11, 1)
    shapes = jax.eval_shape(Encoder(ROBERTA).init, jax.random.key(0))
    assert shapes["embeddings"]["position"].shape == (11, 12)


def test_albert_groups():
    config = EncoderConfig("albert", layers=12, groups=5)
    assert [config.group(i) for i in range(12)] == [int(i / (12 / 5)) for i in range(12)]
    with pytest.raises(InputError, match="groups must not exceed layers = 4"):
        dataclasses.replace(config, layers=4)
    with pytest.raises(InputError, match="inner_group_num must be 1, found 2"):
        EncoderConfig.from_dict({"model_type": "albert", "inner_group_num": 2})
    with pytest.raises(InputError, match="embedding_size must be 768 in bert, found 5"):
        EncoderConfig(embedding_size=5)
