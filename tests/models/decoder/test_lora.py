"""Adapters against the full weights that they stand for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.shapes import llama3_8b
from jaxpfl.models import adapter_trees, count_parameters
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.decoder.quantise import quantise
from tests.models.decoder.test_network import BOTH, GEMMA3, GPT2, LLAMA, TOKENS, logits_of
from tests.refusals import refusal
from tests.trees import assert_close, assert_same, drawn

BATCH, MASK = {"tokens": TOKENS}, np.ones(3, bool)


def logits(model, params):
    return np.asarray(logits_of(model, params, TOKENS))


def adapted(config, settings=None):
    """A model with adapters whose B is not zero."""
    plain, settings = Decoder(config), settings or LoRA()
    model, params = lora.attach(plain, drawn(plain), settings, jax.random.key(1))
    adapters, base = adapter_trees.split(params)
    rng = np.random.default_rng(3)
    noise = jax.tree.map(lambda leaf: np.float32(0.1 * rng.normal(size=leaf.shape)), adapters)
    return model, jax.tree.map(np.add, adapters, noise), base


@partial(jax.jit, static_argnums=0)
def slope_of(model, adapters, base):
    """The loss, and its gradient by the adapters."""

    def total(adapters):
        return model.loss(adapter_trees.join(adapters, base), BATCH, MASK)[0]

    return jax.value_and_grad(total)(adapters)


@BOTH
def test_new_adapters_change_nothing(config):
    model = Decoder(config)
    params = drawn(model)
    with_adapters, all_params = lora.attach(model, params, LoRA(), jax.random.key(1))
    np.testing.assert_array_equal(logits(model, params), logits(with_adapters, all_params))
    a = np.asarray(all_params["layers"]["q"]["a"])
    bound = 1 / np.sqrt(a.shape[1])
    assert np.abs(a).max() <= bound and np.abs(a).max() > 0.9 * bound


@BOTH
def test_merged_gives_the_outputs_of_the_adapted(config):
    model, adapters, base = adapted(config)
    plain, merged = lora.merge(model, adapter_trees.join(adapters, base))
    assert plain == Decoder(config)
    found, expected = logits(plain, merged), logits(model, adapter_trees.join(adapters, base))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - logits(plain, base)).max() > 0.1
    # The formula, in float64.
    q = np.asarray(base["layers"]["q"]["kernel"], np.float64)
    a, b = (np.asarray(adapters["q"][leaf], np.float64) for leaf in "ab")
    np.testing.assert_allclose(
        merged["layers"]["q"]["kernel"], q + 8.0 / 4 * a @ b, rtol=1e-6, atol=1e-6
    )


@BOTH
def test_detached_is_the_base_in_the_same_arrays(config):
    """To unmerge is exact: no sum is undone, the base was never touched."""
    model, adapters, base = adapted(config)
    before = jax.tree.map(np.array, base)
    lora.merge(model, adapter_trees.join(adapters, base))
    plain, detached = lora.detach(model, adapter_trees.join(adapters, base))
    assert plain == Decoder(config)
    assert jax.tree.all(jax.tree.map(lambda found, given: found is given, detached, base))
    assert_same(detached, before)


@pytest.mark.parametrize(
    ("config", "settings"),
    [(LLAMA, LoRA()), (GPT2, LoRA(rank=2, alpha=3.0, targets=("q", "down")))],
)
def test_gradients_are_those_of_the_full_weights_projected(config, settings):
    """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW at W + s A B, with s = alpha / rank."""
    model, adapters, base = adapted(config, settings)
    _, found = slope_of(model, adapters, base)
    plain, merged = lora.merge(model, adapter_trees.join(adapters, base))
    full = jax.jit(jax.grad(lambda p: plain.loss(p, BATCH, MASK)[0]))(merged)
    for name, adapter in adapters.items():
        gradient = np.asarray(full["layers"][name]["kernel"], np.float64)
        a, b = (np.asarray(adapter[leaf], np.float64) for leaf in "ab")
        of_a, of_b = gradient @ b.transpose(0, 2, 1), a.transpose(0, 2, 1) @ gradient
        expected = {"a": settings.scale * of_a, "b": settings.scale * of_b}
        assert_close(found[name], expected, rtol=1e-3, atol=1e-6)
        assert np.abs(found[name]["a"]).max() > 1e-5


@BOTH
def test_training_moves_adapters_alone(config):
    """The optimiser's state holds adapters only, and no base parameter moves."""
    model, adapters, base = adapted(config)
    before, optimizer = jax.tree.map(np.array, base), optax.adam(1e-2)
    state = optimizer.init(adapters)
    assert count_parameters(state[0].mu) == count_parameters(adapters)

    @jax.jit
    def step(adapters, state, gradients):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state

    losses = []
    for _ in range(15):
        loss, gradients = slope_of(model, adapters, base)
        adapters, state = step(adapters, state, gradients)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.3
    assert_same(base, before)


