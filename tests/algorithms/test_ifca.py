"""IFCA against a plain loop in float64: two kinds of clients, cohorts that differ by round."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

import jaxpfl as jp
from tests.algorithms import test_client_memory as memory
from tests.algorithms.asking import asked
from tests.federated.test_local_training import DIM
from tests.refusals import refusal

CLUSTERS = 3
START = np.random.default_rng(1).normal(size=(CLUSTERS, DIM + 1)).astype(np.float32)
ifca = partial(
    memory.made, jp.algorithms.ifca, clusters=CLUSTERS, client=memory.SGD, server=optax.sgd(2.0),
    start={"w": START[:, :-1], "b": START[:, -1]},
)  # fmt: skip


def error(client, weights):
    held = memory.population().examples(client)
    if not len(held["y"]):
        return 0.0
    return float(held["x"][0] @ weights[:-1] + weights[-1] - held["y"][0]) ** 2


def by_hand(drawn, sign=1.0):
    models, chosen = np.array(START, np.float64), set()
    for cohort in drawn:
        total = np.zeros_like(models)
        for client in cohort:
            best = int(np.argmin([sign * error(client, each) for each in models]))
            moved = memory.trained(client, models[best]) - models[best]
            total[best] += memory.clipped(moved, memory.CLIP)
            chosen.add(best)
        models = models + 2.0 * total / memory.TAKEN
    return models, chosen


@pytest.mark.parametrize("execution", memory.LAYOUTS)
def test_rounds_are_what_a_plain_loop_gives(execution, cohorts, tmp_path):
    state = asked(ifca(execution=execution), memory.population(), tmp_path).state
    found = memory.flat(state.params)
    assert len({tuple(each) for each in cohorts}) > 2
    expected, chosen = by_hand(cohorts)
    assert len(chosen) > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found - by_hand(cohorts, sign=-1.0)[0]).max() > 1e-3


def test_it_costs_what_fed_avg_costs_and_draws_its_models():
    algorithm = ifca(plan=memory.PRIVATE, start=None)
    assert algorithm.event() == memory.COST
    models = algorithm.init(jax.random.key(0)).params
    assert (models["w"].shape, models["b"].shape) == ((CLUSTERS, DIM), (CLUSTERS,))
    refusal(lambda: ifca(clusters=0), "clusters")
