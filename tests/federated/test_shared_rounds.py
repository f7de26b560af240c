"""What two processes agree on and send each other, each of them a thread of this one."""

import dataclasses
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import jaxpfl as jp
from jaxpfl.errors import BudgetExhausted, InputError, Interrupted
from jaxpfl.federated import mesh
from jaxpfl.federated.hosts import processes
from jaxpfl.federated.hosts.shared_rounds import Follower, SharedRounds
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import PreparedQuery, Work
from jaxpfl.federated.release.query import Query, arrays, client_mesh
from jaxpfl.federated.release.releaser import Releaser
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Ledger

PLAN = jp.Plan.without_privacy(rounds=2, clip=jp.Clip(100.0), participation=jp.Poisson(6, 6))
CLIENTS = jp.data.from_clients({str(k): {"x": np.zeros((2, 3), np.float32)} for k in range(6)})
OTHERS = jp.data.from_clients({str(k): {"x": np.ones((2, 3))} for k in range(6)})
WORDS, ONES = np.zeros(4, np.uint32), np.ones(2, np.float32)
OF_ITSELF = threading.local()


class Store:
    """The key-value store of two threads, and their collective."""

    def __init__(self) -> None:
        self.said, self.sizes, self._values = list[str](), list[int](), dict[str, str]()
        self._changed, self._sent = threading.Condition(), list[np.ndarray]()
        self._both = threading.Barrier(2, timeout=60)

    def key_value_set(self, key: str, value: str, overwrite: bool = False) -> None:
        with self._changed:
            assert overwrite or key not in self._values
            self._values[key] = value
            self.said.append(value)
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=60)
            return self._values[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in [name for name in self._values if name.startswith(f"{key}/")]:
                del self._values[name]

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        self._both.wait()

    def broadcast(self, words: np.ndarray) -> np.ndarray:
        # The others give zeros.
        self._sent.append(words)
        self._both.wait()
        total = np.sum(self._sent, axis=0, dtype=np.uint32)
        if not self._both.wait():
            self.sizes.append(total.size)
            self._sent.clear()
        self._both.wait()
        return total


class End(processes.Group):
    """One of two processes, which nobody watches."""

    def __init__(self, index: int, name: str) -> None:
        super().__init__()
        self.index, self.size, self._name = index, 2, name

    def __enter__(self) -> "End":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and error is not self._shared_error:
            self._fail(error)


@pytest.fixture
def run(monkeypatch) -> Callable:
    """Runs two programs, given a `Group` each: what they return, or raise, and the store."""
    store, one = Store(), threading.Lock()
    monkeypatch.setattr(mesh, "store", lambda: store)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", store.broadcast)
    summed = PreparedQuery.sum

    def sum(*arguments: Any) -> Any:
        # Two programs on the same devices could wait for each other.
        with one:
            return jax.block_until_ready(summed(*arguments))

    monkeypatch.setattr(PreparedQuery, "sum", sum)

    names = itertools.count()

    def ended(index: int, name: str, program: Callable) -> Any:
        OF_ITSELF.index = index
        try:
            with End(index, name) as group:
                return program(group)
        except (Exception, KeyboardInterrupt) as error:
            return error

    def both(*programs: Callable) -> tuple[Any, Any, Store]:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(ended, range(2), [f"run {next(names)}"] * 2, programs)
        return first, second, store

    return both


def query_of(mesh=None, plan=PLAN) -> Query:
    return Query(
        "sums",
        lambda broadcast, examples, key: jax.tree.leaves(broadcast)[0] * 1.0,
        plan,
        jp.CohortSpec(2, 4, clients_per_bucket=8),
        execution=jp.Execution(mesh=mesh),
    )


def prepared(group, broadcast=ONES, query=None, clients=CLIENTS):
    shared = SharedRounds(group)
    return shared, shared.prepared(query or query_of(), broadcast, clients, (None, 0, b""))


def work_of(seed: int) -> Work:
    cohort = np.frombuffer(seed.to_bytes(16, "big"), np.uint32)
    return Work(1, np.float32(100.0), cohort, WORDS, WORDS, WORDS, WORDS)


def sums_of(*broadcasts: Any) -> Callable:
    """A program that sums a query for these broadcasts; those of process 0 count."""

    def program(group) -> list[Any]:
        shared, asked = prepared(group, broadcasts[0])
        sums = []
        for seed, broadcast in enumerate(broadcasts, 5):
            asked.broadcast.read(arrays(asked.query, broadcast))
            summed, _ = shared.sum(asked, None if group.index else work_of(seed))
            sums.append(np.asarray(summed.value))
        return sums

    return program


def test_all_sum_the_broadcast_of_process_0_of_which_what_has_changed_is_sent(run):
    """In the others, the server's state may differ in the last bit, or altogether."""
    given = [{"a": np.full(2, k, np.float32), "b": np.zeros(1000, np.float32)} for k in (1, 3, 3)]
    theirs = [jax.tree.map(lambda leaf: np.nextafter(leaf, np.float32(9)), tree) for tree in given]
    here, there, store = run(sums_of(*given), sums_of(*theirs))
    for sums in (here, there):
        np.testing.assert_array_equal(sums, [[6, 6], [18, 18], [18, 18]])
    first, second, third = store.sizes[-3:]
    assert (first - second, second - third) == (1000, 2)


def only_in(index: int, here: Any, elsewhere: Any) -> Callable:
    return lambda *given: (here if OF_ITSELF.index == index else elsewhere)(*given)


def test_a_process_that_draws_another_cohort_does_not_sum_it(run, monkeypatch):
    """TRUST 38: a client in two processes' shares would count twice."""
    two = sums_of(*[np.ones(2, np.float32)] * 2)
    _, _, store = run(two, two)
    # Without the secret of the release, nobody can test what the cohort is: here everyone.
    told = [json.loads(said).get("value") for said in store.said if '"cohort"' in said]
    assert len(told) == 2 and told[0]["cohort"] != told[1]["cohort"]
    draw = only_in(1, lambda *_: np.arange(5), jp.Poisson.sample)
    monkeypatch.setattr(jp.Poisson, "sample", lambda *given: draw(*given))
    here, there, _ = run(two, two)
    for error in (here, there):
        assert isinstance(error, InputError)
        assert "drew another cohort than process 0" in str(error)


def test_processes_that_are_not_alike_are_refused_before_a_charge(run, monkeypatch):
    """TRUST 38: other clients, another plan, other versions, or one that cannot begin."""
    longer = query_of(plan=dataclasses.replace(PLAN, rounds=3))
    for theirs in ({"clients": OTHERS}, {"query": longer}):
        for error in run(prepared, lambda group, theirs=theirs: prepared(group, **theirs))[:2]:
            assert "process 1 has other clients or another config" in str(error)
    real = identity.environment()
    other = {**real, "versions": {**real["versions"], "jax": "0"}}
    environment = only_in(1, lambda: other, lambda: real)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "environment", environment)
        for error in run(prepared, prepared)[:2]:
            assert "process 1 has jax 0" in str(error)

    def failing(group):
        raise InputError("there is no such file")

    here, there, _ = run(prepared, failing)
    assert isinstance(here, InputError) and str(there) == "there is no such file"
    assert str(here) == "process 1: there is no such file"


