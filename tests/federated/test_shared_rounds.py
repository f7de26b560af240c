"""What several processes agree on and send each other, all of them in this one."""

import dataclasses
import json
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.federated.hosts import trees
from jaxpfl.federated.hosts.processes import Group
from jaxpfl.federated.hosts.shared_rounds import SharedRounds
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import Work
from jaxpfl.federated.release.query import Query, arrays, client_mesh
from jaxpfl.federated.release.releaser import Releaser
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret

PLAN = jp.Plan.without_privacy(rounds=2, clip=jp.Clip(100.0), participation=jp.Poisson(6, 6))
CLIENTS = jp.data.from_clients({str(k): {"x": np.zeros((2, 3), np.float32)} for k in range(6)})
WORDS = np.zeros(4, np.uint32)


class Moved(NamedTuple):
    by: Any
    more: Any


OVER = {"over": True}


class Line(Group):
    """One end of what two processes tell each other; process 1 works when process 0 waits."""

    def __init__(self, index: int, said: dict[str, list], other: Any = None) -> None:
        self.index, self._sent, self._other = index, said, other

    def tell(self, **message) -> None:
        # As it arrives.
        self._sent["told"].append(json.loads(json.dumps(message)))

    def send(self, content: bytes) -> None:
        self._sent["sent"].append(content)

    def hear(self):
        return self._sent["told"].pop(0)

    def receive(self, size: int) -> bytes:
        content = self._sent["sent"].pop(0)
        assert len(content) == size
        return content

    def answer(self, **message) -> None:
        self._sent["answers"].append(json.loads(json.dumps(message)))

    def answers(self) -> list[dict]:
        if not self._sent["answers"]:
            self.tell(**OVER)
            assert self._other.serve() == OVER
        return [self._sent["answers"].pop(0)]


def query_of(mesh=None, plan=PLAN) -> Query:
    return Query(
        "sums",
        lambda broadcast, examples, key: jax.tree.leaves(broadcast)[0] * 1.0,
        plan,
        jp.CohortSpec(2, 4, clients_per_bucket=8),
        execution=jp.Execution(mesh=mesh),
    )


def two(query: Query, clients=CLIENTS, said=None, theirs=None):
    """Process 0, and process 1 with these clients and this query, in a stage that has one query."""
    said = {"told": [], "sent": [], "answers": []} if said is None else said
    asked = (theirs or query_of(),), clients
    other = SharedRounds(Line(1, said), lambda stage, known: asked)
    return SharedRounds(Line(0, said, other), lambda *_: asked).at("all"), other, said


def prepared(shared: SharedRounds, query: Query, broadcast):
    return shared.prepared(0, query, broadcast, CLIENTS, (None, 0))


def test_a_broadcast_that_was_changed_in_place_is_sent_again():
    (shared, _, said), broadcast = two(query_of()), np.ones(2, np.float32)
    asked = prepared(shared, query_of(), broadcast)
    for value in (1.0, 3.0):
        broadcast[:] = value
        summed = summed_of(shared, asked, broadcast, 0)
        np.testing.assert_array_equal(summed.value, [6 * value, 6 * value])
        assert [said["told"][-1]["changed"], said["sent"][-1][-8:]] == [[True], broadcast.tobytes()]


def summed_of(shared: SharedRounds, asked, broadcast, seed: int):
    asked.broadcast.read(arrays(asked.query, broadcast))
    return shared.sum(asked, work_of(seed))[0]


def work_of(seed: int) -> Work:
    cohort = np.frombuffer(seed.to_bytes(16, "big"), np.uint32)
    return Work(1, np.float32(100.0), cohort, WORDS, WORDS, WORDS, WORDS)


def test_a_process_that_draws_another_cohort_does_not_sum_it(monkeypatch):
    """TRUST 38: a client in two processes' shares would count twice."""
    query = query_of()
    (first, other, said), broadcast = two(query), np.ones(2, np.float32)
    asked = prepared(first, query, broadcast)
    for seed in (5, 6):
        summed_of(first, asked, broadcast, seed)
    # Without the secret of the release, nobody can test what the cohort is: here everyone.
    assert said["told"][0]["cohort"] != said["told"][1]["cohort"]
    said["told"].append(OVER)
    assert other.serve() == OVER
    summed_of(first, asked, broadcast, 7)
    monkeypatch.setattr(jp.Poisson, "sample", lambda *_: np.arange(5))
    with pytest.raises(InputError, match="drew another cohort than process 0"):
        other.serve()


def test_processes_that_are_not_alike_are_refused_before_a_charge(monkeypatch):
    """TRUST 38: other clients, another plan, other versions, or one that cannot begin."""
    query, broadcast, held = query_of(), np.ones(2, np.float32), {"x": np.ones((2, 3))}
    shared, _, _ = two(query, jp.data.from_clients({str(k): held for k in range(6)}))
    with pytest.raises(InputError, match="has other clients or another config"):
        prepared(shared, query, broadcast)
    longer = dataclasses.replace(PLAN, rounds=3)
    with pytest.raises(InputError, match="has other clients or another config"):
        prepared(two(query, theirs=query_of(plan=longer))[0], query, broadcast)
    real, asked = identity.environment(), []

    def elsewhere():
        # Process 1 is asked first.
        asked.append(0)
        return real if len(asked) > 1 else {**real, "versions": {**real["versions"], "jax": "0"}}

    monkeypatch.setattr(identity, "environment", elsewhere)
    with pytest.raises(InputError, match="process 1 has jax 0"):
        two(query)
    monkeypatch.undo()
    failed = {"failed": "there is no such file"}
    with pytest.raises(InputError, match="process 1: there is no such file"):
        two(query, said={"told": [], "sent": [], "answers": [failed]})
    shared, _, said = two(query)
    said["answers"].append(failed)
    with pytest.raises(InputError, match="process 1: there is no such file"):
        prepared(shared, query, broadcast)


