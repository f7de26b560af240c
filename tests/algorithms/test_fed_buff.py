"""FedBuff against a plain loop in float64, with cohorts that differ by round."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms.fed_buff import DelayedTraining
from jaxpfl.errors import InputError
from jaxpfl.federated import LocalTraining
from jaxpfl.federated.clients.client import Examples, contribution
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
LONGEST, SERVER = 2, 0.8


def fed_buff(execution=None, **changes):
    settings = dict(
        client=optax.sgd(RATE),
        server=optax.sgd(SERVER),
        plan=plan(),
        longest=LONGEST,
        cohort=COHORT,
        execution=execution,
    )
    return jp.algorithms.fed_buff(Linear(), **{**settings, **changes})


def by_hand(drawn, delay, power=-0.5):
    models = [np.zeros(DIM + 1)]
    for cohort in drawn:
        start, total = models[max(len(models) - 1 - delay, 0)], np.zeros(DIM + 1)
        for client in cohort:
            local = start.copy()
            for _ in range(steps_of(client)):
                local -= RATE * slope(client, local)
            total += clipped((local - start) * (1 + delay) ** power, CLIP)
        models.append(models[-1] + SERVER * total / TAKEN)
    return models[-1]


@pytest.mark.parametrize("delay", [0, LONGEST])
@pytest.mark.parametrize("execution", LAYOUTS)
def test_rounds_are_what_a_plain_loop_gives(execution, delay, cohorts, tmp_path):
    # A number beyond the longest delay is taken for that.
    algorithm = fed_buff(execution, delay=lambda key: jnp.int32(10 * delay))
    state = asked(algorithm, memory.population(), tmp_path).state
    found = flat(jax.tree.map(lambda leaf: leaf[0], state.history))
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
    training = LocalTraining(Linear(), optax.sgd(RATE))
    possible = []
    for delay in range(LONGEST + 1):
        start = jax.tree.map(lambda leaf, d=delay: leaf[d], history)
        change = contribution(training, start, examples, jax.random.key(1))["b"]
        possible.append(float(change) / np.sqrt(1 + delay))
    which = np.abs(np.asarray(sent)[:, None] - np.array(possible)).argmin(axis=1)
    np.testing.assert_allclose(sent, np.array(possible)[which], rtol=1e-5)
    assert np.bincount(which).min() > 150


def test_it_costs_what_fed_avg_costs():
    private = flat_plan(
        population=1_000, clients_per_round=100, rounds=10, clip_norm=1.0, noise_multiplier=1.0,
        delta=1e-5,
    )  # fmt: skip
    averaging = jp.algorithms.fed_avg(
        Linear(), client=optax.sgd(RATE), server=optax.sgd(1.0), plan=private
    )
    assert fed_buff(plan=private).event() == averaging.event()
    with pytest.raises(InputError, match="longest must"):
        fed_buff(longest=-1)