def test_a_query_that_is_first_asked_in_a_later_round_is_compared_before_it_is_charged(
    run, tmp_path
):
    plan = jp.Plan.without_privacy(rounds=3, clip=jp.Clip(9.0), participation=jp.Poisson(6, 6))
    columns = {"x": np.zeros(2, np.float32), "y": np.zeros(2)}
    clients = jp.data.from_clients({str(k): columns for k in range(6)})
    queries = [
        dataclasses.replace(query_of(plan=plan), label=name, columns=(name,)) for name in "xy"
    ]

    def moved(clients):
        return clients.with_columns({"y": clients.columns["y"] + 1})

    theirs = [queries[0], dataclasses.replace(queries[1], prepare=moved)]

    def asked(releaser, queries):
        first = releaser.release(queries[0], np.ones(2, np.float32), round=1)
        np.testing.assert_array_equal(first.value, [6.0, 6.0])
        releaser.release(queries[1], np.ones(2, np.float32), round=3)

    with Ledger(tmp_path / "ledger.jsonl", clients) as ledger:
        more = {"run": "r", "queries": queries}
        for error in run(
            lambda group: asked(
                Releaser(
                    clients,
                    ledger,
                    RunSecret.reproducible(0),
                    processes=SharedRounds(group),
                    **more,
                ),
                queries,
            ),
            lambda group: asked(Follower(clients, theirs, SharedRounds(group)), theirs),
        )[:2]:
            assert isinstance(error, InputError), error
            assert "process 1 has other clients" in str(error) and "query 'y'" in str(error)
        assert [charge.label for charge in ledger.charges] == ["x"]


