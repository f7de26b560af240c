"""DP-FedAvg's mean and its server optimisers; its rounds are in `test_fed_avg_variants`."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.data import from_clients
from jaxpfl.federated import optimizer
from jaxpfl.privacy import AdaptiveClip
from tests.algorithms.asking import asked
from tests.algorithms.systems import Linear
from tests.federated.test_local_training import DIM
from tests.plans import flat_plan, flat_without_privacy
from tests.refusals import refusal

SIZES = (1, 7, 4, 0, 12, 3)
CLIP = 0.5
CLIENT, SERVER = optax.sgd(0.1), optax.sgd(1.0)


def population():
    """Clients of a linear model."""
    rng = np.random.default_rng(0)
    clients = {}
    for i, size in enumerate(SIZES):
        x = rng.normal(size=(size, DIM))
        y = x @ np.arange(1, DIM + 1) + 1 + 0.1 * rng.normal(size=size)
        clients[f"client {i}"] = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return from_clients(clients)


EVERYONE = dict(population=len(SIZES), rounds=3, clip_norm=CLIP)
exact = partial(flat_without_privacy, clients_per_round=len(SIZES), **EVERYONE)
noisy = partial(flat_plan, clients_per_round=3, delta=1e-3, **EVERYONE)


def algorithm(server=SERVER, *, plan=None, client=CLIENT):
    # A whole client is one batch: which of its examples come first makes no difference.
    spec = jp.CohortSpec(batch_size=12, max_examples=12, epochs=2, clients_per_bucket=4)
    settings = dict(client=client, server=server, plan=plan or exact(), cohort=spec)
    return jp.algorithms.fed_avg(Linear(), **settings)


def test_denominator_is_the_plans_and_not_the_cohorts(cohorts, tmp_path):
    """TRUST 15, 25: cohorts vary in size; their sums are divided by the plan's n."""
    rows = np.ones((2, DIM), np.float32)
    alike = from_clients({f"{i}": {"x": rows, "y": rows[:, 0]} for i in range(30)})
    # So small a rate that the next round's change is the first one's, but for the fourth digit.
    client = optax.sgd(1e-5)
    chosen = algorithm(plan=exact(population=30, clients_per_round=10, rounds=6), client=client)
    moved, before = [], 0.0
    for round in range(1, 7):
        state = asked(chosen, alike, tmp_path, rounds=round).state
        moved.append(float(state.params["b"]) - before)
        before = float(state.params["b"])
    sizes = [len(cohort) for cohort in cohorts[-6:]]
    assert len(set(sizes)) > 2
    np.testing.assert_allclose(moved, [2e-5 * size / 10 for size in sizes], rtol=1e-3)


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "yogi"])
def test_server_optimizers_lower_the_loss(name, tmp_path):
    rate = 0.1 if name in ("adam", "yogi") else 0.5
    held = population()
    chosen = algorithm(optimizer(name, rate), plan=exact(rounds=15))
    params = asked(chosen, held, tmp_path).state.params
    x, y = held.columns["x"], held.columns["y"]
    assert np.mean((x @ params["w"] + params["b"] - y) ** 2) < 0.9 * np.mean(np.square(y))


def test_optimizers_are_shared_objects():
    """Equal settings give the same object, so a sweep shares its compilations."""
    assert optimizer("sgd", 0.1) is optimizer("sgd", 0.1)
    refusal(lambda: optimizer("lion", 0.1), "optimizer")


def test_adaptive_clipping_moves_the_clip_norm_by_what_was_released(tmp_path):
    """Updates far below the norm: it falls by the factor that the released indicators allow."""
    adaptive = AdaptiveClip(target_quantile=0.5, learning_rate=0.2, indicator_noise=1.0)
    plan = noisy(adaptive_clip=adaptive, accountant="rdp")
    chosen = algorithm(plan=plan, client=optax.sgd(1e-6))
    found = asked(chosen, population(), tmp_path)
    used = [float(public["clip_norm"]) for public in found.metrics]
    assert used[0] == CLIP
    # By a factor between exp(-0.1) and exp(0.1), where the noise of few clients leads beyond.
    steps = np.diff(np.log([*used, float(found.state.clip_norm)]))
    assert (np.abs(steps) < 0.1 + 1e-5).all() and (steps != 0).any()
    assert len(found.ledger) == 3


def test_start_is_copied_and_checked(tmp_path):
    start = {"w": jnp.full(DIM, 2.0, jnp.float32), "b": jnp.float32(1.0)}
    settings = dict(client=optax.sgd(1e-6), server=SERVER, plan=exact(rounds=1))
    chosen = jp.algorithms.fed_avg(Linear(), start=start, **settings)
    found = asked(chosen, population(), tmp_path)
    np.testing.assert_allclose(found.state.params["w"], np.full(DIM, 2.0), atol=1e-4)
    assert float(start["b"]) == 1.0  # not donated
    short = {"w": start["w"]}
    refusal(lambda: jp.algorithms.fed_avg(Linear(), start=short, **settings), "start")