def test_a_query_that_is_first_asked_in_a_later_round_is_compared_before_it_is_charged(tmp_path):
    plan = jp.Plan.without_privacy(rounds=3, clip=jp.Clip(9.0), participation=jp.Poisson(6, 6))
    columns = {"x": np.zeros(2, np.float32), "y": np.zeros(2)}
    clients = jp.data.from_clients({str(k): columns for k in range(6)})
    queries = [
        dataclasses.replace(query_of(plan=plan), label=name, columns=(name,)) for name in "xy"
    ]

    def moved(clients):
        return clients.with_columns({"y": clients.columns["y"] + 1})

    theirs = [queries[0], dataclasses.replace(queries[1], prepare=moved)]
    said = {"told": [], "sent": [], "answers": []}
    other = SharedRounds(Line(1, said), lambda *_: (theirs, clients))
    shared = SharedRounds(Line(0, said, other), lambda *_: ([], CLIENTS)).at("all")
    with Ledger(tmp_path / "ledger.jsonl", clients) as ledger:
        asked = {"run": "r", "queries": queries, "processes": shared}
        releaser = Releaser(clients, ledger, RunSecret.reproducible(0), **asked)
        first = releaser.release(queries[0], np.ones(2, np.float32), round=1)
        np.testing.assert_array_equal(first.value, [6.0, 6.0])
        with pytest.raises(InputError, match=r"process 1 has other clients.*for query 'y'"):
            releaser.release(queries[1], np.ones(2, np.float32), round=3)
        assert [charge.label for charge in ledger.charges] == ["x"]


def test_a_broadcast_of_another_shape_is_agreed_on_anew():
    query = query_of()
    shared, other, said = two(query)
    for size in (2, 3):
        broadcast = {"model": Moved(jnp.ones(size), (None, [np.float32(2)]))}
        summed = summed_of(shared, prepared(shared, query, broadcast), broadcast, 0)
        np.testing.assert_array_equal(summed.value, np.full(size, 6.0))
        said["told"].append(OVER)
        assert other.serve() == OVER


@pytest.mark.parametrize(
    ("query", "broadcast", "message"),
    [
        (
            query_of(),
            {"key": jax.random.key(0)},
            r"'sums' must be arrays of numbers.*key_data",
        ),
        (query_of(client_mesh(1)), jnp.ones(2), "by all devices of all processes"),
        (query_of(), {(1, 2): jnp.ones(2)}, "broadcast of query 'sums' must be made of tuples"),
    ],
    ids=["a key", "a mesh without some devices", "a key of no JSON"],
)
def test_what_cannot_be_shared_is_refused_before_a_charge(query, broadcast, message):
    shared, _, said = two(query_of())
    with pytest.raises(InputError, match=message):
        prepared(shared, query, broadcast)
    assert [*said["told"][0]] == ["stage", "inputs", "awaited"], "others were asked to prepare it"


NO_CONTAINERS = [("subprocess", "Popen"), ("os", "system"), ("antigravity", "fly"), (["os"], "x")]


@pytest.mark.parametrize(
    "container",
    [
        *([module, name, None, [None]] for module, name in NO_CONTAINERS),
        *(["builtins", "dict", keys, [None]] for keys in (["a", "b"], None)),
        ["builtins", "tuple"],
        "cos\nsystem\n(S'touch x'\ntR.",
    ],
)
def test_what_a_stranger_sends_is_refused_and_runs_nothing(container, monkeypatch):
    """Not even a module is imported, and only containers that JAX knows are made."""
    monkeypatch.setattr("os.system", lambda *_: pytest.fail("it was called"))
    told = {"containers": container, "leaves": [[[2], "float32"]]}
    with pytest.raises(InputError, match="sent what is no tree of known containers"):
        trees.shapes_of(told)
    assert "antigravity" not in sys.modules


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Known:
    array: object
    about: tuple = dataclasses.field(metadata={"static": True})


def test_a_tree_arrives_as_it_was_sent():
    sent = {"a": [jnp.ones((2, 3)), (None, np.arange(3))], "b": Known(np.float64(0.1), ("x", (2,)))}
    sent["c"] = Moved(jnp.ones(0, jnp.bfloat16), {3: np.bool_(True)})
    told = json.loads(json.dumps(trees.described(sent, "it")))
    shapes, structure = jax.tree.flatten(trees.shapes_of(told))
    assert structure == jax.tree.structure(sent)
    content = trees.content_of(jax.tree.leaves(sent))
    found = trees.received(shapes, lambda size: content[:size])
    for there, here in zip(found, jax.tree.leaves(sent), strict=True):
        np.testing.assert_array_equal(there, here)
        assert there.dtype == here.dtype
