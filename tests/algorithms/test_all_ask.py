"""What holds for every system, whatever it computes: who may be asked, how often, at which cost."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpfl.algorithms import run_rounds
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.privacy import Budget, Guarantee, Ledger, events
from tests.algorithms.asking import OTHER, Asked, asked, asking
from tests.algorithms.systems import every_system


def same(one: Asked, other: Asked) -> bool:
    found = jax.tree.map(np.array_equal, (one.state, one.metrics), (other.state, other.metrics))
    return jax.tree.all(found)


@every_system()
def test_its_cost_is_known_before_it_starts_and_any_other_run_is_charged(system, tmp_path):
    """TRUST 29: the ledger ends with the events that the algorithm's queries stated.

    TRUST 31: an equal run is the same release, and with equal noise on another question the
    difference would give it away.
    """
    algorithm, clients = system()
    stated = algorithm.event()
    first = asked(algorithm, clients, tmp_path)
    ledger = first.ledger
    assert len(ledger) == algorithm.rounds * len(algorithm.queries)
    charged = Guarantee.of_events([charge.event for charge in ledger.charges], 1e-3, "client")
    assert events.counts(charged.event) == events.counts(stated)
    name = algorithm.name
    labels = {f"{name} {query.label}" for query in algorithm.queries}
    assert {charge.label for charge in ledger.charges} == (labels if len(labels) > 1 else {name})
    assert {charge.round for charge in ledger.charges} == set(range(1, algorithm.rounds + 1))
    charges = len(ledger)
    # Made anew, as a resumed process makes it.
    again = asked(system()[0], clients, tmp_path)
    assert same(first, again)
    assert len(again.ledger) == charges
    other = asked(algorithm, clients, tmp_path, secret=OTHER)
    assert not same(first, other)
    assert len(other.ledger) == 2 * charges
    renamed = asked(algorithm, clients, tmp_path, run="another")
    assert not same(first, renamed)
    assert len(renamed.ledger) == 3 * charges


@every_system()
def test_a_question_that_is_not_the_algorithms_is_refused(system, tmp_path):
    """Even one that says the same: its cost was not stated, so it could be asked for ever."""
    algorithm, clients = system()
    asked_for = algorithm.queries[0]

    def step(state, release, round):
        release(dataclasses.replace(asked_for), np.zeros(4, np.float32))

    with asking(algorithm, clients, tmp_path) as releaser:
        with pytest.raises(InputError, match="not one of the algorithm's queries"):
            releaser.step(step, None, 1)
        assert len(releaser.ledger) == 0


@every_system()
def test_another_number_of_clients_is_refused_before_any_charge(system, tmp_path):
    """TRUST 9: one client fewer or more than planned."""
    algorithm, clients = system()
    fewer = clients.select(np.arange(len(clients) - 1))
    with pytest.raises(InputError, match="population"), asking(algorithm, fewer, tmp_path):
        pass
    assert len(Ledger.read(tmp_path / "ledger.jsonl")) == 0


@every_system()
def test_rounds_beyond_the_plans_are_refused(system, tmp_path):
    algorithm, clients = system()
    with asking(algorithm, clients, tmp_path) as releaser:
        for round in (0, algorithm.rounds + 1):
            with pytest.raises(InputError, match="round"):
                releaser.step(algorithm.step, algorithm.init(jax.random.key(0)), round)
        assert len(releaser.ledger) == 0


@every_system()
def test_what_does_not_fit_the_budget_is_refused_as_a_whole(system, tmp_path):
    """TRUST 30: where all rounds together would cost too much."""
    algorithm, clients = system()
    budget = Budget(algorithm.queries[-1].plan.epsilon(1) / 2, 1e-3)
    with asking(algorithm, clients, tmp_path, budget=budget) as releaser:
        with pytest.raises(BudgetExhausted, match="nothing was released"):
            run_rounds(algorithm, releaser, jax.random.key(0))
        assert len(releaser.ledger) == 0