@pytest.mark.parametrize(
    ("query", "broadcast", "message"),
    [
        (query_of(), {"key": jax.random.key(0)}, "must be arrays of numbers"),
        (query_of(client_mesh(1)), jnp.ones(2), "by all devices of all processes"),
    ],
    ids=["a key", "a mesh without some devices"],
)
def test_what_cannot_be_shared_is_refused_before_a_charge(query, broadcast, message, run):
    for error in run(*[lambda group: prepared(group, broadcast, query)] * 2)[:2]:
        assert isinstance(error, InputError) and message in str(error)


def test_a_decision_arrives_as_it_was_made(run):
    made = {
        "numbers": [1, -0.1, math.inf, None, True, "text \u2028"],
        "arrays": [np.arange(6.0).reshape(2, 3), np.array(["a", "bcd"]), np.bool_(True)],
        "nested": {"empty": np.zeros((0, 3)), "half": jnp.ones(3, jnp.bfloat16), "x": (1, 2)},
    }
    asked = Counter()

    def program(group):
        def inner():
            asked[group.index] += 1
            # Inside, process 0 is alone.
            return group.decide("another", lambda: made)

        return group.decide("it", inner)

    here, there, _ = run(program, program)
    assert here is made and asked == {0: 1}
    flat = [jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None) for tree in (made, there)]
    for ours, theirs in zip(*flat, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        if hasattr(ours, "dtype"):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        else:
            assert type(ours) is type(theirs)


@pytest.mark.parametrize("index", range(2), ids=["process 0", "process 1"])
@pytest.mark.parametrize(
    "error",
    [
        InputError("no such field"),
        BudgetExhausted("the budget"),
        Interrupted(15, "stopped"),
        KeyError("what client 3 wrote"),
        OSError(28, "No space left on device", "/home/somebody"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_raise_what_one_has_raised_and_quote_no_other_packages_error(error, index, run):
    """TRUST 40: the text of another error than ours may hold a client's value."""

    def program(group):
        if group.index == index == 1:
            raise error
        return group.decide("it", only_in(index, lambda: raised(error), lambda: None))

    ended = run(program, program)[:2]
    heard = ended[1 - index]
    assert ended[index] is error
    ours = isinstance(error, InputError | BudgetExhausted | Interrupted)
    assert type(heard) is (type(error) if ours else RuntimeError)
    assert getattr(heard, "number", None) == getattr(error, "number", None)
    assert (str(error) in str(heard)) == ours
    assert not any(private in str(heard) for private in ("client 3", "somebody"))


def raised(error: BaseException) -> Any:
    raise error


def test_processes_that_come_to_different_decisions_end(run):
    here, there, _ = run(
        lambda group: group.decide("round 2", lambda: 1),
        lambda group: group.decide("round 3", lambda: 1),
    )
    assert isinstance(here, InputError) and isinstance(there, InputError)
    assert "process 1 has come to round 3, process 0 to round 2" in str(there)


@pytest.mark.parametrize("value", [{1, 2}, SimpleNamespace(x=1), np.array([object()])])
def test_objects_are_no_decisions(value, run):
    """TRUST 39: what arrives is numbers and texts alone."""
    here, there, _ = run(*[lambda group: group.decide("it", lambda: value)] * 2)
    assert isinstance(here, TypeError) and isinstance(there, RuntimeError)


def test_statuses_of_all_reach_process_0(run):
    program = lambda group: group.decide("it", lambda statuses: statuses, [group.index])  # noqa: E731
    assert run(program, program)[:2] == ([[0], [1]], [[0], [1]])


def test_nobody_leaves_a_failure_of_all_before_process_0_has_saved_what_it_can(run):
    """Process 0 would take one that has left for dead, and be ended."""
    left, saved = threading.Event(), list[bool]()

    def ends(group: processes.Group, after: Callable[[], None], before: Callable[[], None]) -> None:
        try:
            group.decide("a round", lambda: raised(InputError("a callback has a bug")))
        except InputError as error:
            before()
            group._leave(error)
            after()
            raise

    here = partial(ends, before=lambda: saved.append(not left.wait(0.5)), after=lambda: None)
    there = partial(ends, before=lambda: None, after=left.set)
    assert all(isinstance(error, InputError) for error in run(here, there)[:2])
    assert saved == [True]
