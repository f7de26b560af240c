"""Preference optimisation: the losses are the papers', the shared prompt changes nothing."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpfl.errors import InputError
from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.preference import log_probabilities as module
from jaxpfl.text.preference import optimisation as preference
from jaxpfl.text.preference.log_probabilities import log_probabilities
from jaxpfl.text.preference.optimisation import (
    Carried,
    PreferenceSettings,
    dpo,
    ipo,
    log_ratio,
    tune,
)
from jaxpfl.text.preference.pairs import Pairs, pairs_of

CONFIGS = {
    "gpt2": DecoderConfig("gpt2", 31, 16, 2, 2, positions=24, initializer_range=0.3),
    "llama": DecoderConfig("llama", 31, 16, 2, 4, kv_heads=2, positions=24, initializer_range=0.3),
}
SETTINGS = PreferenceSettings(
    tau=0.3, batch_size=4, learning_rate=0.01, final_learning_rate=0.003, multiple=8
)


def _model(name: str = "llama", key: int = 0) -> tuple[Decoder, Any]:
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


def _pairs(number: int = 7, seed: int = 0) -> Pairs:
    generator = np.random.default_rng(seed)
    return pairs_of(
        *([_ids(generator, most) for _ in range(number)] for most in (9, 7, 7)),
        prompt_tokens=8,
        total_tokens=14,
    )


@partial(jax.jit, static_argnums=0)
def _separately(model: Decoder, params: Any, pairs: tuple[np.ndarray, ...]) -> jax.Array:
    """[N, 2]: each response in a row of its own, after its own copy of the prompt."""
    tokens_2NxL, is_target_2NxL = pairs
    hidden = model.hidden(params, tokens_2NxL[:, :-1])
    log_p = jax.nn.log_softmax(model.logits(params, hidden))
    picked = jnp.take_along_axis(log_p, jnp.maximum(tokens_2NxL, 0)[:, 1:, None], axis=-1)
    summed = jnp.sum(jnp.where(is_target_2NxL[:, 1:], picked[:, :, 0], 0.0), axis=-1)
    return summed.reshape(-1, 2)


def _copies(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of prompt and response [2 N, 15], and which of them belong to the response."""
    tokens, is_target = [], []
    for prompt, *responses in zip(
        pairs.prompt_NxP, pairs.chosen_NxT, pairs.rejected_NxT, strict=True
    ):
        prompt = prompt[prompt >= 0]
        for response in responses:
            response = response[response >= 0]
            rest = 15 - len(prompt) - len(response)
            tokens.append([*prompt, *response, *[-1] * rest])
            is_target.append([False] * len(prompt) + [True] * len(response) + [False] * rest)
    return np.array(tokens, np.int32), np.array(is_target)


def _numpy_loss(name: str, policy: np.ndarray, reference: np.ndarray, tau: float) -> Any:
    """Loss [N] and its gradient by the policy's [N, 2], in float64."""
    h = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    if name == "dpo":
        x = tau * h
        # -log(1 / (1 + exp(-x))), by the side on which nothing overflows.
        tail = np.log1p(np.exp(-np.abs(x)))
        loss = np.where(x > 0, tail, tail - x)
        e = np.exp(-np.abs(x))
        slope = -tau * np.where(x > 0, e / (1 + e), 1 / (1 + e))
    else:
        loss, slope = (h - 1 / (2 * tau)) ** 2, 2 * (h - 1 / (2 * tau))
    return loss, np.stack([slope, -slope], axis=1)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
@pytest.mark.parametrize("tau", [0.01, 0.5])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_losses_and_gradients_are_the_formulas(name, tau, scale):
    generator = np.random.default_rng(0)
    policy, reference = generator.normal(size=(2, 50, 2)).astype(np.float32) * np.float32(scale)
    # Where nothing has moved, and the largest margins of either sign.
    policy[0] = reference[0]
    policy[1:3], reference[1:3] = [[1e4, 0], [0, 1e4]], 0
    expected, slopes = _numpy_loss(name, policy.astype(float), reference.astype(float), tau)
    loss = {"dpo": dpo, "ipo": ipo}[name]

    def total(policy, reference):
        return jnp.sum(loss(log_ratio(policy, reference), tau))

    given = jnp.asarray(policy), jnp.asarray(reference)
    found = loss(log_ratio(*given), tau)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * tau * scale)
    gradients = jax.grad(total, (0, 1))(*given)
    np.testing.assert_allclose(gradients[0], slopes, rtol=1e-4, atol=1e-6 * scale)
    np.testing.assert_allclose(gradients[1], -slopes, rtol=1e-4, atol=1e-6 * scale)
    assert np.all(np.isfinite(gradients[0]))
    if name == "dpo":
        assert float(found[0]) == pytest.approx(np.log(2), rel=1e-6)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.long), "llama"])
