"""What holds for every system, whatever it computes: who may be asked, how often, at which cost."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxpfl.algorithms import run_rounds
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.privacy import Budget, Guarantee, Ledger, events
from tests.algorithms.asking import OTHER, Asked, asked, asking
from tests.algorithms.systems import every_system
from tests.refusals import refusal


def same(one: Asked, other: Asked) -> bool:
    found = jax.tree.map(np.array_equal, (one.state, one.metrics), (other.state, other.metrics))
    return jax.tree.all(found)


# POPri's many programs are traced twice here; its study's tests read its charges, and its bits.
@every_system("popri")
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
    assert same(first, again) and len(again.ledger) == charges
    for times, settings in ((2, {"secret": OTHER}), (3, {"run": "another"})):
        other = asked(algorithm, clients, tmp_path, **settings)
        assert not same(first, other) and len(other.ledger) == times * charges


@every_system()
def test_what_was_not_stated_is_refused_before_any_charge(system, tmp_path):
    """TRUST 9, 30. Another question's like; rounds beyond the plan's or budget; too few clients."""
    algorithm, clients = system()
    other = dataclasses.replace(algorithm.queries[0])

    def step(state, release, round):
        release(other, np.zeros(4, np.float32))

    budget = Budget(algorithm.queries[-1].plan.epsilon(1) / 2, 1e-3)
    with asking(algorithm, clients, tmp_path, budget=budget) as releaser:
        refusal(lambda: releaser.step(step, None, 1), "not one of the algorithm's queries")
        for round in (0, algorithm.rounds + 1):
            state = algorithm.init(jax.random.key(0))
            refusal(partial(releaser.step, algorithm.step, state, round), "round")
        with pytest.raises(BudgetExhausted, match="nothing was released"):
            run_rounds(algorithm, releaser, jax.random.key(0))
        assert len(releaser.ledger) == 0
    fewer = clients.select(np.arange(len(clients) - 1))
    with pytest.raises(InputError, match="population"), asking(algorithm, fewer, tmp_path):
        pass
    assert len(Ledger.read(tmp_path / "ledger.jsonl")) == 0
