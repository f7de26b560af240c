"""Decoders: caches, branches, precisions, devices; whose logits test_golden_transformers.py has."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpfl.models import PAD
from jaxpfl.models.decoder.config import DecoderConfig, RopeScaling
from jaxpfl.models.decoder.layers import packed, wide_matmul
from jaxpfl.models.decoder.network import Decoder
from tests.refusals import refusal
from tests.trees import assert_close, drawn

GPT2 = DecoderConfig("gpt2", vocab_size=23, hidden_size=12, layers=3, heads=3, positions=40)
LLAMA = DecoderConfig(
    "llama",
    vocab_size=23,
    hidden_size=12,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=6,
    inner_size=20,
    positions=40,
    rope_theta=100.0,
    rope_scaling=RopeScaling(4.0, 1.0, 3.0, 16),
)
QWEN2 = DecoderConfig("qwen2", vocab_size=23, hidden_size=12, layers=2, heads=2, positions=40)
MISTRAL = DecoderConfig(
    "mistral", vocab_size=23, hidden_size=12, layers=2, heads=2, positions=40, window=3
)
GEMMA3 = DecoderConfig(
    "gemma3_text", vocab_size=23, hidden_size=12, layers=3, heads=2, kv_heads=1, head_size=8,
    positions=40, rope_scaling=8.0, window=3, window_period=2, local_rope_theta=30.0,
    query_scalar=20,
)  # fmt: skip
QWEN3 = dataclasses.replace(QWEN2, model_type="qwen3")
_GPT2 = pytest.param(GPT2, id="gpt2", marks=pytest.mark.long)
BOTH = pytest.mark.parametrize("config", [_GPT2, pytest.param(LLAMA, id="llama")])
# A Gemma has a Llama's layers, norms of queries and keys, and windows.
_LLAMA = pytest.param(LLAMA, id="llama", marks=pytest.mark.long)
_GEMMA3 = pytest.param(GEMMA3, id="gemma3")
WITH_GEMMA = pytest.mark.parametrize("config", [_GPT2, _LLAMA, _GEMMA3])
ALL = pytest.mark.parametrize(
    "config", [_GPT2, _LLAMA, pytest.param(MISTRAL, id="mistral"), _GEMMA3]
)
TOKENS = np.array(
    [[3, 0, 22, 7, 7, 1, 9, 4], [5, 6, 2, 0, PAD, PAD, PAD, PAD], [8, 1, 1, 1, 1, 1, 22, PAD]],
    np.int32,
)


@partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens):
    return model.logits(params, model.hidden(params, tokens))


def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@BOTH
def test_the_loss_is_that_of_the_logits_of_real_tokens(config):
    model = Decoder(config)
    params = drawn(model)
    logits = np.asarray(logits_of(model, params, TOKENS), np.float64)
    assert np.isfinite(logits).all()
    nll, hits = 0.0, 0
    for before, row in zip(logits[:2], TOKENS[:2], strict=True):
        after = row[row != PAD][1:]
        before = before[: len(after)]
        nll += np.log(np.exp(before).sum(-1)).sum() - before[np.arange(len(after)), after].sum()
        hits += (before.argmax(-1) == after).sum()
    loss, sums = jax.jit(model.loss)(params, {"tokens": TOKENS}, np.array([True, True, False]))
    np.testing.assert_allclose((float(loss) * 10, sums["loss_sum"]), nll, rtol=1e-5)
    assert (int(sums["correct"]), int(sums["count"])) == (hits, 7 + 3)


@ALL
def test_cached_steps_give_the_logits_of_the_whole_row(config):
    """Rows of different lengths, one step at a time, against a single pass."""
    model = Decoder(config)
    params = drawn(model)
    row = jnp.asarray(np.random.default_rng(2).integers(0, 23, (2, 12)), jnp.int32)
    whole = logits_of(model, params, row)
    prompt = np.array(row[:, :5])
    prompt[1, 3:] = PAD
    cache = jax.jit(model.prefill, static_argnums=2)(params, jnp.asarray(prompt), 8)
    np.testing.assert_array_equal(cache.place_S, [5, 3])
    step = jax.jit(model.step)
    for i in range(6):
        logits, cache = step(params, jnp.stack([row[0, 5 + i], row[1, 3 + i]]), cache)
        np.testing.assert_allclose(logits[0], whole[0, 5 + i], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(logits[1], whole[1, 3 + i], rtol=1e-5, atol=1e-5)


@ALL
def test_branches_share_a_prompt_and_do_not_see_each_other(config):
    model = Decoder(config)
    params = drawn(model)
    prompt, chosen, rejected = [3, 1, 4], [1, 5, 9], [2, 6]
    row = np.array([[*prompt, PAD, *chosen, PAD, *rejected, PAD]], np.int32)
    positions = np.array([[0, 1, 2, 3, 3, 4, 5, 6, 3, 4, 5]], np.int32)
    branch = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]], np.int32)
    hidden = jax.jit(model.hidden)
    together = hidden(params, row, positions, branch)[0]
    for continuation, start in ((chosen, 4), (rejected, 8)):
        alone = hidden(params, np.array([prompt + continuation], np.int32))[0]
        np.testing.assert_allclose(
            together[start : start + len(continuation)], alone[3:], rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(together[:3], alone[:3], rtol=1e-5, atol=1e-5)


@WITH_GEMMA
def test_remat_changes_no_gradient(config):
    model = Decoder(config)
    params = drawn(model)

    def gradients(model):
        batch, mask = {"tokens": TOKENS}, np.ones(3, bool)
        return jax.jit(jax.grad(lambda p: model.loss(p, batch, mask)[0]))(params)

    plain, again = gradients(model), gradients(dataclasses.replace(model, remat=True))
    assert_close(plain, again, atol=1e-6)


@WITH_GEMMA
def test_bfloat16_keeps_norms_softmax_and_losses_in_float32(config):
    """Near to float32, but not equal; weights stored in bfloat16 too."""
    model, half, row = Decoder(config), Decoder(config, compute="bfloat16"), TOKENS[:1]
    params = drawn(model, scale=0.1)
    assert jax.eval_shape(half.hidden, params, row).dtype == jnp.bfloat16
    exact, found = (np.asarray(logits_of(each, params, row)) for each in (model, half))
    assert found.dtype == jnp.float32
    assert 1e-5 < np.abs(found - exact).max() / np.abs(exact).max() < 0.03
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    loss, _ = jax.eval_shape(half.loss, stored, {"tokens": TOKENS}, np.ones(3, bool))
    assert loss.dtype == jnp.float32
    lines = str(jax.make_jaxpr(lambda p: half.hidden(p, row))(stored)).splitlines()
    # The softmax and the norms, in float32.
    for function in (" = exp ", " = rsqrt "):
        computed = [line.split("=")[0] for line in lines if function in line]
        assert computed and all("f32" in kind for kind in computed)
    bits = packed(stored)
    assert {leaf.dtype for leaf in jax.tree.leaves(bits)} == {np.dtype("uint16")}
    same = [np.asarray(logits_of(half, each, row)) for each in (stored, bits)]
    assert same[0].dtype == np.float32
    np.testing.assert_array_equal(*same)


@BOTH
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["data", "model"])
def test_parameters_dealt_over_devices_give_the_same_logits(config, shape):
    """SPEC F's Auto axes; every leaf that can be is in two different halves."""
    model = Decoder(dataclasses.replace(config, vocab_size=24))
    params = drawn(model)
    placed = jax.device_put(params, model.shardings(mesh_of(*shape), params))
    kernel = placed["layers"]["q"]["kernel"]
    _, rows, columns = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape)[1:] == (rows // shape[0], columns // shape[1])
    found, expected = (logits_of(model, each, TOKENS) for each in (placed, params))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@BOTH
def test_devices_that_share_a_batch_gather_weights_and_sum_no_products(config):
    """Fully sharded data parallelism (Zhao et al. 2023): a layer's weights move, no activations."""
    model = Decoder(config)
    params, mesh = drawn(model), mesh_of(2, 1)
    placed = jax.device_put(params, model.shardings(mesh, params))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.device_put(np.concatenate([TOKENS, TOKENS]), rows)
    logits = jax.jit(partial(logits_of.__wrapped__, model), out_shardings=rows)
    compiled = logits.lower(placed, tokens).compile()
    assert "all-reduce" not in compiled.as_text()
    expected = logits_of(model, params, TOKENS)
    np.testing.assert_allclose(compiled(placed, tokens)[: len(TOKENS)], expected, atol=1e-5)


def test_sizes_that_an_axis_does_not_divide_stay_whole():
    model = Decoder(GPT2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    places = model.shardings(mesh_of(1, 2), shapes)
    assert places["embed"]["token"].spec[0] is None
    assert places["layers"]["q"]["kernel"].spec[2] == "model"


def test_initial_parameters():
    model = Decoder(DecoderConfig("gpt2", vocab_size=500, hidden_size=120, layers=3, heads=3))
    layers = jax.jit(model.init)(jax.random.key(5))["layers"]
    assert layers["q"]["kernel"].shape == (3, 120, 120)
    np.testing.assert_allclose(np.std(layers["q"]["kernel"]), 0.02, rtol=0.03)
    for name in ("o", "down"):
        np.testing.assert_allclose(np.std(layers[name]["kernel"]), 0.02 / math.sqrt(6), rtol=0.03)
    assert not np.array_equal(layers["q"]["kernel"][0], layers["q"]["kernel"][1])
    assert not np.array_equal(layers["q"]["kernel"], layers["k"]["kernel"])
    shapes = jax.eval_shape(lambda key: model.init(key, jnp.bfloat16), jax.random.key(0))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"bfloat16"}


@pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3])
def test_config_survives_its_file_form(config):
    assert DecoderConfig.from_dict(config.to_dict()) == config


