"""AdaFedProx against a plain loop in float64, with cohorts that differ by round."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.federated import Released
from tests.algorithms import test_client_memory as memory
from tests.algorithms.asking import asked
from tests.algorithms.test_client_memory import CLIP, TAKEN
from tests.algorithms.test_ifca import error
from tests.federated.test_local_training import DIM
from tests.refusals import refusal
from tests.trees import assert_close

# With SERVER = 5, one draw of cohorts in thirty had no rise.
RISE, SHARE, ROUNDS, SERVER = 0.3, 0.2, 12, 10.0
ada_fed_prox = partial(
    memory.made, jp.algorithms.ada_fed_prox, client=memory.SGD, server=optax.sgd(SERVER),
    plan=memory.plan(rounds=ROUNDS), rise_clip=RISE, rise_share=SHARE,
)  # fmt: skip


def by_hand(drawn, released, sign=1.0):
    """The parameters, and the rise and mu of each round; mu follows the rises as released.

    Clipped rises may cancel, and only rounding then says whether their sum is above 0.
    """
    w, before, mu, falls, rises, mus = np.zeros(DIM + 1), np.zeros(DIM + 1), 0.0, 0, [], []
    for cohort, seen in zip(drawn, released, strict=True):
        total, rise = np.zeros(DIM + 1), 0.0
        for client in cohort:
            total += memory.clipped(memory.trained(client, w, pull=sign * mu) - w, CLIP)
            risen = (error(client, w) - error(client, before)) / 2
            rise += min(max(risen, -RISE), RISE)
        before, w = w, w + SERVER * total / TAKEN
        rises.append(rise / TAKEN)
        mus.append(mu)
        mu, falls = adapted(mu, falls, seen)
    return w, rises, mus


def adapted(mu, falls, rise):
    falls = falls + 1 if rise < 0 else 0
    if rise > 0:
        mu += 0.1
    elif falls == 5:
        mu, falls = max(mu - 0.1, 0.0), 0
    return mu, falls


@pytest.mark.parametrize("execution", memory.LAYOUTS)
def test_rounds_are_what_a_plain_loop_gives(execution, cohorts, tmp_path):
    found = asked(ada_fed_prox(execution=execution), memory.population(), tmp_path)
    assert len({tuple(each) for each in cohorts}) > 2
    released = [each["rise"] for each in found.metrics]
    w, rises, mus = by_hand(cohorts, released)
    assert max(mus) > 0
    assert_close(memory.flat(found.state.params), w, rtol=1e-4, atol=1e-5)
    assert_close([float(each["mu"]) for each in found.metrics], mus, atol=1e-6)
    assert_close(released, rises, atol=1e-5)
    wrong = by_hand(cohorts, released, sign=-1.0)[0]
    assert np.abs(memory.flat(found.state.params) - wrong).max() > 1e-3


def test_mu_follows_the_loss(tmp_path):
    """Of a release that is made up: rises by 0.1, and falls by as much after five falls."""
    rises = [0.1, 0.0, 0.2, *[-0.1] * 11, 0.3, *[-0.1] * 4, 0.1, *[-0.1] * 25]
    algorithm = ada_fed_prox()
    state, mu, falls, seen = algorithm.init(jax.random.key(0)), 0.0, 0, []
    scale = algorithm.queries[0].client_fn.parts.scales[1] * TAKEN
    for rise in rises:
        value = jax.tree.map(jnp.zeros_like, state.params), jnp.float32(rise * scale)
        state, metrics = algorithm.step(state, lambda *_, value=value: Released(value, None), 1)
        assert metrics["mu"] == pytest.approx(mu, abs=1e-6)
        mu, falls = adapted(mu, falls, rise)
        seen.append(mu)
    assert seen[-1] == 0 and max(seen) == pytest.approx(0.2)


def test_both_parts_cost_what_one_release_of_the_plan_costs():
    """Computed again from the noise of each part in its own clip norm, by dp-accounting alone."""
    algorithm = ada_fed_prox(plan=memory.PRIVATE)
    change, rise = algorithm.queries[0].client_fn.parts.scales
    # The noise has deviation z S in the contribution; divided by a scale and a clip norm.
    z = memory.PRIVATE.noise_multiplier
    each = [z * CLIP / (change * CLIP), z * CLIP / (rise * RISE)]
    assert each[1] == pytest.approx(z / math.sqrt(SHARE))
    stated = memory.PRIVATE.epsilon(accountant="rdp")
    assert memory.recomputed(*each) == pytest.approx(stated, rel=1e-3)
    assert algorithm.event() == memory.COST


def test_what_cannot_be_is_refused():
    for changes, words in (
        ({"plan": memory.ADAPTIVE}, "constant clip norm"),
        ({"rise_clip": 0.0}, "rise_clip"),
        ({"rise_share": 1.0}, "rise_share"),
    ):
        refusal(lambda changes=changes: ada_fed_prox(**changes), words)
