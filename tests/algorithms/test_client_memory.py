"""SCAFFOLD, FedDyn, Ditto, APFL against plain loops in float64, cohorts that differ by round."""

import dataclasses
from functools import partial

import dp_accounting
import jax
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms.scaffold import Parts
from jaxpfl.federated import APFL, Ditto, Execution, client_mesh
from tests.algorithms.asking import asked, asking
from tests.algorithms.systems import Linear
from tests.algorithms.test_fed_avg_variants import BATCH, EPOCHS, RATE, SIZES, population
from tests.federated.test_local_training import DIM
from tests.plans import FIELDS, flat_plan, flat_without_privacy
from tests.refusals import refusal
from tests.trees import assert_close, assert_same

NUMBER, TAKEN, ROUNDS, CLIP, VARIATE_CLIP, SHARE = len(SIZES), 3, 5, 0.5, 2.0, 0.3
COHORT = jp.CohortSpec(BATCH, 12, epochs=EPOCHS, clients_per_bucket=4)
# Devices and chunks; without them, which every other test does, it is one of the longer tests.
LAYOUTS = [pytest.param(None, marks=pytest.mark.long), Execution(client_mesh(2), chunk=2)]
SGD = optax.sgd(RATE)
PRIVATE = flat_plan(**FIELDS | {"clip_norm": CLIP, "noise_multiplier": 1.2})
ADAPTIVE = dataclasses.replace(PRIVATE, clip=jp.Clip(CLIP, jp.AdaptiveClip()))
# What FedAvg costs.
COST = dp_accounting.ComposedDpEvent([PRIVATE.event()])


def plan(**changes):
    settings = dict(population=NUMBER, clients_per_round=TAKEN, rounds=ROUNDS, clip_norm=CLIP)
    return flat_without_privacy(**{**settings, **changes})


def clipped(vector, bound):
    return vector * min(1.0, bound / max(np.linalg.norm(vector), 1e-30))


def slope(client, weights):
    """Of every batch of a client, all of whose examples are alike."""
    held = population().examples(client)
    if not len(held["y"]):
        return np.zeros_like(weights)
    x = np.append(np.float64(held["x"][0]), 1.0)
    return (x @ weights - float(held["y"][0])) * x


