"""BERT and ALBERT against a plain float64 computation, and the invariances of a mask."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models.albert import Albert, AlbertConfig
from jaxpfl.models.bert import ACTIVATIONS, Bert, BertConfig

SIZES = dict(
    vocab_size=40,
    hidden_size=12,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=20,
    max_position_embeddings=9,
    initializer_range=0.4,
)
MODELS = {
    "bert": Bert(BertConfig(**SIZES, layer_norm_eps=1e-3)),
    "albert": Albert(AlbertConfig(**SIZES, embedding_size=5, num_hidden_groups=2)),
}


def _params(model):
    """Parameters without zeros and ones, so that every one of them matters."""
    params = model.init(jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    moved = [
        leaf + 0.2 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


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


def _reference(config, params, tokens):
    """One unpadded row in float64, token by token and head by head: [L, H]."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    heads, features = (
        config.num_attention_heads,
        config.hidden_size // config.num_attention_heads,
    )

    def norm(p, x):
        return p["scale"] * (x - x.mean()) / math.sqrt(x.var() + config.layer_norm_eps) + p["bias"]

    def linear(p, x):
        return x @ p["kernel"] + p["bias"]

    e = params["embeddings"]
    rows = [
        norm(e["norm"], e["word"][t] + e["position"][i] + e["segment"][0])
        for i, t in enumerate(tokens)
    ]
    if "widen" in params:
        rows = [linear(params["widen"], x) for x in rows]
    for i in range(config.num_hidden_layers):
        group = {0: 0, 1: 0, 2: 1}[i] if "widen" in params else i
        p = params[f"layer_{group}"]
        qkv = [linear(p["qkv"], x).reshape(3, heads, features) for x in rows]
        after = []
        for position, x in enumerate(rows):
            parts = []
            for h in range(heads):
                w = np.array(
                    [np.exp(qkv[position][0, h] @ m[1, h] / math.sqrt(features)) for m in qkv]
                )
                parts.append(sum(wi * m[2, h] for wi, m in zip(w / w.sum(), qkv, strict=True)))
            y = norm(p["attention_norm"], x + linear(p["attention"], np.concatenate(parts)))
            inner = REFERENCE_ACTIVATIONS[config.hidden_act](linear(p["up"], y))
            after.append(norm(p["output_norm"], y + linear(p["down"], inner)))
        rows = after
    return np.array(rows)


@pytest.mark.parametrize("kind", MODELS)
def test_equals_a_plain_float64_computation_of_unpadded_rows(kind):
    model = MODELS[kind]
    params = _params(model)
    tokens_BxL, mask_BxL = _batch()
    found_BxLxH = jax.jit(model.hidden)(params, tokens_BxL, mask_BxL)
    assert found_BxLxH.dtype == jnp.float32
    for tokens, mask, found in zip(tokens_BxL, mask_BxL, np.asarray(found_BxLxH), strict=True):
        expected = _reference(model.config, params, tokens[mask])
        np.testing.assert_allclose(found[mask], expected, atol=3e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_what_masked_positions_hold_does_not_matter(kind):
    model = MODELS[kind]
    params = _params(model)
    tokens_BxL, mask_BxL = _batch()
    other_BxL = np.where(mask_BxL, tokens_BxL, (tokens_BxL + 11) % 40)
    first = np.asarray(model.hidden(params, tokens_BxL, mask_BxL))
    second = np.asarray(model.hidden(params, other_BxL, mask_BxL))
    np.testing.assert_array_equal(first[mask_BxL], second[mask_BxL])


@pytest.mark.parametrize("kind", MODELS)
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


@pytest.mark.parametrize("kind", MODELS)
def test_init_has_the_published_number_of_parameters(kind):
    published = {"bert": 108_891_648, "albert": 11_092_992}  # base models, without the pooler
    model = {
        "bert": Bert(BertConfig()),
        "albert": Albert(
            AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3_072)
        ),
    }[kind]
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published[kind]


def test_gelu_by_erf_and_by_tanh_differ_as_published():
    x = np.linspace(-4, 4, 101).astype(np.float32)
    for name, reference in REFERENCE_ACTIVATIONS.items():
        np.testing.assert_allclose(ACTIVATIONS[name](x), reference(x.astype(float)), atol=2e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "roberta"}, "model_type must be 'bert', found 'roberta'"),
        ({"hidden_act": "swish"}, "hidden_act must be one of"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be one of"),
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"hidden_size": 13}, "hidden_size must be a multiple of num_attention_heads = 3"),
        ({"hidden_size": "12"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"layer_norm_eps": math.nan}, "layer_norm_eps must be a finite number"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(changed, message):
    values = {"model_type": "bert", **SIZES, "use_cache": True, "layer_norm_eps": 1e-12}
    assert BertConfig.from_dict(values) == BertConfig(**SIZES)
    with pytest.raises(InputError, match=message):
        BertConfig.from_dict({**values, **changed})


def test_albert_groups():
    config = AlbertConfig(num_hidden_layers=12, num_hidden_groups=5)
    assert [config.group(i) for i in range(12)] == [int(i / (12 / 5)) for i in range(12)]
    with pytest.raises(InputError, match="num_hidden_groups must not exceed"):
        dataclasses.replace(config, num_hidden_layers=4)
    with pytest.raises(InputError, match="inner_group_num must be 1, found 2"):
        AlbertConfig.from_dict({"model_type": "albert", "inner_group_num": 2})
