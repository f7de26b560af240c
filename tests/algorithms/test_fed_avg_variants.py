"""FedAvg, FedProx, FedNova, schedules, client functions of one's own: a plain loop in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.data import from_clients
from jaxpfl.federated import Execution, LocalTraining, Proximal, client_mesh, per_step
from tests.algorithms.asking import asked
from tests.algorithms.systems import Linear
from tests.federated.test_local_training import DIM
from tests.plans import flat_without_privacy
from tests.refusals import refusal

SIZES = (1, 7, 4, 0, 12, 3)
BATCH, EPOCHS, CLIP, RATE = 4, 2, 0.5, 0.1
SERVER, NESTEROV = optax.sgd(1.0), optax.sgd(1.0, momentum=0.9, nesterov=True)
HALVING = optax.exponential_decay(1.0, 1, 0.5)


def population():
    """Of each client all examples are alike, so that the order of its batches does not matter."""
    rng = np.random.default_rng(0)
    clients = {}
    for i, size in enumerate(SIZES):
        x = np.float32(rng.normal(size=DIM))
        y = np.float32(x @ np.arange(1, DIM + 1) + 1)
        clients[f"client {i}"] = {"x": np.tile(x, (size, 1)), "y": np.full(size, y, np.float32)}
    return from_clients(clients)


def by_hand(mu=0.0, per_step=False, decay=1.0, momentum=0.0, rounds=3):
    """Rounds client by client, step by step."""
    held, weights, velocity = population(), np.zeros(DIM + 1), np.zeros(DIM + 1)
    for round in range(rounds):
        total = np.zeros(DIM + 1)
        for client, size in enumerate(SIZES):
            local, steps = weights.copy(), EPOCHS * -(-size // BATCH)
            for _ in range(steps):
                first = {name: np.float64(rows[0]) for name, rows in held.examples(client).items()}
                x, y = np.append(first["x"], 1.0), first["y"]
                pull = mu * (local - weights)
                local -= RATE * decay**round * ((x @ local - y) * x + pull)
            sent = (local - weights) / (max(steps, 1) if per_step else 1)
            total += sent * min(1.0, CLIP / max(np.linalg.norm(sent), 1e-30))
        velocity = momentum * velocity + total / len(SIZES)
        # Nesterov's, where there is momentum.
        step = momentum * velocity + total / len(SIZES) if momentum else velocity
        weights = weights + step
    return weights


def ran(tmp_path, client, execution=None, rounds=3, server=SERVER):
    plan = flat_without_privacy(population=len(SIZES), rounds=rounds, clip_norm=CLIP)
    cohort = jp.CohortSpec(BATCH, 12, epochs=EPOCHS, clients_per_bucket=4)
    settings = dict(client=client, server=server, plan=plan, cohort=cohort, execution=execution)
    return asked(jp.algorithms.fed_avg(Linear(), **settings), population(), tmp_path)


def trained(*given, **settings):
    params = ran(*given, **settings).state.params
    return np.append(params["w"], params["b"])


def local(**settings):
    return LocalTraining(Linear(), optax.sgd(RATE), **settings)


ALL = {"mu": 2.0, "per_step": True, "decay": 0.5}
DEALT = Execution(client_mesh(2), chunk=2)
ALL_FUNCTION = local(penalty=Proximal(2.0), transform=per_step, schedule=HALVING)


@pytest.mark.parametrize(
    ("client", "settings", "expected", "wrong"),
    [
        (local(), {}, {}, {"mu": 0.1}),
        (ALL_FUNCTION, {}, ALL, ALL | {"mu": -2.0}),
        (ALL_FUNCTION, {"execution": DEALT}, ALL, ALL | {"decay": 1.0}),
        (ALL_FUNCTION, {"server": NESTEROV}, ALL | {"momentum": 0.9}, ALL | {"per_step": False}),
    ],
)
def test_rounds_are_what_a_plain_loop_gives(client, settings, expected, wrong, tmp_path):
    """Unweighted clipped mean over the PLANNED number of clients; on devices and chunks, too."""
    found = trained(tmp_path, client, **settings)
    np.testing.assert_allclose(found, by_hand(**expected), rtol=1e-5, atol=1e-6)
    assert np.abs(found - by_hand(**wrong)).max() > 1e-3


def test_the_norm_of_an_update_is_told(tmp_path):
    norms = [float(metrics["update_norm"]) for metrics in ran(tmp_path, local()).metrics]
    moves = np.diff([by_hand(rounds=number) for number in range(4)], axis=0)
    assert norms == pytest.approx(np.linalg.norm(moves, axis=1), rel=1e-4)


def test_a_transform_draws_from_each_clients_own_key(tmp_path):
    """Stochastic rounding to whole numbers is unbiased: its mean over many clients is the value."""
    number, value = 4_000, 0.3

    def rounded(change, steps, key):
        drawn = jax.random.uniform(key, (DIM,), jnp.float32)
        return jax.tree.map(lambda leaf: jnp.floor(0 * leaf + value + drawn[0]), change)

    one = {"x": np.ones((1, DIM), np.float32), "y": np.ones(1, np.float32)}
    alike = from_clients({f"{i}": one for i in range(number)})
    plan = flat_without_privacy(population=number, rounds=1, clip_norm=10.0)
    client = local(transform=rounded)
    algorithm = jp.algorithms.fed_avg(Linear(), client=client, server=SERVER, plan=plan)
    mean = asked(algorithm, alike, tmp_path).state.params["b"]
    # Six standard deviations of the mean of as many coins.
    assert mean == pytest.approx(value, abs=6 * np.sqrt(0.21 / number))


def gradient(broadcast, examples, key):
    """Minus the mean gradient over all of a client's examples: FedSGD with clients as the unit."""
    del key
    flat = {name: rows.reshape(-1, *rows.shape[2:]) for name, rows in examples.batches.items()}
    mask = examples.mask.reshape(-1)
    found = jax.grad(lambda params: Linear().loss(params, flat, mask)[0])(broadcast)
    return jax.tree.map(jnp.negative, found)