def steps_of(client):
    return EPOCHS * -(-SIZES[client] // BATCH)


def trained(client, start, drift=0.0, pull=0.0):
    """What a client's steps lead to, by its slope, a constant and a pull towards the start."""
    y = start.copy()
    for _ in range(steps_of(client)):
        y -= RATE * (slope(client, y) + drift + pull * (y - start))
    return y


def made(make, **changes):
    """An algorithm for a linear model."""
    settings = dict(server=optax.sgd(1.0), plan=plan(), cohort=COHORT)
    return make(Linear(), **{**settings, **changes})


averaged = partial(made, jp.algorithms.fed_avg)
fed_dyn = partial(made, jp.algorithms.fed_dyn, client=SGD)
scaffold = partial(
    made, jp.algorithms.scaffold, learning_rate=RATE, variate_clip=VARIATE_CLIP,
    variate_share=SHARE,
)  # fmt: skip


def scaffold_by_hand(drawn, sign=1.0):
    x, c, own = np.zeros(DIM + 1), np.zeros(DIM + 1), np.zeros((NUMBER, DIM + 1))
    for cohort in drawn:
        changes, moves = np.zeros(DIM + 1), np.zeros(DIM + 1)
        for client in cohort:
            y, steps = trained(client, x, drift=sign * (c - own[client])), steps_of(client)
            move = (x - y) / (steps * RATE) - c if steps else np.zeros(DIM + 1)
            move = clipped(move, VARIATE_CLIP)
            own[client] += move
            changes, moves = changes + clipped(y - x, CLIP), moves + move
        x, c = x + changes / TAKEN, c + moves / NUMBER
    return x, c, own


def flat(tree):
    return np.concatenate([np.asarray(tree["w"]), np.asarray(tree["b"])[..., None]], axis=-1)


def run(algorithm, folder, read=flat):
    """The last state, and what `read` makes of the clients' own."""
    with asking(algorithm, population(), folder) as releaser:
        state = algorithm.init(jax.random.key(0))
        for round in range(1, ROUNDS + 1):
            state, _ = releaser.step(algorithm.step, state, round)
        (states,) = releaser.client_states
        return jax.device_get(state), read(states.rows(np.arange(NUMBER))[0])


@pytest.mark.parametrize("execution", LAYOUTS)
def test_scaffold_is_what_a_plain_loop_gives(execution, cohorts, tmp_path):
    state, own = run(scaffold(execution=execution), tmp_path)
    assert len({tuple(each) for each in cohorts}) > 2
    found = (flat(state.params), flat(state.variate), own)
    assert_close(found, scaffold_by_hand(cohorts), atol=1e-6)
    # The variates' mean is the server's, because clients move by what they sent.
    assert_close(own.sum(axis=0) / NUMBER, flat(state.variate), atol=1e-6)
    assert np.abs(flat(state.params) - scaffold_by_hand(cohorts, sign=-1.0)[0]).max() > 1e-3


@pytest.mark.parametrize("make", [scaffold, partial(fed_dyn, alpha=0.7)])
def test_one_client_moves_a_release_by_at_most_the_clip_norm(make, tmp_path):
    """Of SCAFFOLD both parts, however far apart its changes are, its state included."""
    algorithm = make(plan=plan(clients_per_round=NUMBER, clip_norm=1e-3))
    offsets, kept = population().offsets, np.ones(population().num_examples, bool)
    kept[offsets[1] : offsets[2]] = False  # The client stays, without any.
    seen = []
    for clients in (population(), population().keeping(kept)):
        query, sums = algorithm.queries[0], []

        def step(state, release, round, query=query, sums=sums):
            both = make is scaffold
            broadcast = Parts(state.params, state.variate) if both else state.params
            sent = jax.device_get(release(query, broadcast).value)
            sums.append(np.concatenate([flat(part) for part in (sent if both else [sent])]))
            return state, {}

        with asking(algorithm, clients, tmp_path, ledger=f"{len(seen)}.jsonl") as releaser:
            state = algorithm.init(jax.random.key(0))
            for round in range(1, 4):
                releaser.step(step, state, round)
        seen.append(sums)
    for with_it, without in zip(*seen, strict=True):
        assert 0.5e-3 < np.linalg.norm(with_it - without) < 1e-3 * (1 + 1e-5)


def recomputed(*multipliers):
    """By dp-accounting alone: the epsilon of rounds that add noise of these to parts of a sum."""
    parts = [dp_accounting.GaussianDpEvent(each) for each in multipliers]
    accountant = dp_accounting.rdp.RdpAccountant()
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.ComposedDpEvent(parts))
    return accountant.compose(sampled, 10).get_epsilon(1e-5)


def test_epsilon_of_each_is_what_dp_accounting_finds():
    """Of SCAFFOLD from the noise of each part in its own clip norm."""
    algorithm, z = scaffold(plan=PRIVATE), PRIVATE.noise_multiplier
    change, move = algorithm.queries[0].client_fn.parts.scales
    parts = [z / change, z * CLIP / (move * VARIATE_CLIP)]
    for found in (recomputed(z), recomputed(*parts)):
        assert found == pytest.approx(PRIVATE.epsilon(accountant="rdp"), rel=1e-3)
    own = [Ditto(Linear(), SGD, pull=1.0), APFL(Linear(), SGD, mix=0.3)]
    own = [averaged(client=each, plan=PRIVATE) for each in (SGD, *own)]
    for each in (*own, algorithm, fed_dyn(alpha=1.0, plan=PRIVATE)):
        assert each.event() == COST


