"""Preference optimisation: the losses are the papers', the shared prompt changes nothing."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.preference import losses as module
from jaxpfl.text.preference import optimisation as preference
from jaxpfl.text.preference.groups import Groups, advantages, groups_of
from jaxpfl.text.preference.losses import Constants, Objective, dpo, ipo, log_ratio
from jaxpfl.text.preference.optimisation import Carried, PreferenceSettings, tune
from tests.refusals import refusal
from tests.text.preference.test_losses import by_numpy
from tests.trees import drawn

CONFIGS = {
    "gpt2": DecoderConfig("gpt2", 31, 16, 2, 2, positions=24, initializer_range=0.3),
    "llama": DecoderConfig("llama", 31, 16, 2, 4, kv_heads=2, positions=24, initializer_range=0.3),
}
SETTINGS = PreferenceSettings(
    tau=0.3, batch_size=4, learning_rate=0.01, final_learning_rate=0.003, multiple=8
)


@cache
def _model(name: str = "llama", key: int = 0) -> tuple[Decoder, Any]:
    """A tiny model whose adapters are not the identity."""
    plain = Decoder(CONFIGS[name])
    model, params = lora.attach(plain, drawn(plain, key), LoRA(2, 4.0), jax.random.key(key + 1))
    adapters, base = adapter_trees.split(params)
    rng = np.random.default_rng(key)
    adapters = jax.tree.map(lambda leaf: np.float32(0.2 * rng.normal(size=leaf.shape)), adapters)
    return model, adapter_trees.join(adapters, base)


def _ids(generator: np.random.Generator, most: int) -> np.ndarray:
    return generator.integers(0, 31, generator.integers(1, most + 1)).astype(np.int32)


def _pairs(number: int = 7, seed: int = 0) -> Groups:
    generator = np.random.default_rng(seed)
    prompts, *both = ([_ids(generator, most) for _ in range(number)] for most in (9, 7, 7))
    return groups_of(prompts, [*zip(*both, strict=True)], prompt_tokens=8, total_tokens=14)


def _groups() -> Groups:
    """Seven prompts with four responses each, one with three and one with two."""
    generator = np.random.default_rng(1)
    prompts = [_ids(generator, 9) for _ in range(7)]
    responses = [[_ids(generator, 7) for _ in range(4)] for _ in range(7)]
    responses[2][1] = responses[5][0] = responses[5][3] = np.zeros(0, np.int32)
    used = np.array([[len(response) > 0 for response in group] for group in responses])
    _, advantage = advantages(generator.normal(size=(7, 4)), used)
    return groups_of(prompts, responses, advantage, prompt_tokens=8, total_tokens=14)


@partial(jax.jit, static_argnums=0)
def _separately(model: Decoder, params: Any, copies: tuple[np.ndarray, ...]) -> jax.Array:
    """[N, G, T]: each response in a row of its own, after its own copy of the prompt."""
    tokens_MxL, place_NxGxT, is_token_NxGxT = copies
    hidden = model.hidden(params, tokens_MxL[:, :-1])
    log_p = jax.nn.log_softmax(model.logits(params, hidden))
    picked = jnp.take_along_axis(log_p, jnp.maximum(tokens_MxL, 0)[:, 1:, None], axis=-1)
    placed = jnp.take_along_axis(picked[:, :, 0], place_NxGxT.reshape(len(tokens_MxL), -1), axis=1)
    return jnp.where(is_token_NxGxT, placed.reshape(place_NxGxT.shape), 0.0)


def _copies(groups: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.long), "llama"])
def test_a_shared_prompt_is_as_good_as_a_copy_each(name):
    model, params = _model(name)
    pairs = _pairs()
    assert len(np.unique(np.sum(pairs.responses_NxGxT >= 0, axis=2))) > 2
    found = module.log_probabilities(model, params, pairs, microbatch_size=3, multiple=8)
    expected = _separately(model, params, _copies(pairs))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.all((found < 0) == (pairs.responses_NxGxT >= 0))


def test_end_of_text_counts_and_padding_does_not():
    model, params = _model()
    both = np.array([[[5, 6, 0], [5, 6, -1]]], np.int32)
    pairs = Groups(np.array([[3, 4]], np.int32), both)
    ((chosen, rejected),) = module.log_probabilities(model, params, pairs).sum(axis=2)
    ids = np.array([[3, 4, 5, 6]], np.int32)
    logits = jax.jit(lambda params: model.logits(params, model.hidden(params, ids)))(params)
    end = jax.nn.log_softmax(logits[0, -1])[0]
    assert float(chosen - rejected) == pytest.approx(float(end), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "tau", "logits"),
    [
        ("dpo", 0.3, 2**26),
        ("grpo", 0.3, 2**26),
        pytest.param("dpo", 0.31, 31 * 7 * 3, marks=pytest.mark.long),
        pytest.param("ipo", 0.3, 2**26, marks=pytest.mark.long),
    ],
)
def test_gradients_of_adapters_are_the_formulas(name, tau, logits, monkeypatch):
    """In one block of logits and in several (a new tau has a new program)."""
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", logits)
    (model, params), groups = _model(), _groups() if name == "grpo" else _pairs()
    (adapters, base), read = adapter_trees.split(params), _copies(groups)
    # The responses were written by a model that has moved since.
    written = _separately(model, jax.tree.map(lambda leaf: 0.9 * leaf, params), read)
    reference = _separately(*lora.detach(model, params), read)
    policy, pull = jax.vjp(
        lambda given: _separately(model, adapter_trees.join(given, base), read), adapters
    )
    objective = Objective(name, tau, 0.2)
    known = Constants(reference, written, groups.advantage_NxG)
    expected, slopes = by_numpy(objective, np.asarray(policy, np.float64), known, read[2])
    weight = jnp.full(len(groups), 1 / len(groups), jnp.float32)
    given = adapters, base, preference.rows(groups, 40), known, weight
    (_, found), found_gradients = preference._gradients(model, objective, *given)
    for metric, each in expected.items():
        assert float(found[metric]) == pytest.approx(np.mean(each), rel=1e-3) != 0
    gradients = pull(jnp.asarray(slopes / len(groups), jnp.float32))[0]
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradients))
    for ours, theirs in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * scale)


def _preferring(number: int, seed: int) -> Groups:
    """Chosen responses are of the tokens 1 .. 15, rejected ones of 16 .. 30."""
    generator = np.random.default_rng(seed)
    shape = (number, 5)
    prompt, *both = (generator.integers(*ends, shape) for ends in ((1, 31), (1, 16), (16, 31)))
    return Groups(prompt.astype(np.int32), np.stack(both, axis=1).astype(np.int32))


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
    start = drawn(plain, 3)
    model, params = lora.attach(plain, start, LoRA(4, 8.0), jax.random.key(4))
    settings = dataclasses.replace(SETTINGS, loss=loss, tau=0.1, batch_size=16, epochs=6)
    tuned = tune(model, params, _preferring(160, 0), settings, seed=0)
    held_out = _preferring(40, 1)
    reference = module.log_probabilities(plain, start, held_out)
    before = evaluate(module.log_probabilities(model, params, held_out), reference, settings)
    after = evaluate(module.log_probabilities(model, tuned.params, held_out), reference, settings)
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
    # One batch and one width, so that little is compiled.
    one_width = dict(batch_size=7, multiple=24)
    pairs, few = _pairs(), dataclasses.replace(SETTINGS, epochs=1, **one_width)
    bare, base = lora.detach(model, params)
    found = tune(model, params, pairs, few, seed=0).record
    policy = _separately(model, params, _copies(pairs))
    h = log_ratio(policy, _separately(bare, base, _copies(pairs)))
    assert found["loss"][0] == pytest.approx(float(jnp.mean(dpo(h, 0.3))), rel=1e-4)
    assert found["margin"][0] == pytest.approx(0.3 * float(jnp.mean(h)), rel=1e-3)
    assert found["accuracy"][0] == pytest.approx(float(jnp.mean(h > 0)))
    # GRPO takes the adapters that it is given for those that wrote the responses.
    grpo = dataclasses.replace(SETTINGS, loss="grpo", batch_size=7, multiple=40)
    found = tune(model, params, _groups(), grpo, seed=0).record
    assert found["clipped"][0] == 0 < found["clipped"][-1]
    assert found["kl"][0] > 0


@pytest.mark.long
@pytest.mark.parametrize("loss", ["dpo", "grpo"])
def test_microbatches_and_devices_change_nothing_but_rounding(loss):
    """Seven pairs or groups in batches of four: the last batch and microbatch are not full."""
    model, params = _model()
    pairs = _pairs() if loss == "dpo" else _groups()
    one_width = dataclasses.replace(SETTINGS, loss=loss, multiple=40)
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
    pairs = _pairs(24)
    settings = dataclasses.replace(SETTINGS, epochs=1, batch_size=8, microbatch_size=2)
    found = tune(model, params, pairs, settings, seed=0).record
    assert found["shapes"] <= 3
    wide = dataclasses.replace(settings, multiple=24)
    whole = tune(model, params, pairs, wide, seed=0).record
    assert whole["shapes"] == 1
    tokens = sum(np.sum(a >= 0) for a in (pairs.prompt_NxP, pairs.responses_NxGxT))
    assert whole["padding"] == pytest.approx(1 - tokens / (24 * 24))
    assert 0 < found["padding"] < whole["padding"]


def test_prompts_lose_their_beginning_and_responses_their_end():
    ids = np.arange(10, dtype=np.int32)
    pairs = groups_of([ids], [(ids, ids[:2])], prompt_tokens=4, total_tokens=7)
    np.testing.assert_array_equal(pairs.prompt_NxP, [[6, 7, 8, 9]])
    rest = [-1] * 5
    np.testing.assert_array_equal(pairs.responses_NxGxT, [[[0, 1, 2, *rest], [0, 1, -1, *rest]]])


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


@pytest.mark.parametrize("ids", [[31], [3, 10**6], [-2], [3, -5]])
@pytest.mark.parametrize("place", ["prompt", "response"])
def test_ids_beyond_the_vocabulary_are_refused_and_not_read_as_others(place, ids):
    model = Decoder(CONFIGS["llama"])
    given = {"prompt": np.array([[3, 4]], np.int32), "response": np.array([[[5], [6]]], np.int32)}
    shape = given[place].shape[:-1]
    given[place] = np.broadcast_to(np.array(ids, np.int32), (*shape, len(ids)))
    groups = Groups(given["prompt"], given["response"])
    adapted = dataclasses.replace(model, lora=LoRA())
    for call in (
        lambda: module.log_probabilities(model, {}, groups),
        lambda: tune(adapted, {}, groups, seed=0),
    ):
        refusal(call, "groups must have token ids in 0 .. 30")