def test_a_token_sees_a_window_of_tokens():
    model = Decoder(dataclasses.replace(MISTRAL, layers=1))
    params, hidden = drawn(model), jax.jit(model.hidden)
    before = np.asarray(hidden(params, TOKENS[:1]))[0]
    for changed, reaches in ((1, 4), (2, 5)):
        other = TOKENS[:1].copy()
        other[0, changed] = 17
        differs = np.any(before != np.asarray(hidden(params, other))[0], axis=-1)
        assert differs.tolist() == [changed <= place < reaches for place in range(8)]


def test_a_mistral_has_the_window_of_transformers():
    values = MISTRAL.to_dict()
    assert DecoderConfig.from_dict(values | {"sliding_window": None}).window is None
    del values["sliding_window"]
    assert DecoderConfig.from_dict(values).window == 4_096


def test_a_gemma_of_transformers_5_says_what_each_layer_sees():
    values = GEMMA3.to_dict()
    assert "window_period" not in values and values.pop("sliding_window_pattern") == 2
    far, near = "full_attention", "sliding_attention"
    values["rope_parameters"] = {
        far: values.pop("rope_scaling") | {"rope_theta": values.pop("rope_theta")},
        near: {"rope_type": "default", "rope_theta": values.pop("rope_local_base_freq")},
    }
    assert DecoderConfig.from_dict(values | {"layer_types": [near, far, near]}) == GEMMA3
    assert DecoderConfig.from_dict(values).window_period == 6
    for kinds, expected in (([near] * 3, [1, 1, 1]), ([far] * 3, [0, 0, 0])):
        found = DecoderConfig.from_dict(values | {"layer_types": kinds}).kind_L
        np.testing.assert_array_equal(found, expected)
    del values["rope_parameters"]
    found = DecoderConfig.from_dict(values)
    assert (found.rope_theta, found.local_rope_theta, found.rope_scaling) == (1e6, 1e4, None)