def test_unusable_settings_are_refused():
    for call, words in (
        (lambda: scaffold(plan=ADAPTIVE), "constant clip norm"),
        (lambda: scaffold(variate_share=1.0), "variate_share"),
        (lambda: scaffold(learning_rate=0.0), "learning_rate"),
        (lambda: fed_dyn(alpha=0.0), "alpha"),
    ):
        refusal(call, words)


def fed_dyn_by_hand(drawn, alpha, sign=1.0):
    w, h, own = np.zeros(DIM + 1), np.zeros(DIM + 1), np.zeros((NUMBER, DIM + 1))
    for cohort in drawn:
        total = np.zeros(DIM + 1)
        for client in cohort:
            y = trained(client, w, drift=-sign * own[client], pull=alpha)
            sent = clipped(y - w, CLIP)
            own[client] -= alpha * sent
            total += sent
        h = h - alpha * total / NUMBER
        w = w + total / TAKEN - h / alpha
    return w, h, own


@pytest.mark.parametrize("execution", LAYOUTS)
def test_fed_dyn_is_what_a_plain_loop_gives(execution, cohorts, tmp_path):
    state, own = run(fed_dyn(alpha=0.7, execution=execution), tmp_path)
    assert len({tuple(each) for each in cohorts}) > 2
    h = 0.7 * flat(state.server[0])
    assert_close((flat(state.params), h, own), fed_dyn_by_hand(cohorts, 0.7), atol=1e-6)
    # The terms' mean is the server's, because clients move by what they sent.
    assert_close(own.sum(axis=0) / NUMBER, h, atol=1e-6)
    assert np.abs(flat(state.params) - fed_dyn_by_hand(cohorts, 0.7, sign=-1.0)[0]).max() > 1e-3


def personal_by_hand(drawn, client, sign=1.0):
    """Ditto and APFL: the shared parameters, and those of each client that was asked."""
    w, own = np.zeros(DIM + 1), {}
    for cohort in drawn:
        total = np.zeros(DIM + 1)
        for each in cohort:
            local, v = w.copy(), own.get(each, w).copy()
            for _ in range(steps_of(each)):
                if isinstance(client, Ditto):
                    step = slope(each, v) + sign * client.pull * (v - w)
                else:
                    mixed = client.mix * v + sign * (1 - client.mix) * local
                    step = client.mix * slope(each, mixed)
                v -= RATE * step
                local -= RATE * slope(each, local)
            own[each] = v
            total += clipped(local - w, CLIP)
        w = w + total / TAKEN
    return w, own


@pytest.mark.parametrize("execution", LAYOUTS)
@pytest.mark.parametrize("client", [Ditto(Linear(), SGD, pull=2.0), APFL(Linear(), SGD, mix=0.3)])
def test_ditto_and_apfl_are_what_a_plain_loop_gives(client, execution, cohorts, tmp_path):
    state, own = run(averaged(client=client, execution=execution), tmp_path)
    w, expected = personal_by_hand(cohorts, client)
    assert_close(flat(state.params), w, atol=1e-6)
    assert len(expected) > 3
    wrong = personal_by_hand(cohorts, client, sign=-1.0)[1]
    share = 1.0 if isinstance(client, Ditto) else 0.3
    for each, v in expected.items():
        found = own[each], client.own_model(flat(state.params), own[each])
        assert_close(found, (v, share * v + (1 - share) * w), atol=1e-6)
    assert max(np.abs(own[each] - wrong[each]).max() for each in expected) > 1e-3


def test_what_ditto_and_apfl_release_is_what_fed_avg_releases(tmp_path):
    """To the bit, whatever the weight: nothing of a client's own model is sent."""
    everyone, found = plan(clients_per_round=NUMBER, rounds=2), []
    own = [Ditto(Linear(), SGD, pull=1.0), APFL(Linear(), SGD, mix=1.0), APFL(Linear(), SGD, mix=0)]
    for number, client in enumerate([SGD, *own]):
        algorithm = averaged(client=client, plan=everyone)
        found.append(asked(algorithm, population(), tmp_path, ledger=f"{number}").state.params)
    assert_same(found[1:], found[:1] * 3)