@pytest.mark.parametrize(
    ("config", "compute"),
    [
        (GPT2, "float32"),
        (GEMMA3, "float32"),
        pytest.param(LLAMA, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_base_of_int8_or_bfloat16(config, compute):
    model = Decoder(config, compute=compute)
    params = drawn(model, scale=0.1)
    small, stored = quantise(model, params)
    assert stored["layers"]["up"]["kernel_int8"].dtype == jnp.int8
    assert "kernel" not in stored["layers"]["up"]
    error = np.abs(logits(small, stored) - logits(model, params)).max()
    # Each weight moves by up to 1/254 of the largest of its output.
    assert 0 < error < 0.05 * np.abs(logits(model, params)).max()
    small, stored = lora.attach(small, stored, LoRA(), jax.random.key(2))
    adapters, base = adapter_trees.split(stored)
    _, gradients = slope_of(small, adapters, base)
    assert np.abs(gradients["down"]["b"]).max() > 0
    assert gradients["down"]["b"].dtype == jnp.float32
    refusal(lambda: lora.merge(small, stored), "cannot be merged into int8")
    refusal(lambda: quantise(small, stored), "int8 weights already")


def test_rounding_to_int8():
    """Half a step at most, whatever the scale of an output; a zero output stays zero."""
    model = Decoder(GPT2)
    params = drawn(model)
    kernel = np.array(params["layers"]["q"]["kernel"])
    kernel[:, :, 0] = 0
    kernel[:, :, 1] *= 1e4
    params["layers"]["q"]["kernel"] = jnp.asarray(kernel)
    part = quantise(model, params)[1]["layers"]["q"]
    scale = np.asarray(part["kernel_scale"])[:, None]
    restored = np.asarray(part["kernel_int8"], np.float64) * scale
    assert np.all(np.abs(restored - kernel) <= 0.5001 * scale)
    assert np.all(restored[:, :, 0] == 0) and np.isfinite(restored).all()


def test_paper_adapters_on_llama_3():
    """POPri's "download 7 M floats": rank 4 on all projections of Llama 3 8B is 10.5 M."""
    model = Decoder(llama3_8b())
    params = jax.eval_shape(model.init, jax.random.key(0))
    adapted = jax.eval_shape(lambda p: lora.attach(model, p, LoRA(), jax.random.key(0))[1], params)
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert count_parameters(adapter_trees.split(adapted)[0]) == 32 * 4 * widths


def test_bad_uses():
    model, key = Decoder(GPT2), jax.random.key(0)
    params = drawn(model)
    both = lora.attach(model, params, LoRA(), key)
    for call, words in (
        (lambda: lora.attach(model, params, LoRA(targets=("gate",)), key), "none of the targets"),
        (lambda: lora.merge(model, params), "no adapters to merge"),
        (lambda: lora.attach(*both, LoRA(), key), "has adapters already"),
        (lambda: both[0].init(key), "has no random parameters"),
    ):
        refusal(call, words)