def test_gemmas_embeddings_are_scaled_as_their_dtype_rounds():
    """The root of 12 is 3.4641, and 3.46875 in bfloat16."""
    model = Decoder(GEMMA3, compute="bfloat16")
    params = drawn(model)
    params = params | {"layers": jax.tree.map(jnp.zeros_like, params["layers"])}
    params["norm"] = {"scale": jnp.zeros(12)}
    scaled = {"token": (params["embed"]["token"] * 1e-3).astype(jnp.bfloat16)}
    hidden = jax.jit(model.hidden)(params | {"embed": scaled}, TOKENS[:1])
    found = hidden[0].astype(jnp.float32)
    x = (scaled["token"][TOKENS[0]] * jnp.bfloat16(3.46875)).astype(jnp.float32)
    # Small beside the epsilon, so that the norm does not undo the scale.
    expected = np.asarray(x) / np.sqrt(np.square(x).mean(-1, keepdims=True) + GEMMA3.norm_epsilon)
    np.testing.assert_array_equal(found, jnp.asarray(expected).astype(jnp.bfloat16))


def test_config_of_transformers_5_and_4():
    values = LLAMA.to_dict()
    scaling = values.pop("rope_scaling")
    theta = values.pop("rope_theta")
    values["rope_parameters"] = scaling | {"rope_theta": theta}
    assert DecoderConfig.from_dict(values) == LLAMA
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 7.0}
    assert DecoderConfig.from_dict(values).rope_theta == 7.0
    assert DecoderConfig.from_dict(values).rope_scaling is None
    for null in ({}, {"rope_theta": None}):
        values["rope_scaling"] = {"type": "linear", "factor": 2.0} | null
        assert DecoderConfig.from_dict(values).rope_theta == 7.0
        top = values | {"rope_parameters": None, "rope_theta": 9.0}
        assert DecoderConfig.from_dict(top).rope_theta == 9.0


