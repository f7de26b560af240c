"""FedBuff against a plain loop in float64, with cohorts that differ by round."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms.fed_buff import DelayedTraining
from jaxpfl.federated import LocalTraining
from jaxpfl.federated.clients.client import Examples, contribution
from tests.algorithms import test_client_memory as memory
from tests.algorithms.asking import asked
from tests.algorithms.systems import Linear
from tests.federated.test_local_training import DIM
from tests.refusals import refusal

LONGEST, SERVER = 2, 0.8
fed_buff = partial(
    memory.made, jp.algorithms.fed_buff, client=memory.SGD, server=optax.sgd(SERVER),
    longest=LONGEST,
)  # fmt: skip


def by_hand(drawn, delay, power=-0.5):
    models = [np.zeros(DIM + 1)]
    for cohort in drawn:
        start, total = models[max(len(models) - 1 - delay, 0)], np.zeros(DIM + 1)
        for client in cohort:
            sent = (memory.trained(client, start) - start) * (1 + delay) ** power
            total += memory.clipped(sent, memory.CLIP)
        models.append(models[-1] + SERVER * total / memory.TAKEN)
    return models[-1]


@pytest.mark.parametrize("delay", [0, LONGEST])
@pytest.mark.parametrize("execution", memory.LAYOUTS)
def test_rounds_are_what_a_plain_loop_gives(execution, delay, cohorts, tmp_path):
    # A number beyond the longest delay is taken for that.
    algorithm = fed_buff(execution=execution, delay=lambda key: jnp.int32(10 * delay))
    state = asked(algorithm, memory.population(), tmp_path).state
    found = memory.flat(jax.tree.map(lambda leaf: leaf[0], state.history))
    assert len({tuple(each) for each in cohorts}) > 2
    np.testing.assert_allclose(found, by_hand(cohorts, delay), rtol=1e-5, atol=1e-6)
    if delay:
        for wrong in (by_hand(cohorts, 1), by_hand(cohorts, delay, 0.0)):
            assert np.abs(found - wrong).max() > 1e-3


def test_delays_are_drawn_alike_for_each_client_and_round():
    function = fed_buff().queries[0].client_fn
    assert isinstance(function, DelayedTraining)
    history = {"w": jnp.outer(jnp.arange(1.0, LONGEST + 2), jnp.ones(DIM)), "b": jnp.zeros(3)}
    batches = {"x": jnp.ones((1, 1, DIM)), "y": jnp.zeros((1, 1))}
    examples = Examples(batches, jnp.ones((1, 1), bool), jnp.int32(1))
    keys = jax.random.split(jax.random.key(0), 600)
    sent = jax.vmap(lambda key: contribution(function, history, examples, key)["b"])(keys)
    training = LocalTraining(Linear(), memory.SGD)
    possible = []
    for delay in range(LONGEST + 1):
        start = jax.tree.map(lambda leaf, d=delay: leaf[d], history)
        change = contribution(training, start, examples, jax.random.key(1))["b"]
        possible.append(float(change) / np.sqrt(1 + delay))
    which = np.abs(np.asarray(sent)[:, None] - np.array(possible)).argmin(axis=1)
    np.testing.assert_allclose(sent, np.array(possible)[which], rtol=1e-5)
    assert np.bincount(which).min() > 150


def test_it_costs_what_fed_avg_costs():
    assert fed_buff(plan=memory.PRIVATE).event() == memory.COST
    refusal(lambda: fed_buff(longest=-1), "longest must")
