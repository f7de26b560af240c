"""DP-FedAvg's mean and its server optimisers; its rounds are in `test_fed_avg_variants`."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.data import from_clients
from jaxpfl.federated import LocalTraining, optimizer
from jaxpfl.privacy import AdaptiveClip
from tests.algorithms.asking import asked
from tests.algorithms.systems import Linear
from tests.federated.test_local_training import DIM
from tests.plans import flat_plan, flat_without_privacy
from tests.refusals import refusal

SIZES = (1, 7, 4, 0, 12, 3)
CLIP = 0.5
CLIENT, SERVER = optax.sgd(0.1), optax.sgd(1.0)
NO_PRIVACY = jp.Plan.without_privacy(rounds=1, participation=jp.Poisson(6, 3))


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


NEEDS_MORE = {
    "value, grad, value_fn": optax.lbfgs(0.5),
    "grad, value_fn": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(4)),
    "needs value": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "found one that needs value": optax.polyak_sgd(),
    "found function": optax.sgd,
    "found type": optax.GradientTransformation,
    "found MultiSteps": optax.MultiSteps(optax.sgd(0.1), 4),
    "found NoneType": None,
}


@pytest.mark.parametrize("words", NEEDS_MORE)
@pytest.mark.parametrize("place", ["client", "server", "LocalTraining"])
def test_what_is_no_optimiser_of_gradients_is_refused_before_the_run(words, place):
    given = {"client": CLIENT, "server": SERVER, "plan": NO_PRIVACY, place: NEEDS_MORE[words]}
    if place == "LocalTraining":
        given["client"] = LocalTraining(Linear(), given.pop(place))
    refusal(lambda: jp.algorithms.fed_avg(Linear(), **given), f"must be an optimiser {words}")


WARM = optax.linear_schedule(0.0, 0.1, 10)


@pytest.mark.parametrize(
    ("client", "steps", "moves"),
    [
        (optax.MultiSteps(optax.sgd(0.1), 5).gradient_transformation(), 4, False),
        (optax.MultiSteps(optax.sgd(0.1), 5).gradient_transformation(), 5, True),
        (optax.sgd(WARM), 1, False),
        (optax.adam(WARM), 1, False),
        (optax.sgd(WARM), 2, True),
        (optax.set_to_zero(), 9, True),
        (
            optax.multi_transform({"a": CLIENT, "b": optax.set_to_zero()}, lambda p: {"w": "b"}),
            1,
            True,
        ),
        # For one tree alone: it cannot be tried on another.
        (optax.multi_transform({"a": CLIENT}, {"w": "a"}), 1, True),
        (optax.masked(CLIENT, {"w": True, "b": False}), 1, True),
        (optax.adam(0.1), 1, True),
    ],
)
def test_a_client_that_never_steps_in_a_round_is_refused(client, steps, moves):
    given = dict(server=SERVER, plan=NO_PRIVACY, cohort=jp.CohortSpec(2, 2, epochs=steps))
    for training in (client, LocalTraining(Linear(), client)):
        make = partial(jp.algorithms.fed_avg, Linear(), client=training, **given)
        if moves:
            make()
        else:
            refusal(make, f"client changes parameters within a round at most {steps} in a round")


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