def read(config, **changes):
    return DecoderConfig.from_dict(config.to_dict() | changes)


ROPE = {"sliding_attention": {"rope_type": "linear", "factor": 2}}
BAD = {
    lambda: read(GPT2, model_type="mamba"): "model_type one of 'gpt2', found 'mamba'",
    lambda: read(GPT2, n_head=5): "hidden_size multiple of heads = 5, found 12",
    lambda: read(GPT2, n_embd=None): "'n_embd' is missing",
    lambda: read(GPT2, n_layer=2.0): "layers whole number, found 2.0",
    lambda: read(GPT2, scale_attn_by_inverse_layer_idx=True): "must be false, found true",
    lambda: read(GPT2, scale_attn_weights=None): "must be true, found null",
    lambda: read(GPT2, activation_function="swish9"): "activation must be one of",
    lambda: read(GPT2, layer_norm_epsilon=math.nan): "norm_epsilon finite number",
    lambda: read(GPT2, layer_norm_epsilon=1e-50): "norm_epsilon from 1.18e-38 to 3.4e",
    lambda: read(GPT2, initializer_range=1e39): "initializer_range must be from",
    lambda: read(LLAMA, num_key_value_heads=3): "multiple of kv_heads = 3, found 4",
    lambda: read(LLAMA, head_dim=5): "head_size even rotary found 5",
    lambda: read(LLAMA, attention_bias=True): "attention_bias must be false, found true",
    lambda: read(LLAMA, rope_scaling={"rope_type": "yarn"}): "rope_type one of 'default',",
    lambda: read(
        LLAMA, rope_scaling={"type": "yarn"}, rope_parameters={"rope_type": "default"}
    ): "rope_type one of found 'yarn'",
    lambda: read(LLAMA, partial_rotary_factor=0.5): "partial_rotary_factor 1, found 0.5",
    lambda: read(LLAMA, rope_scaling={"rope_type": "llama3"}): "'rope_scaling.factor' missing",
    lambda: read(LLAMA, tie_word_embeddings="no"): "tied true or false, found 'no'",
    lambda: read(QWEN2, use_sliding_window=True): "use_sliding_window false, found true",
    lambda: read(QWEN3, rope_scaling={"type": "linear"}): "rope_scaling.factor finite",
    lambda: read(GEMMA3, final_logit_softcapping=30.0): "softcapping must be null, found 30.0",
    lambda: read(GEMMA3, layer_types=["full_attention"]): "layer_types for every layer",
    lambda: read(GEMMA3, rope_parameters=ROPE): "sliding_attention must have no scaling",
    lambda: read(GEMMA3, rope_parameters={"rope_theta": 9.0}): "full_attention found 'rope_theta'",
    lambda: read(QWEN2, layer_types=["full_attention", "sliding_attention"]): "layer_types every",
    lambda: read(QWEN3, layer_types=["sliding_attention"] * 2): "layer_types 'full_attention' for",
    lambda: read(MISTRAL, layer_types=["full_attention"] * 9): "layer_types 'sliding_attention'",
    lambda: read(LLAMA, layer_types=["chunked_attention"]): "layer_types 'full_attention' every",
    lambda: read(LLAMA, hidden_act="quick_gelu"): "activation must be one of found 'quick_gelu'",
    lambda: read(GEMMA3, attn_logit_softcapping=50.0): "softcapping must be null, found 50.0",
    lambda: read(GEMMA3, use_bidirectional_attention=True): "bidirectional false, found true",
    **{
        lambda kind=kind: read(LLAMA, rope_scaling={"rope_type": kind, "factor": 2.0}): (
            f"rope_type one of found '{kind}'"
        )
        for kind in ("yarn", "dynamic", "longrope", "su", "proportional")
    },
    lambda: read(GEMMA3, rope_parameters=[1]): "rope_parameters must be an object, found",
    lambda: dataclasses.replace(LLAMA, window=3): "window must be one of",
    lambda: dataclasses.replace(LLAMA, query_scalar=9): "query_scalar 6 in llama, found 9",
    lambda: dataclasses.replace(GPT2, kv_heads=1): "kv_heads must be 3 in gpt2, found 1",
    lambda: Decoder(GPT2, compute="float16"): "compute must be one of",
    lambda: Decoder(GPT2).hidden({}, jnp.zeros((1, 41), jnp.int32)): "at most 40 tokens, found 41",
}


