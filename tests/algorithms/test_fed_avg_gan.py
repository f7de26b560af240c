"""DP-FedAvg-GAN against a plain loop over clients and batches, and what its door guarantees."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms.fed_avg_gan import CriticTraining, train_generator
from jaxpfl.errors import InputError
from jaxpfl.experiments import loop
from jaxpfl.federated import Examples, client_mesh, private_sum
from jaxpfl.federated.private_sum import _accumulate
from jaxpfl.models import GAN
from jaxpfl.privacy import plan as plan_module
from jaxpfl.privacy.keys import noise_root, round_keys, training_root
from tests.plans import flat_plan

GAN_4 = GAN((4, 4, 1), width=0.02, noise=4)
SIZES = (4, 7, 4, 0, 12, 3)
CLIP = 0.05
RATE = 0.01
CLIENT, GENERATOR, SERVER = optax.sgd(RATE), optax.sgd(0.02), optax.sgd(1.0)


def population():
    rng = np.random.default_rng(0)
    return jp.data.from_clients(
        {
            f"client {i}": {"image": rng.integers(0, 256, (size, 4, 4, 1)).astype(np.uint8)}
            for i, size in enumerate(SIZES)
        }
    )


def plan_of(noise=0.0, **changes):
    settings = dict(population=len(SIZES), clients_per_round=len(SIZES), rounds=4, clip_norm=CLIP)
    if not noise:
        return jp.Plan.without_privacy(**{**settings, **changes})
    settings = {**settings, "clients_per_round": 3, "accountant": "rdp", **changes}
    return flat_plan(noise_multiplier=noise, delta=1e-3, **settings)


def algorithm(plan=None, **changes):
    # One rung: one shape, one compilation for all of this file.
    spec = jp.CohortSpec(batch_size=4, max_examples=8, ladder=(2,), clients_per_bucket=4)
    settings = dict(client=CLIENT, generator=GENERATOR, server=SERVER, generator_steps=2)
    settings = {**settings, "generator_batch": 4, "cohort": spec, **changes}
    return jp.algorithms.fed_avg_gan(GAN_4, plan=plan or plan_of(), **settings)


def cohort_of(chosen, index=0, clients=None, held=None):
    clients = np.arange(len(SIZES)) if clients is None else clients
    held = population() if held is None else held
    return list(
        jp.data.pack(held, clients, chosen.cohort, seed=3, round=index, shards=chosen.shards)
    )


def keys(index=0):
    return round_keys(training_root(0), noise_root(reproducible_seed=0), index)


def run(chosen, rounds=2):
    state, metrics = chosen.init(jax.random.key(0)), []
    for index in range(rounds):
        state, public = chosen.step(state, cohort_of(chosen, index), keys(index))
        metrics.append(jax.device_get(public))
    return jax.device_get(state), metrics


def close(found, expected, rtol=1e-4, atol=1e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected
    )


# Made once: every number of rows is a compilation already.
slope, generate = jax.jit(jax.grad(GAN_4.critic_loss, has_aux=True)), jax.jit(GAN_4.generate)


def client_by_hand(params, bucket, slot, key):
    """One client's change: batch after batch, real rows alone, plain SGD and plain averages."""
    critic = jax.tree.map(np.asarray, params["critic"])
    start = critic
    words = jax.random.bits(jax.random.fold_in(key, bucket.client[slot]), (2,), jnp.uint32)
    draws = jax.random.wrap_key_data(words, impl="threefry2x32")
    for step in range(bucket.mask.shape[1]):
        rows = bucket.mask[slot, step]
        if not rows.any():
            continue
        noise_key, share_key = jax.random.split(jax.random.fold_in(draws, step))
        z = jax.random.normal(noise_key, (4, GAN_4.noise), jnp.float32)[rows]
        share = jax.random.uniform(share_key, (4,), jnp.float32)[rows]
        image = bucket.batches["image"][slot, step][rows].astype(np.float32)
        image = image / np.float32(127.5) - np.float32(1)
        everyone = np.ones(rows.sum(), bool)
        drawn = generate(params["generator"], z, everyone)
        gradient, (mean, variance) = slope(critic, drawn, image, everyone, share)
        critic = jax.tree.map(lambda p, g: p - np.float32(RATE) * np.asarray(g), critic, gradient)
        moving = critic["normalisation"]
        for name, values in (("mean", mean), ("variance", variance)):
            for value in np.asarray(values):
                moving[name] = np.float32(0.999) * moving[name] + np.float32(0.001) * value
    return jax.tree.map(np.subtract, critic, start)


def norm(tree):
    return np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in jax.tree.leaves(tree)))


