"""What a releaser refuses before a charge, and what a step cannot reach."""

import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.data import Population
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.federated import Releaser, RunSecret
from jaxpfl.privacy import AdaptiveClip, Budget, Clip, Ledger, Plan
from tests.data.populations import SECRET
from tests.federated.releases import CLIENTS, ask, half_of_it, plan, population, query, releasing
from tests.plans import flat_without_privacy
from tests.refusals import refusal


def step_that_leaks(state, release, round):
    """Walks all that a step is given, and keeps what it finds of arrays."""
    found, seen, todo = [], set(), [release]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray | jax.Array | Population):
            found.append(each)
        todo += gc.get_referents(each)
        todo += [getattr(each, name) for name in getattr(type(each), "__slots__", ())]
    return found, {}


def test_a_step_is_given_nothing_that_holds_clients_data(ledger_path):
    with releasing(ledger_path, queries=(query(),)) as releaser:
        found, _ = releaser.step(step_that_leaks, None, 1)
        assert found == []
        # The walk finds what is there to be found.
        assert step_that_leaks(None, releaser, 1)[0]


def test_a_step_cannot_ask_after_its_round(ledger_path):
    asked = query()
    with releasing(ledger_path, queries=(asked,)) as releaser:
        kept, _ = releaser.step(lambda state, release, round: (release, {}), None, 1)
        refusal(lambda: kept(asked, jnp.float32(0)), "round is over")
        assert not releaser.ledger.charges


def refused(path, message, *, asked=None, clients=None, round=1, queries=None, clip_norm=None):
    asked = query() if asked is None else asked
    with releasing(path, clients, queries=queries) as releaser:
        with pytest.raises(InputError, match=message) as error:
            releaser.release(asked, jnp.float32(0), round=round, clip_norm=clip_norm)
        assert not releaser.ledger.charges
    assert SECRET not in str(error.value)


def test_only_what_was_planned_is_asked(ledger_path):
    """More rounds, more clients, another query or another population than the plan's."""
    refused(ledger_path, "round must lie in 1 .. 6", round=7)
    refused(ledger_path, "round must lie in 1 .. 6", round=0)
    refused(ledger_path, "is for a population of 10", asked=query(of=plan(clients=10)))
    refused(ledger_path, "not one of the algorithm's", queries=(query(),))
    refused(ledger_path, "constant clip norm", clip_norm=jnp.float32(5))


@pytest.mark.parametrize(
    "clip_norm",
    [
        jnp.ones(2),
        jnp.ones((1,)),
        jnp.int32(1),
        np.float64(1),
        1.0,
        "one",
        jnp.float32(np.nan),
        jnp.float32(np.inf),
        jnp.float32(0),
    ],
)
def test_a_clip_norm_that_cannot_be_one_is_refused_before_it_is_charged(ledger_path, clip_norm):
    adaptive = query(of=plan(clip=Clip(1.0, adaptive=AdaptiveClip())))
    refused(ledger_path, "'sum': clip_norm must be", asked=adaptive, clip_norm=clip_norm)


def whole_number(broadcast, examples, key):
    return jnp.sum(examples.mask, dtype=jnp.int32)


def nothing(broadcast, examples, key):
    return ()


def broken(broadcast, examples, key):
    raise RuntimeError("a fault of the user's function")


def test_a_client_function_is_checked_before_anything_is_charged(ledger_path):
    refused(ledger_path, "tree of float arrays, found int32", asked=query(whole_number))
    refused(ledger_path, "found no array", asked=query(nothing))
    refused(ledger_path, "needs a numeric column 'y'", asked=query(columns=("y",)))
    texts = population().with_columns({"x": pa.array([SECRET] * CLIENTS)})
    refused(ledger_path, "needs a numeric column 'x'", clients=texts)
    with releasing(ledger_path) as releaser:
        refusal(lambda: releaser.release(query(broken), round=1), "user's function", RuntimeError)
        assert not releaser.ledger.charges


def test_two_queries_of_one_releaser_are_each_answered(ledger_path):
    """Of equal shapes; what is kept of one is not taken for the other."""
    public = flat_without_privacy(population=CLIENTS, rounds=6)
    queries = query(of=public), query(half_of_it, of=public, label="half")
    with releasing(ledger_path) as releaser:
        whole, half = (releaser.release(each, jnp.float32(0), round=1).value for each in queries)
    np.testing.assert_allclose(half, whole / 2, rtol=1e-5, atol=1e-8)
    assert np.std(whole) > 0


def test_a_releaser_charges_the_ledger_of_its_clients_alone(ledger_path):
    with (
        Ledger(ledger_path, population(seed=1)) as ledger,
        pytest.raises(InputError, match="ledger of another population"),
    ):
        Releaser(population(), ledger, RunSecret(), run="run")


def test_a_releaser_charges_what_the_ledger_protects(ledger_path):
    refused = pytest.raises(InputError, match="must protect the same unit")
    with refused, releasing(ledger_path, unit="example", queries=(query(),)):
        pass
    with releasing(ledger_path, unit="example") as releaser:
        refusal(lambda: releaser.release(query(), round=1), "must protect the same unit")
        assert not releaser.ledger.charges


def test_nobody_is_drawn_before_the_charge_is_on_the_disk(ledger_path, monkeypatch):
    """TRUST 30: and nobody at all where the charge does not fit the budget."""
    drawn, sample = [], Plan.sample

    def spied(self, seed, round):
        drawn.append(len(Ledger.read(ledger_path).charges))
        return sample(self, seed, round)

    monkeypatch.setattr(Plan, "sample", spied)
    ask(ledger_path)
    assert drawn == [1]
    with pytest.raises(BudgetExhausted):
        ask(ledger_path, round=2, budget=Budget(1e-3, 1e-6))
    assert drawn == [1]