@pytest.mark.parametrize(("call", "words"), BAD.items(), ids=BAD.values())
def test_bad_configs_and_calls(call, words):
    """TRUST 9."""
    refusal(call, words)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("outer", [(), (2, 3)])
def test_a_wide_product_has_the_gradients_of_a_plain_one(outer, transposed):
    def wide(left, right):
        return wide_matmul(left, jnp.swapaxes(right, -1, -2) if transposed else right, transposed)

    keys = jax.random.split(jax.random.key(0), 3)
    left = jax.random.normal(keys[0], (*outer, 5, 4))
    right = jax.random.normal(keys[1], (*outer, 4, 6))
    weight = jax.random.normal(keys[2], (*outer, 5, 6))

    def gradients(product, left, right):
        def loss(left, right):
            return jnp.sum(product(left, right).astype(jnp.float32) * weight)

        return jax.jit(jax.grad(loss, (0, 1)))(left, right)

    wanted = gradients(jnp.matmul, left, right)
    assert_close(gradients(wide, left, right), wanted, atol=1e-5)
    narrow = (left.astype(jnp.bfloat16), right.astype(jnp.bfloat16))
    assert jax.eval_shape(wide, *narrow).dtype == jnp.float32
    for found, plain in zip(gradients(wide, *narrow), wanted, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), plain, rtol=0.05, atol=0.1)