def test_a_client_function_of_ones_own_takes_the_place_of_local_training(tmp_path):
    found = trained(tmp_path, gradient, rounds=1)
    held, total = population(), np.zeros(DIM + 1)
    for client, size in enumerate(SIZES):
        if size:
            first = {name: np.float64(rows[0]) for name, rows in held.examples(client).items()}
            sent = first["y"] * np.append(first["x"], 1.0)
            total += sent * min(1.0, CLIP / np.linalg.norm(sent))
    np.testing.assert_allclose(found, total / len(SIZES), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (3, "client must be an optimiser"),
        (local(adapters=True), "adapters"),
        (lambda broadcast, examples, key: jnp.zeros(2), "shaped like"),
        (local(transform=lambda change, steps, key: {"w": change["w"]}), "shapes like"),
        (local(transform=lambda change, steps, key: jax.tree.map(jnp.int32, change)), "float"),
    ],
)
def test_what_clients_cannot_compute_is_refused(client, words, tmp_path):
    refusal(lambda: trained(tmp_path, client), words)


@pytest.mark.parametrize("mu", [-1.0, float("nan"), "1"])
def test_a_bad_mu_is_refused(mu):
    refusal(lambda: Proximal(mu), "mu")


def test_a_factor_is_whole_on_every_device_of_a_split_model():
    mesh = client_mesh(2, model=2)
    client = dataclasses.replace(local(schedule=HALVING), model=jp.models.MLP(4, 3))
    params = jax.eval_shape(client.model.init, jax.random.key(0))
    places = client.shardings(mesh, client.scheduled(params, 2))
    assert places.factor.is_fully_replicated
    assert jax.tree.structure(places.params) == jax.tree.structure(params)
    assert client.scheduled(params, 3).factor == 0.25
