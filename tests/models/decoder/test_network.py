"""Decoders against a float64 transcription of GPT-2 and Llama in numpy.

For the agreement with the original library see test_golden_transformers.py.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpfl.errors import InputError
from jaxpfl.models import PAD
from jaxpfl.models.decoder.config import DecoderConfig, RopeScaling
from jaxpfl.models.decoder.layers import packed, wide_matmul
from jaxpfl.models.decoder.network import Decoder

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
_KINDS = [pytest.param(GPT2, id="gpt2", marks=pytest.mark.long), pytest.param(LLAMA, id="llama")]
BOTH = pytest.mark.parametrize("config", _KINDS)
_GEMMA3 = pytest.param(GEMMA3, id="gemma3")
WITH_GEMMA = pytest.mark.parametrize("config", [*_KINDS, _GEMMA3])
ALL = pytest.mark.parametrize("config", [*_KINDS, pytest.param(MISTRAL, id="mistral"), _GEMMA3])
TOKENS = np.array(
    [[3, 0, 22, 7, 7, 1, 9, 4], [5, 6, 2, 0, PAD, PAD, PAD, PAD], [8, 1, 1, 1, 1, 1, 22, PAD]],
    np.int32,
)


def drawn(model, scale=0.3):
    """Parameters in which every scale, bias and matrix matters."""
    params = model.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    return tree.unflatten(
        [
            leaf + np.float32(scale) * rng.normal(size=leaf.shape).astype(np.float32)
            for leaf in leaves
        ]
    )


def reference_logits(config, params, row):
    """Logits [L, V] of one row of real tokens, in float64, one query at a time."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    gpt = config.model_type == "gpt2"

    def norm(x, p):
        if gpt:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * p["scale"]
        return x + p["bias"] if gpt else x

    def linear(x, p, layer):
        y = x @ p["kernel"][layer]
        return y + p["bias"][layer] if gpt else y

    def turned(x, place):
        size = config.head_size
        result = x.copy()
        for i in range(size // 2):
            frequency = config.rope_theta ** (-2 * i / size)
            s = config.rope_scaling
            if s is not None:
                wavelength = 2 * math.pi / frequency
                if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
                    frequency = frequency / s.factor
                elif wavelength > s.original_max_position_embeddings / s.high_freq_factor:
                    smooth = s.original_max_position_embeddings / wavelength - s.low_freq_factor
                    smooth /= s.high_freq_factor - s.low_freq_factor
                    frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
            c, d = math.cos(place * frequency), math.sin(place * frequency)
            result[i] = c * x[i] - d * x[i + size // 2]
            result[i + size // 2] = c * x[i + size // 2] + d * x[i]
        return result

    x = params["embed"]["token"][row]
    if gpt:
        x = x + params["embed"]["position"][: len(row)]
    for layer in range(config.layers):
        parts = params["layers"]
        at = {name: {leaf: value[layer] for leaf, value in parts[name].items()} for name in parts}
        n = norm(x, at["attention_norm"])
        q, k, v = (
            linear(n, parts[name], layer).reshape(len(row), -1, config.head_size) for name in "qkv"
        )
        attended = np.zeros((len(row), config.heads, config.head_size))
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            for place in range(len(row)):
                query = q[place, head] if gpt else turned(q[place, head], place)
                scores = np.array(
                    [
                        query @ (k[m, shared] if gpt else turned(k[m, shared], m))
                        for m in range(place + 1)
                    ]
                ) / math.sqrt(config.head_size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                attended[place, head] = weights @ v[: place + 1, shared]
        x = x + linear(attended.reshape(len(row), -1), parts["o"], layer)
        n = norm(x, at["mlp_norm"])
        if gpt:
            up = linear(n, parts["up"], layer)
            inner = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            gate = linear(n, parts["gate"], layer)
            inner = gate / (1 + np.exp(-gate)) * linear(n, parts["up"], layer)
        x = x + linear(inner, parts["down"], layer)
    head = params["embed"]["token"].T if config.tied else params["head"]["kernel"]
    return norm(x, params["norm"]) @ head


@BOTH
def test_logits_and_loss_agree_with_the_formulas(config):
    model = Decoder(config)
    params = drawn(model)
    logits = np.asarray(jax.jit(lambda p, t: model.logits(p, model.hidden(p, t)))(params, TOKENS))
    assert np.isfinite(logits).all()
    nll, hits = 0.0, 0
    for number, row in enumerate(TOKENS):
        real = row[row != PAD]
        expected = reference_logits(config, params, real)
        found = logits[number][: len(real)]
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
        if number < 2:
            before, after = expected[:-1], real[1:]
            shifted = before - before.max(-1, keepdims=True)
            log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            nll -= log_p[np.arange(len(after)), after].sum()
            hits += (before.argmax(-1) == after).sum()
    loss, sums = jax.jit(model.loss)(params, {"tokens": TOKENS}, np.array([True, True, False]))
    np.testing.assert_allclose(float(loss), nll / 10, rtol=1e-5)
    np.testing.assert_allclose(float(sums["loss_sum"]), nll, rtol=1e-5)
    assert (int(sums["correct"]), int(sums["count"])) == (hits, 7 + 3)


@ALL
def test_cached_steps_give_the_logits_of_the_whole_row(config):
    """Rows of different lengths, one step at a time, against a single pass."""
    model = Decoder(config)
    params = drawn(model)
    row = jnp.asarray(np.random.default_rng(2).integers(0, 23, (2, 12)), jnp.int32)
    whole = jax.jit(lambda p, t: model.logits(p, model.hidden(p, t)))(params, row)
    prompt = np.array(row[:, :5])
    prompt[1, 3:] = PAD
    cache = model.prefill(params, jnp.asarray(prompt), 8)
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
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)


@WITH_GEMMA
def test_bfloat16_keeps_norms_softmax_and_losses_in_float32(config):
    """Near to float32, but not equal; weights stored in bfloat16 too."""
    model, half = Decoder(config), Decoder(config, compute="bfloat16")
    params = drawn(model, 0.1)

    def logits(model, params):
        return model.logits(params, model.hidden(params, TOKENS[:1]))

    assert jax.eval_shape(half.hidden, params, TOKENS[:1]).dtype == jnp.bfloat16
    exact, found = (np.asarray(jax.jit(logits, static_argnums=0)(m, params)) for m in (model, half))
    assert found.dtype == jnp.float32
    assert 1e-5 < np.abs(found - exact).max() / np.abs(exact).max() < 0.03
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert jax.eval_shape(lambda p: logits(half, p), stored).dtype == jnp.float32
    loss, _ = jax.eval_shape(half.loss, stored, {"tokens": TOKENS}, np.ones(3, bool))
    assert loss.dtype == jnp.float32
    text = str(jax.make_jaxpr(lambda p: half.hidden(p, TOKENS[:1]))(stored))
    exponentials = [line for line in text.splitlines() if " = exp " in line]
    # The softmax, in float32.
    assert exponentials and all("f32" in line.split("=")[0] for line in exponentials)
    roots = [line for line in text.splitlines() if " = rsqrt " in line]
    assert roots and all("f32" in line.split("=")[0] for line in roots)
    bits = packed(stored)
    assert {leaf.dtype for leaf in jax.tree.leaves(bits)} == {np.dtype("uint16")}
    same = (np.asarray(jax.jit(logits, static_argnums=0)(half, each)) for each in (stored, bits))
    np.testing.assert_array_equal(*same)


@BOTH
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["data", "model"])
def test_parameters_dealt_over_devices_give_the_same_logits(config, shape):
    """SPEC F's Auto axes; every leaf that can be is in two different halves."""
    model = Decoder(dataclasses.replace(config, vocab_size=24))
    params = drawn(model)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(params, model.shardings(mesh, params))
    kernel = placed["layers"]["q"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[1:] == (
        kernel.shape[1] // shape[0],
        kernel.shape[2] // shape[1],
    )

    def logits(params):
        return model.logits(params, model.hidden(params, TOKENS))

    np.testing.assert_allclose(
        jax.jit(logits)(placed), jax.jit(logits)(params), rtol=1e-5, atol=1e-5
    )


@BOTH
def test_devices_that_share_a_batch_gather_weights_and_sum_no_products(config):
    """Fully sharded data parallelism (Zhao et al. 2023): a layer's weights move, no activations."""
    model = Decoder(config)
    params = drawn(model)
    mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(params, model.shardings(mesh, params))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.device_put(np.concatenate([TOKENS, TOKENS]), rows)

    @partial(jax.jit, out_shardings=rows)
    def logits(params, tokens):
        return model.logits(params, model.hidden(params, tokens))

    assert "all-reduce" not in logits.lower(placed, tokens).compile().as_text()
    np.testing.assert_allclose(
        logits(placed, tokens)[: len(TOKENS)],
        jax.jit(logits.__wrapped__)(params, TOKENS),
        atol=1e-5,
    )


def test_sizes_that_an_axis_does_not_divide_stay_whole():
    model = Decoder(GPT2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    places = model.shardings(mesh, shapes)
    assert places["embed"]["token"].spec[0] is None
    assert places["layers"]["q"]["kernel"].spec[2] == "model"


def test_initial_parameters():
    model = Decoder(DecoderConfig("gpt2", vocab_size=500, hidden_size=120, layers=3, heads=3))
    params = model.init(jax.random.key(5))
    layers = params["layers"]
    assert layers["q"]["kernel"].shape == (3, 120, 120)
    np.testing.assert_allclose(np.std(layers["q"]["kernel"]), 0.02, rtol=0.03)
    np.testing.assert_allclose(np.std(layers["o"]["kernel"]), 0.02 / math.sqrt(6), rtol=0.03)
    np.testing.assert_allclose(np.std(layers["down"]["kernel"]), 0.02 / math.sqrt(6), rtol=0.03)
    assert not np.array_equal(layers["q"]["kernel"][0], layers["q"]["kernel"][1])
    assert not np.array_equal(layers["q"]["kernel"], layers["k"]["kernel"])
    assert all(
        leaf.dtype == jnp.bfloat16
        for leaf in jax.tree.leaves(model.init(jax.random.key(0), jnp.bfloat16))
    )


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
    found = model.hidden(params | {"embed": scaled}, TOKENS[:1])[0].astype(jnp.float32)
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


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (GPT2, {"model_type": "mamba"}, "model_type must be one of 'gpt2', .*, found 'mamba'"),
        (GPT2, {"n_head": 5}, "hidden_size must be a multiple of heads = 5, found 12"),
        (GPT2, {"n_embd": None}, "the field 'n_embd' is missing"),
        (GPT2, {"n_layer": 2.0}, "layers must be a whole number, found 2.0"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "must be false, found true"),
        (GPT2, {"scale_attn_weights": None}, "must be true, found null"),
        (GPT2, {"activation_function": "swish9"}, "activation must be one of"),
        (GPT2, {"layer_norm_epsilon": math.nan}, "norm_epsilon must be a finite number"),
        (GPT2, {"layer_norm_epsilon": 1e-50}, "norm_epsilon must be from 1.18e-38 to 3.4e"),
        (GPT2, {"initializer_range": 1e39}, "initializer_range must be from"),
        (LLAMA, {"num_key_value_heads": 3}, "must be a multiple of kv_heads = 3, found 4"),
        (LLAMA, {"head_dim": 5}, "head_size must be even for rotary positions, found 5"),
        (LLAMA, {"attention_bias": True}, "attention_bias must be false, found true"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be one of 'default',"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "'rope_scaling.factor' is missing"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tied must be true or false, found 'no'"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window must be false, found true"),
        (QWEN3, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a finite"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "softcapping must be null, found 30.0"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types must have, for every layer"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "sliding_attention must have no scaling",
        ),
        (GEMMA3, {"rope_parameters": [1]}, "rope_parameters must be an object, found"),
    ],
)
def test_bad_configs(config, change, message):
    """TRUST 9."""
    with pytest.raises(InputError, match=message):
        DecoderConfig.from_dict(config.to_dict() | change)


def test_bad_calls():
    with pytest.raises(InputError, match="window must be one of"):
        dataclasses.replace(LLAMA, window=3)
    with pytest.raises(InputError, match="query_scalar must be 6 in llama, found 9"):
        dataclasses.replace(LLAMA, query_scalar=9)
    with pytest.raises(InputError, match="kv_heads must be 3 in gpt2, found 1"):
        dataclasses.replace(GPT2, kv_heads=1)
    with pytest.raises(InputError, match="compute must be one of"):
        Decoder(GPT2, compute="float16")
    model = Decoder(GPT2)
    with pytest.raises(InputError, match="a sequence must have at most 40 tokens, found 41"):
        model.hidden(model.init(jax.random.key(0)), jnp.zeros((1, 41), jnp.int32))


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
    for found, plain in zip(gradients(wide, left, right), wanted, strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)
    narrow = (left.astype(jnp.bfloat16), right.astype(jnp.bfloat16))
    assert wide(*narrow).dtype == jnp.float32
    for found, plain in zip(gradients(wide, *narrow), wanted, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), plain, rtol=0.05, atol=0.1)