def test_a_shared_prompt_is_as_good_as_a_copy_each(name):
    model, params = _model(name)
    pairs = _pairs()
    assert len(np.unique(np.sum(pairs.chosen_NxT >= 0, axis=1))) > 2
    found = log_probabilities(model, params, pairs, microbatch_size=3, multiple=8)
    expected = _separately(model, params, _copies(pairs))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.all(found < 0)


def test_end_of_text_counts_and_padding_does_not():
    model, params = _model()
    prompt, ended = np.array([[3, 4]], np.int32), np.array([[5, 6, 0]], np.int32)
    pairs = Pairs(prompt, ended, np.array([[5, 6, -1]], np.int32))
    ((chosen, rejected),) = log_probabilities(model, params, pairs)
    hidden = model.hidden(params, jnp.asarray([[3, 4, 5, 6]]))
    end = jax.nn.log_softmax(model.logits(params, hidden)[0, -1])[0]
    assert float(chosen - rejected) == pytest.approx(float(end), rel=1e-4)


def _loss_by_chain_rule(name: str, model: Decoder, params: Any, pairs: Pairs, tau: float) -> Any:
    """Mean loss, and its gradient by the adapters: the formulas' slopes in float64 numpy times
    the gradients of log-probabilities of separate rows."""
    adapters, base = adapter_trees.split(params)
    bare, _ = lora.detach(model, params)
    reference = np.asarray(_separately(bare, base, _copies(pairs)), np.float64)

    def policy(adapters):
        return _separately(model, adapter_trees.join(adapters, base), _copies(pairs))

    found, pull = jax.vjp(policy, adapters)
    loss, slopes = _numpy_loss(name, np.asarray(found, np.float64), reference, tau)
    return np.mean(loss), pull(jnp.asarray(slopes / len(pairs), jnp.float32))[0]


@pytest.mark.parametrize(
    ("name", "tau", "logits"),
    [
        ("dpo", 0.3, 2**26),
        pytest.param("dpo", 0.31, 31 * 7 * 3, marks=pytest.mark.long),
        pytest.param("ipo", 0.3, 2**26, marks=pytest.mark.long),
    ],
)
def test_gradients_of_adapters_are_the_formulas(name, tau, logits, monkeypatch):
    """In one block of logits and in several (a new tau has a new program)."""
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", logits)
    model, params = _model()
    pairs = _pairs()
    loss, gradients = _loss_by_chain_rule(name, model, params, pairs, tau)
    bare, base = lora.detach(model, params)
    reference = log_probabilities(bare, base, pairs, multiple=8)
    read = preference.rows(pairs, 24, 8)
    (found, _), found_gradients = preference._gradients(
        model,
        name,
        tau,
        adapter_trees.split(params)[0],
        base,
        read,
        reference,
        jnp.full(len(pairs), 1 / len(pairs), jnp.float32),
    )
    assert float(found) == pytest.approx(loss, rel=1e-4)
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradients))
    for ours, theirs in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale)


def _preferring(number: int, seed: int) -> Pairs:
    """Chosen responses are of the tokens 1 .. 15, rejected ones of 16 .. 30."""
    generator = np.random.default_rng(seed)
    shape = (number, 5)
    return Pairs(
        generator.integers(1, 31, shape).astype(np.int32),
        generator.integers(1, 16, shape).astype(np.int32),
        generator.integers(16, 31, shape).astype(np.int32),
    )


def evaluate(policy, reference, settings):
    """Means over the pairs of "loss", "margin" and "accuracy", as in `Tuned.record`."""
    h_N = log_ratio(policy, reference)
    loss_N = {"dpo": dpo, "ipo": ipo}[settings.loss](h_N, settings.tau)
    return {
        "loss": float(jnp.mean(loss_N)),
        "margin": settings.tau * float(jnp.mean(h_N)),
        "accuracy": float(jnp.mean(h_N > 0)),
    }