def test_a_round_is_what_a_plain_loop_gives():
    """Clipped, unweighted, over the planned number; then the generator against the NEW critic."""
    chosen = algorithm()
    state = chosen.init(jax.random.key(0))
    before = jax.device_get(chosen.params(state))
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), before["critic"])
    norms = []
    for bucket in cohort_of(chosen):
        for slot in np.flatnonzero(bucket.weight):
            delta = client_by_hand(before, bucket, slot, keys().train)
            norms.append(norm(delta))
            factor = min(1.0, CLIP / max(norms[-1], 1e-30))
            total = jax.tree.map(lambda t, d, f=factor: t + f * d, total, delta)
    assert min(norms) == 0.0  # the client without images
    assert sorted(norms)[1] > CLIP / 100
    assert max(norms) > CLIP  # the clip is at work
    critic = jax.tree.map(lambda p, t: p + t / len(SIZES), before["critic"], total)
    state, metrics = chosen.step(state, cohort_of(chosen), keys())
    after = jax.device_get(chosen.params(state))
    close(after["critic"], critic, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(metrics["update_norm"], norm(total) / len(SIZES), rtol=1e-4)
    moved = after["critic"]["normalisation"]["mean"] - before["critic"]["normalisation"]["mean"]
    assert np.abs(moved).max() > 0

    words = jax.random.bits(jax.random.fold_in(keys().train, 2**32 - 1), (2,), jnp.uint32)
    draws = jax.random.wrap_key_data(words, impl="threefry2x32")
    generator, losses = before["generator"], []
    generator_slope = jax.jit(jax.value_and_grad(GAN_4.generator_loss))
    for step in range(2):
        z = jax.random.normal(jax.random.fold_in(draws, step), (4, GAN_4.noise), jnp.float32)
        loss, gradient = generator_slope(generator, after["critic"], z)
        generator = jax.tree.map(lambda p, g: p - np.float32(0.02) * g, generator, gradient)
        losses.append(float(loss))
    close(after["generator"], generator)
    np.testing.assert_allclose(metrics["generator_loss"], np.mean(losses), rtol=1e-4)
    assert metrics["generator_left_out"] == 0


@pytest.mark.parametrize(
    ("devices", "chunk"), [(1, 4), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_layout_does_not_change_the_training(devices, chunk):
    """vmap = loop, 2 devices = 1."""
    reference, _ = run(algorithm(mesh=client_mesh(1), chunk=1))
    found, _ = run(algorithm(mesh=client_mesh(devices), chunk=chunk))
    close(found.critic, reference.critic, rtol=1e-3, atol=1e-5)
    close(found.generator, reference.generator, rtol=1e-3, atol=1e-5)


def test_same_keys_give_the_same_bits_and_the_hash_tells():
    first, second = run(algorithm(plan_of(noise=1.0))), run(algorithm(plan_of(noise=1.0)))
    jax.tree.map(np.testing.assert_array_equal, first[0], second[0])
    np.testing.assert_array_equal(first[1][1]["output_hash"], second[1][1]["output_hash"])
    assert not np.array_equal(first[1][0]["output_hash"], first[1][1]["output_hash"])


def test_removing_any_client_moves_the_sum_by_at_most_the_clip_norm():
    """TRUST 16: moving statistics included, whatever the images: white, huge, NaN."""
    chosen = algorithm()
    params = jax.device_get(chosen.params(chosen.init(jax.random.key(0))))
    rng = np.random.default_rng(0)
    kinds = (
        np.ones((8, 4, 4, 1)),
        1e6 * rng.normal(size=(8, 4, 4, 1)),
        1e20 * np.ones((3, 4, 4, 1)),
        np.full((5, 4, 4, 1), np.nan),
        rng.random((1, 4, 4, 1)),
    )
    held = jp.data.from_clients(
        {f"client {i}": {"image": kind.astype(np.float32)} for i, kind in enumerate(kinds)}
    )
    door = private_sum(CriticTraining(GAN_4, CLIENT), plan_of(), params["critic"])

    def released(clients):
        buckets = cohort_of(chosen, clients=np.array(clients), held=held)
        return jax.device_get(door(params, buckets, door.init(), keys())[0])

    everyone = released(range(5))
    for removed in range(5):
        less = released([client for client in range(5) if client != removed])
        moved = norm(jax.tree.map(lambda a, b: np.float64(a) - b, everyone, less))
        assert moved <= CLIP * (1 + 1e-5)
        # What is not finite counts as zero; another packing rounds otherwise.
        assert (moved < 1e-6 * CLIP) == (removed in (2, 3))
    alone = released([1])
    assert np.abs(alone["normalisation"]["variance"]).max() > 0  # clipped with the rest
    np.testing.assert_allclose(norm(alone), CLIP, rtol=1e-5)


def test_rounds_without_images_are_noise_only():
    """TRUST 1, 24: no client, or one without images: the critic moves by noise alone."""
    states = []
    for clients in ([], [3]):
        chosen = algorithm(plan_of(noise=1.0))
        state = chosen.init(jax.random.key(0))
        cohort = cohort_of(chosen, clients=np.array(clients, int))
        state, metrics = chosen.step(state, cohort, keys())
        assert 0 < metrics["update_norm"] < 100 * CLIP
        states.append(jax.device_get(chosen.params(state)))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(states[0]))


def test_weight_decay_of_the_optimiser_moves_neither_statistics_nor_an_idle_client():
    params = GAN_4.init(jax.random.key(0))
    training = jax.jit(CriticTraining(GAN_4, optax.adamw(0.1, weight_decay=0.5)))
    mask = np.zeros((2, 4), bool)
    blank = np.full((2, 4, 4, 4, 1), np.nan, np.float32)
    idle = training(params, Examples({"image": blank}, mask, np.int32(2)), keys().train)
    assert norm(idle) == 0.0
    mask[0, :2] = True
    one = np.zeros_like(blank)
    delta = training(params, Examples({"image": one}, mask, np.int32(2)), keys().train)
    # Two batches, drawn and real, whose variance is nearly 0: 1 - 0.999^2.
    assert np.abs(delta["normalisation"]["variance"] + 0.002).max() < 0.001
    assert norm(delta["hidden"]) > 0.1


def test_a_generator_step_that_is_not_finite_is_left_out():
    chosen = algorithm(generator_steps=3)
    state = chosen.init(jax.random.key(0))
    before = jax.device_get(state.generator)
    broken = jax.tree.map(lambda leaf: leaf.at[...].set(jnp.inf), state.critic)
    state, metrics = chosen.step(state._replace(critic=broken), [], keys())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.generator), before)
    assert metrics["generator_left_out"] == 3
    assert metrics["generator_loss"] == 0


