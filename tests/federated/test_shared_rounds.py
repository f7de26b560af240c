"""What several processes agree on and send each other, without the others: a group of one."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.federated.hosts.shared_rounds import SharedRounds
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import Work
from jaxpfl.federated.release.query import Query, client_mesh
from tests.federated.test_client_states import Summing

PLAN = jp.Plan.without_privacy(rounds=2, clip=jp.Clip(100.0), participation=jp.Poisson(6, 6))
CLIENTS = jp.data.from_clients({str(k): {"x": np.zeros((2, 3), np.float32)} for k in range(6)})
WORDS = np.zeros(4, np.uint32)


OVER = {"over": True}


class Line:
    """One end of what two processes tell each other; process 1 works when process 0 waits."""

    def __init__(self, index: int, said: dict[str, list], other=None) -> None:
        self.index, self._said, self._other = index, said, other

    def tell(self, **message) -> None:
        self._said["told"].append(message)

    def send(self, content: bytes) -> None:
        self._said["sent"].append(content)

    def hear(self):
        return self._said["told"].pop(0)

    def receive(self, size: int) -> bytes:
        content = self._said["sent"].pop(0)
        assert len(content) == size
        return content

    def answer(self, text: str) -> None:
        self._said["answers"].append(text)

    def answers(self) -> list[str]:
        if not self._said["answers"]:
            self.tell(**OVER)
            assert self._other.serve() == OVER
        return [self._said["answers"].pop(0)]


def group():
    """Takes the messages of process 0, to which no other process listens."""
    return SimpleNamespace(
        index=0, tell=lambda **_: None, send=lambda _: None, answers=list, answer=lambda _: 0
    )


def query_of(mesh=None, plan=PLAN) -> Query:
    return Query(
        "sums",
        lambda broadcast, examples, key: jax.tree.leaves(broadcast)[0] * 1.0,
        plan,
        jp.CohortSpec(2, 4, clients_per_bucket=8),
        execution=jp.Execution(mesh=mesh),
    )


def others(query: Query, broadcast, among=None, clients=CLIENTS) -> SharedRounds:
    def step(state, release, round):
        return release(query, broadcast(state)), {}

    return SharedRounds(among or group(), lambda key: jnp.zeros(2), step, (query,), clients)


def test_a_broadcast_that_was_changed_in_place_is_sent_again():
    query = query_of()
    shared = others(query, lambda state: state)
    work = work_of(0)
    broadcast = np.ones(2, np.float32)
    first, _ = shared.sum(query, broadcast, work)
    np.testing.assert_array_equal(first.value, [6.0, 6.0])
    broadcast[:] = 3.0
    second, _ = shared.sum(query, broadcast, work)
    np.testing.assert_array_equal(second.value, [18.0, 18.0])


def two(query: Query, clients=CLIENTS, said=None):
    """Process 0, which has `query`, and process 1 with these clients."""
    said = {"told": [], "sent": [], "answers": []} if said is None else said
    other = others(query_of(), lambda state: state, Line(1, said), clients)
    return others(query, lambda state: state, Line(0, said, other)), other, said


def work_of(seed: int) -> Work:
    cohort = np.frombuffer(seed.to_bytes(16, "big"), np.uint32)
    return Work(1, np.float32(100.0), cohort, WORDS, WORDS, WORDS, WORDS)


def test_a_process_that_draws_another_cohort_does_not_sum_it(monkeypatch):
    """TRUST 38: a client in two processes' shares would count twice."""
    query = query_of()
    first, other, said = two(query)
    for seed in (5, 6):
        first.sum(query, np.ones(2, np.float32), work_of(seed))
    # Without the secret of the release, nobody can test what the cohort is: here everyone.
    assert said["told"][0]["cohort"] != said["told"][1]["cohort"]
    said["told"].append(OVER)
    assert other.serve() == OVER
    first.sum(query, np.ones(2, np.float32), work_of(7))
    monkeypatch.setattr(jp.Poisson, "sample", lambda *_: np.arange(5))
    with pytest.raises(InputError, match="drew another cohort than process 0"):
        other.serve()


def test_processes_that_are_not_alike_are_refused_before_a_charge(monkeypatch):
    """TRUST 38: other clients, another plan, other versions, or one that cannot begin."""
    query, held = query_of(), {"x": np.ones((2, 3))}
    with pytest.raises(InputError, match="has other clients or another config"):
        two(query, jp.data.from_clients({str(k): held for k in range(6)}))
    longer = dataclasses.replace(PLAN, rounds=3)
    with pytest.raises(InputError, match="has other clients or another config"):
        two(query_of(plan=longer))
    real, asked = identity.environment(), []

    def elsewhere():
        # Process 1 is asked first.
        asked.append(0)
        return real if len(asked) > 1 else {**real, "versions": {**real["versions"], "jax": "0"}}

    monkeypatch.setattr(identity, "environment", elsewhere)
    with pytest.raises(InputError, match="process 1 has jax 0"):
        two(query)
    monkeypatch.undo()
    with pytest.raises(InputError, match="process 1: there is no such file"):
        two(query, said={"told": [], "sent": [], "answers": ["there is no such file"]})


def test_a_query_that_the_first_round_does_not_ask_is_refused_before_a_charge():
    """The others would not know what to sum for it."""
    asked, later = query_of(), query_of()

    def step(state, release, round):
        return release(asked, state), {}

    with pytest.raises(InputError, match="'sums' is not asked in the first round"):
        SharedRounds(group(), lambda key: jnp.zeros(2), step, (asked, later), CLIENTS)


def test_a_key_in_the_broadcast_is_refused_before_a_charge():
    with pytest.raises(InputError, match=r"'sums' must be arrays of numbers.*key_data"):
        others(query_of(), lambda state: {"a": state, "key": jax.random.key(0)})


def test_a_mesh_without_some_of_the_devices_is_refused_before_a_charge():
    assert jax.device_count() > 1
    with pytest.raises(InputError, match="by all devices of all processes"):
        others(query_of(client_mesh(1)), lambda state: state)


def test_states_of_clients_are_refused_before_a_charge():
    """One process would hold them, and a client is computed by any."""
    kept = dataclasses.replace(query_of(), client_fn=Summing())
    with pytest.raises(InputError, match="'sums' keeps a state of each client"):
        others(kept, lambda state: state)