@pytest.mark.long
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_tuning_raises_the_margin_of_held_out_pairs(loss):
    plain = Decoder(CONFIGS["gpt2"])
    start = plain.init(jax.random.key(3))
    model, params = lora.attach(plain, start, LoRA(4, 8.0), jax.random.key(4))
    settings = dataclasses.replace(SETTINGS, loss=loss, tau=0.1, batch_size=16, epochs=6)
    tuned = tune(model, params, _preferring(160, 0), settings, seed=0)
    held_out = _preferring(40, 1)
    reference = log_probabilities(plain, start, held_out)
    before = evaluate(log_probabilities(model, params, held_out), reference, settings)
    after = evaluate(log_probabilities(model, tuned.params, held_out), reference, settings)
    assert before["margin"] == pytest.approx(0, abs=1e-5)
    assert after["margin"] > (0.5 if loss == "dpo" else 0.25)
    assert after["accuracy"] > 0.85
    assert after["loss"] < 0.7 * before["loss"]
    assert tuned.record["loss"][-1] < tuned.record["loss"][0]
    assert len(tuned.record["margin"]) == tuned.record["steps"] == 60
    # The base is where it was, to the bit, and so is what was given.
    for given, kept in zip(
        jax.tree.leaves(start), jax.tree.leaves(lora.detach(model, tuned.params)[1]), strict=True
    ):
        np.testing.assert_array_equal(given, kept)
    np.testing.assert_array_equal(adapter_trees.split(params)[0]["q"]["b"], 0)


def test_the_reference_is_the_model_without_its_adapters():
    model, params = _model()
    pairs, few = _pairs(), dataclasses.replace(SETTINGS, epochs=1, batch_size=7)
    bare, base = lora.detach(model, params)
    separate = _separately(bare, base, _copies(pairs))
    found = tune(model, params, pairs, few, seed=0).record
    given = tune(model, params, pairs, few, seed=0, reference=np.asarray(separate)).record
    np.testing.assert_allclose(found["loss"], given["loss"], rtol=1e-4)
    policy = _separately(model, params, _copies(pairs))
    h = log_ratio(policy, separate)
    assert found["margin"][0] == pytest.approx(0.3 * float(jnp.mean(h)), rel=1e-3)
    assert found["accuracy"][0] == pytest.approx(float(jnp.mean(h > 0)))


@pytest.mark.long
def test_microbatches_and_devices_change_nothing_but_rounding():
    """Seven pairs in batches of four: the last batch and microbatch are not full."""
    model, params = _model()
    pairs, one_width = _pairs(), dataclasses.replace(SETTINGS, multiple=24)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    whole = tune(model, params, pairs, one_width, seed=0)
    again = tune(model, params, pairs, one_width, seed=0)
    moved = 0.0
    for first, second, start in zip(
        *(jax.tree.leaves(each) for each in (whole.params, again.params, params)), strict=True
    ):
        np.testing.assert_array_equal(first, second)
        moved = max(moved, float(jnp.max(jnp.abs(first - start))))
    assert moved > 0.01
    for size, devices in ((3, None), (None, mesh), (3, mesh)):
        settings = dataclasses.replace(one_width, microbatch_size=size)
        found = tune(model, params, pairs, settings, seed=0, mesh=devices)
        np.testing.assert_allclose(found.record["loss"], whole.record["loss"], rtol=1e-4)
        for ours, theirs in zip(
            jax.tree.leaves(found.params), jax.tree.leaves(whole.params), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=2e-3 * moved)
    other = tune(model, params, pairs, one_width, seed=1)
    assert other.record["loss"] != whole.record["loss"]