def test_the_generator_waits_for_its_turn():
    chosen = algorithm(generator_every=2)
    state = chosen.init(jax.random.key(0))
    held = [jax.device_get(state.generator)]
    for index in range(2):
        state, _ = chosen.step(state, cohort_of(chosen, index), keys(index))
        held.append(jax.device_get(state.generator))
    jax.tree.map(np.testing.assert_array_equal, held[1], held[0])
    assert norm(jax.tree.map(np.subtract, held[2], held[1])) > 0


def test_settings_that_are_numbers_compile_nothing_new():
    run(algorithm(plan_of(noise=1.0)), rounds=1)
    sizes = _accumulate._cache_size(), train_generator._cache_size()
    other = plan_of(noise=2.0, clip_norm=0.2, clients_per_round=2)
    run(algorithm(other, generator_steps=5, generator_every=2), rounds=2)
    assert (_accumulate._cache_size(), train_generator._cache_size()) == sizes


def test_start_is_copied_and_checked():
    start = GAN_4.init(jax.random.key(5))
    chosen = algorithm(start=start)
    state = chosen.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(chosen.params(state)), start)
    chosen.step(state, [], keys())
    assert norm(start) > 0  # not donated
    with pytest.raises(InputError, match="start"):
        algorithm(start={"critic": start["critic"]})
    with pytest.raises(InputError, match="generator_every"):
        algorithm(generator_every=0)


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """TRUST 33: crash in the middle of a round, resume: arrays and metrics of the straight run."""

    def looped(folder: Path, resume: bool) -> loop.Result:
        (tmp_path / folder).mkdir(exist_ok=True)
        return loop.Loop(
            algorithm(plan_of(noise=1.0)),
            population(),
            directory=tmp_path / folder,
            ledger=tmp_path / folder / "ledger.jsonl",
            budget=None,
            seed=0,
            reproducible_noise=True,
            tracking=loop.Tracking(checkpoint_every=2, shown=False),
            resume=resume,
            config={},
            label="fed_avg_gan",
        ).run()

    straight = looped(Path("straight"), False)
    real = plan_module.round_keys

    def crashing(train, noise, number):
        if number == 4:
            raise RuntimeError("crash")
        return real(train, noise, number)

    with monkeypatch.context() as patched:
        patched.setattr(plan_module, "round_keys", crashing)
        with pytest.raises(RuntimeError, match="crash"):
            looped(Path("broken"), False)
    resumed = looped(Path("broken"), True)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, straight.params)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (
            tmp_path / "straight" / name
        ).read_bytes()
