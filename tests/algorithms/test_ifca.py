"""IFCA against a plain loop in float64: two kinds of clients, cohorts that differ by round."""

import jax
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from tests.algorithms import test_client_memory as memory
from tests.algorithms.asking import asked
from tests.algorithms.systems import Linear
from tests.algorithms.test_client_memory import (
    CLIP,
    COHORT,
    LAYOUTS,
    RATE,
    TAKEN,
    clipped,
    flat,
    plan,
    slope,
    steps_of,
)
from tests.federated.test_local_training import DIM
from tests.plans import flat_plan

cohorts = memory.cohorts
CLUSTERS = 3
START = np.random.default_rng(1).normal(size=(CLUSTERS, DIM + 1)).astype(np.float32)


def ifca(execution=None, **changes):
    settings = dict(
        clusters=CLUSTERS,
        client=optax.sgd(RATE),
        server=optax.sgd(2.0),
        plan=plan(),
        cohort=COHORT,
        execution=execution,
        start={"w": START[:, :-1], "b": START[:, -1]},
    )
    return jp.algorithms.ifca(Linear(), **{**settings, **changes})


def error(client, weights):
    held = memory.population().examples(client)
    return (
        float(held["x"][0] @ weights[:-1] + weights[-1] - held["y"][0]) ** 2
        if len(held["y"])
        else 0.0
    )


def by_hand(drawn, sign=1.0):
    models, chosen = np.array(START, np.float64), set()
    for cohort in drawn:
        total = np.zeros_like(models)
        for client in cohort:
            best = int(np.argmin([sign * error(client, each) for each in models]))
            local = models[best].copy()
            for _ in range(steps_of(client)):
                local -= RATE * slope(client, local)
            total[best] += clipped(local - models[best], CLIP)
            chosen.add(best)
        models = models + 2.0 * total / TAKEN
    return models, chosen


@pytest.mark.parametrize("execution", LAYOUTS)
def test_rounds_are_what_a_plain_loop_gives(execution, cohorts, tmp_path):
    found = flat(asked(ifca(execution), memory.population(), tmp_path).state.params)
    assert len({tuple(each) for each in cohorts}) > 2
    expected, chosen = by_hand(cohorts)
    assert len(chosen) > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found - by_hand(cohorts, sign=-1.0)[0]).max() > 1e-3


def test_it_costs_what_fed_avg_costs_and_draws_its_models():
    private = flat_plan(
        population=1_000, clients_per_round=100, rounds=10, clip_norm=1.0, noise_multiplier=1.0,
        delta=1e-5,
    )  # fmt: skip
    algorithm = ifca(plan=private, start=None)
    averaging = jp.algorithms.fed_avg(
        Linear(), client=optax.sgd(RATE), server=optax.sgd(1.0), plan=private
    )
    assert algorithm.event() == averaging.event()
    models = algorithm.init(jax.random.key(0)).params
    assert (models["w"].shape, models["b"].shape) == ((CLUSTERS, DIM), (CLUSTERS,))


def test_a_number_of_clusters_is_checked():
    with pytest.raises(InputError, match="clusters"):
        ifca(clusters=0)