def test_a_carried_optimiser_goes_on_where_it_was():
    """Two tunings of one step each are one of two steps; with a fresh optimiser they are not."""
    model, params = _model()
    # One batch and one width, so that the order of the pairs changes nothing but rounding.
    pairs, all_of_them = _pairs(), dataclasses.replace(SETTINGS, batch_size=7, multiple=24)
    whole = tune(model, params, pairs, all_of_them, seed=0)
    once = dataclasses.replace(all_of_them, epochs=1)
    fresh = once.optimizer(2).init(adapter_trees.split(params)[0])
    first = tune(model, params, pairs, once, seed=0, carried=Carried(fresh, 2))
    second = tune(model, first.params, pairs, once, seed=0, carried=Carried(first.optimizer, 2))
    # What was given can be given again.
    tune(model, first.params, pairs, once, seed=0, carried=Carried(first.optimizer, 2))
    alone = tune(model, first.params, pairs, once, seed=0)

    def difference(found):
        leaves = (jax.tree.leaves(adapter_trees.split(each.params)[0]) for each in (found, whole))
        return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*leaves, strict=True))

    assert difference(second) < 1e-5
    assert difference(alone) > 1e-3


@pytest.mark.long
def test_few_shapes_and_little_padding():
    model, params = _model()
    pairs, zeros = _pairs(24), np.zeros((24, 2), np.float32)
    settings = dataclasses.replace(SETTINGS, epochs=1, batch_size=8, microbatch_size=2)
    found = tune(model, params, pairs, settings, seed=0, reference=zeros).record
    assert found["shapes"] <= 3
    wide = dataclasses.replace(settings, multiple=24)
    whole = tune(model, params, pairs, wide, seed=0, reference=zeros).record
    assert whole["shapes"] == 1
    tokens = sum(np.sum(a >= 0) for a in (pairs.prompt_NxP, pairs.chosen_NxT, pairs.rejected_NxT))
    assert whole["padding"] == pytest.approx(1 - tokens / (24 * 24))
    assert 0 < found["padding"] < whole["padding"]


def test_prompts_lose_their_beginning_and_responses_their_end():
    ids = np.arange(10, dtype=np.int32)
    pairs = pairs_of([ids], [ids], [ids[:2]], prompt_tokens=4, total_tokens=7)
    np.testing.assert_array_equal(pairs.prompt_NxP, [[6, 7, 8, 9]])
    np.testing.assert_array_equal(pairs.chosen_NxT, [[0, 1, 2]])
    np.testing.assert_array_equal(pairs.rejected_NxT, [[0, 1]])


def test_bad_input_is_named():
    model, params = _model()
    pairs = _pairs()
    row = np.array([[1, 2]], np.int32)
    wrong_mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    for wrong, message in (
        (lambda: Pairs(*[np.zeros((0, 1), np.int32)] * 3), "preference pair"),
        (lambda: pairs_of([], [], []), "preference pair"),
        (lambda: Pairs(row, row, np.repeat(row, 2, axis=0)), "rejected_NxT must be .*1 pairs"),
        (lambda: Pairs(row.astype(np.int64), row, row), "prompt_NxP must be int32 .* found int64"),
        (
            lambda: log_probabilities(model, params, Pairs(row, np.ones((1, 24), np.int32), row)),
            "pair 0 has 26 tokens .* at most 24",
        ),
        (lambda: tune(*lora.detach(model, params), pairs, seed=0), "no adapters to tune"),
        (
            lambda: tune(model, params, pairs, seed=0, reference=np.zeros((3, 2), np.float32)),
            "reference .*7 pairs",
        ),
        (lambda: tune(model, params, pairs, seed=0, mesh=wrong_mesh), "axis 'data'"),
        (lambda: PreferenceSettings(tau=0.0), "tau must be positive"),
        (lambda: PreferenceSettings(loss="kto"), "loss must be one of 'dpo', 'ipo'"),
        (lambda: PreferenceSettings(dtype="float16"), "dtype must be one of"),
        (
            lambda: pairs_of([row[0]], [row[0]], [row[0]], prompt_tokens=4, total_tokens=4),
            "total_tokens must be above prompt_tokens",
        ),
    ):
        with pytest.raises(InputError, match=message):
            wrong()


@pytest.mark.long
def test_recomputing_changes_nothing_and_bfloat16_little():
    model, params = _model()
    settings = dataclasses.replace(SETTINGS, multiple=24, epochs=1)
    losses = [
        tune(model, params, _pairs(), changed, seed=0).record["loss"]
        for changed in (
            settings,
            dataclasses.replace(settings, remat=True),
            dataclasses.replace(settings, dtype="bfloat16"),
        )
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=0.1)
    assert losses[2] != losses[0]
