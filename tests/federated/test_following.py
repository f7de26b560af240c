"""What several processes agree on and send each other, without the others: a group of one."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from jaxpfl.federated.asked import Work
from jaxpfl.federated.following import Others
from jaxpfl.federated.query import Query, client_mesh

PLAN = jp.Plan.without_privacy(rounds=2, clip=jp.Clip(100.0), participation=jp.Poisson(6, 6))
CLIENTS = jp.data.from_clients({str(k): {"x": np.zeros((2, 3), np.float32)} for k in range(6)})
WORDS = np.zeros(4, np.uint32)


class Line:
    """Both ends of what process 0 tells and sends, for one process after the other."""

    def __init__(self, index: int, told: list, sent: list) -> None:
        self.index, self._told, self._sent = index, told, sent

    def tell(self, **message) -> None:
        self._told.append(message)

    def send(self, content: bytes) -> None:
        self._sent.append(content)

    def hear(self):
        return self._told.pop(0)

    def receive(self, size: int) -> bytes:
        content = self._sent.pop(0)
        assert len(content) == size
        return content

    def answers(self) -> list[str]:
        return []

    def answer(self, text: str) -> None:
        pass


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


def others(query: Query, broadcast, among=None) -> Others:
    def step(state, release, round):
        return release(query, broadcast(state)), {}

    return Others(among or group(), lambda key: jnp.zeros(2), step, (query,), CLIENTS)


def test_a_broadcast_that_was_changed_in_place_is_sent_again():
    query = query_of()
    shared = others(query, lambda state: state)
    work = Work(1, np.float32(100.0), 0, train=WORDS, noise=WORDS, checksum=WORDS, shared=WORDS)
    broadcast = np.ones(2, np.float32)
    first, _ = shared.sum(query, broadcast, work)
    np.testing.assert_array_equal(first.value, [6.0, 6.0])
    broadcast[:] = 3.0
    second, _ = shared.sum(query, broadcast, work)
    np.testing.assert_array_equal(second.value, [18.0, 18.0])


def followed(of_the_other: jp.Plan):
    """A round of process 0, and what the other process hears at last."""
    told, sent = [], []
    first = others(query := query_of(), lambda state: state, among=Line(0, told, sent))
    # That both have the same, which they compare at the beginning, is not so here.
    told.clear(), sent.clear()
    work = Work(1, np.float32(100.0), 5, train=WORDS, noise=WORDS, checksum=WORDS, shared=WORDS)
    first.sum(query, np.ones(2, np.float32), work)
    told.append({"over": True})
    other = query_of(plan=of_the_other)
    return others(other, lambda state: state, among=Line(1, told, sent)).follow()


def test_a_process_that_draws_another_cohort_does_not_sum_it():
    """TRUST 38: a client in two processes' shares would count twice."""
    assert followed(PLAN) == {"over": True}
    half = dataclasses.replace(PLAN, participation=jp.Poisson(6, 3))
    with pytest.raises(InputError, match="drew another cohort than process 0"):
        followed(half)


def test_a_key_in_the_broadcast_is_refused_before_a_charge():
    with pytest.raises(InputError, match=r"'sums' must be arrays of numbers.*key_data"):
        others(query_of(), lambda state: {"a": state, "key": jax.random.key(0)})


def test_a_mesh_without_some_of_the_devices_is_refused_before_a_charge():
    assert jax.device_count() > 1
    with pytest.raises(InputError, match="by all devices of all processes"):
        others(query_of(client_mesh(1)), lambda state: state)
