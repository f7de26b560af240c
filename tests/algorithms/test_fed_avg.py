"""DP-FedAvg against a plain loop in numpy, and its server optimisers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms.fed_avg import fingerprint
from jaxpfl.federated import client_mesh, optimizer
from jaxpfl.privacy.keys import noise_root, round_keys, training_root
from tests.federated.test_local_training import DIM, LinearModel
from tests.plans import flat_plan

SIZES = (1, 7, 4, 0, 12, 3)
CLIP = 0.5


def population():
    rng = np.random.default_rng(0)
    return jp.data.from_clients(
        {
            f"client {i}": {
                "x": rng.normal(size=(size, DIM)).astype(np.float32),
                "y": rng.normal(size=size).astype(np.float32),
            }
            for i, size in enumerate(SIZES)
        }
    )


def algorithm(server, **changes):
    plan = changes.pop("plan", None) or jp.Plan.without_privacy(
        population=len(SIZES), clients_per_round=len(SIZES), rounds=3, clip_norm=CLIP
    )
    spec = jp.CohortSpec(batch_size=4, max_examples=8, clients_per_bucket=4)
    return jp.algorithms.fed_avg(
        LinearModel(), client=optax.sgd(0.1), server=server, plan=plan, cohort=spec, **changes
    )


def cohort_of(algorithm, index, clients=None):
    everyone = np.arange(len(SIZES)) if clients is None else clients
    return list(
        jp.data.pack(
            population(), everyone, algorithm.cohort, seed=3, round=index, shards=algorithm.shards
        )
    )


def run(algorithm, rounds=3):
    roots = training_root(0), noise_root(reproducible_seed=0)
    state, metrics = algorithm.init(roots[0]), []
    for index in range(rounds):
        state, public = algorithm.step(
            state, cohort_of(algorithm, index), round_keys(*roots, index)
        )
        metrics.append(jax.device_get(public))
    return jax.device_get(algorithm.params(state)), metrics


def by_hand(momentum, rounds=3):
    """Federated averaging in float64, client by client, batch by batch."""
    chosen = algorithm(optax.sgd(1.0))
    weights, velocity = np.zeros(DIM + 1), np.zeros(DIM + 1)
    for index in range(rounds):
        total = np.zeros(DIM + 1)
        for bucket in cohort_of(chosen, index):
            for slot in np.flatnonzero(bucket.weight):
                local = weights.copy()
                for step in range(bucket.mask.shape[1]):
                    rows = bucket.mask[slot, step]
                    if not rows.any():
                        continue
                    x = bucket.batches["x"][slot, step][rows].astype(np.float64)
                    y = bucket.batches["y"][slot, step][rows]
                    error = x @ local[:DIM] + local[DIM] - y
                    local -= 0.1 * np.append(x.T @ error, error.sum()) / len(y)
                delta = local - weights
                total += delta * min(1.0, CLIP / max(np.linalg.norm(delta), 1e-30))
        velocity = momentum * velocity + total / len(SIZES)
        weights = weights + (momentum * velocity + total / len(SIZES) if momentum else velocity)
    return weights


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounds_are_what_a_plain_loop_gives(momentum):
    """Unweighted clipped mean over the PLANNED number of clients; Nesterov on the server."""
    server = optax.sgd(1.0, momentum=momentum, nesterov=True) if momentum else optax.sgd(1.0)
    params, _ = run(algorithm(server))
    expected = by_hand(momentum)
    np.testing.assert_allclose(params["w"], expected[:DIM], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params["b"], expected[DIM], rtol=1e-5, atol=1e-6)


def test_denominator_is_the_plans_and_not_the_cohorts():
    """TRUST 15, 25: half the clients do not come; the sum is still divided by the plan's n."""
    chosen = algorithm(optax.sgd(1.0))
    keys = round_keys(training_root(0), noise_root(reproducible_seed=0), 0)
    states = {}
    for name, clients in (("one", np.array([4])), ("two", np.array([4, 3]))):
        state = chosen.init(jax.random.key(0))
        state, _ = chosen.step(state, cohort_of(chosen, 0, clients), keys)
        states[name] = np.asarray(chosen.params(state)["w"])
    # Client 3 is empty: it counts nothing and changes no denominator.
    np.testing.assert_array_equal(states["one"], states["two"])


def test_all_clients_empty_is_a_noise_only_round():
    """TRUST 1, 24: the round proceeds, and its update is noise of the plan's scale."""
    plan = flat_plan(
        population=1_000,
        clients_per_round=10,
        rounds=3,
        clip_norm=CLIP,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    params, metrics = run(algorithm(optax.sgd(1.0), plan=plan), rounds=1)
    empty = algorithm(optax.sgd(1.0), plan=plan)
    state = empty.init(jax.random.key(0))
    keys = round_keys(training_root(0), noise_root(reproducible_seed=0), 0)
    state, public = empty.step(state, [], keys)
    assert np.all(np.asarray(empty.params(state)["w"]) != 0)
    assert 0 < float(public["update_norm"]) < 10 * CLIP


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("chunk", [1, 2])
def test_layout_does_not_change_the_training(devices, chunk):
    """vmap = loop, N devices = 1."""
    reference, _ = run(algorithm(optax.sgd(1.0), mesh=client_mesh(1), chunk=1))
    found, _ = run(algorithm(optax.sgd(1.0), mesh=client_mesh(devices), chunk=chunk))
    np.testing.assert_allclose(found["w"], reference["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "yogi"])
def test_server_optimizers_lower_the_loss(name):
    rate = 0.1 if name in ("adam", "yogi") else 0.5
    chosen = algorithm(optimizer(name, rate))
    params, _ = run(chosen, rounds=15)
    held = population()
    batch = {name: jnp.asarray(column) for name, column in held.columns.items()}
    mask = jnp.ones(held.num_examples, bool)
    model = LinearModel()
    before = model.loss(model.init(jax.random.key(0)), batch, mask)[0]
    after = model.loss(jax.tree.map(jnp.asarray, params), batch, mask)[0]
    assert float(after) < float(before) - 0.02


def test_optimizers_are_shared_objects():
    """Equal settings give the same object, so a sweep shares its compilations."""
    assert optimizer("sgd", 0.1) is optimizer("sgd", 0.1)
    with pytest.raises(jp.InputError, match="optimizer"):
        optimizer("lion", 0.1)


def test_same_keys_give_the_same_bits_and_the_hash_tells():
    server = optax.sgd(1.0)
    first, second = run(algorithm(server)), run(algorithm(server))
    np.testing.assert_array_equal(first[0]["w"], second[0]["w"])
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(one["output_hash"], other["output_hash"])
    changed = jax.tree.map(lambda leaf: np.nextafter(leaf, np.float32(9)), first[0])
    assert not np.array_equal(fingerprint(changed), fingerprint(first[0]))
    swapped = {**first[0], "w": first[0]["w"][::-1]}
    assert not np.array_equal(fingerprint(swapped), fingerprint(first[0]))
