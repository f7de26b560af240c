"""Releases that several processes compute together: process 0 commands, and the others serve.

Process 0 alone runs the system: it holds the state, the secret, the ledger and all files. The
others have the clients and the queries, and wait:

    stage      which clients are asked next, with what is public and they depend on
    prepare    a query and the shapes of its broadcast, BEFORE its first release is charged: every
               process traces it, and a keyed digest of program and clients must be equal
    sum        a release that was charged: the broadcast, the release's own secrets (not the run's)
               and its clients' states; all sum their devices' share of the same cohort, and
               process 0 gets the clients' next states
    recorded   the release is on process 0's disk: only now do the others hand it out
    task       a computation without clients, such as writing texts, in which all take part

The network between the processes sees both: it must be trusted as the machines are.

With another cohort in one process, a client could be in two processes' shares and move the sum by
twice the clip norm. Therefore all must have the same versions, clients and queries before anything
is charged, and each compares its cohort with that of process 0 in every release.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.hosts import trees
from jaxpfl.federated.hosts.processes import Group
from jaxpfl.federated.mesh import here
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import PreparedQuery, StatesAt, Summed, Work
from jaxpfl.federated.release.query import Query

PyTree = Any
T = TypeVar("T")
Asked = tuple[Sequence[Query], Population]
"""The queries of a stage, and the PRIVATE clients that are asked."""
Asks = Callable[[str, Any], Asked]
Tasks = Callable[[str, PyTree, Any], None]
"""Another process's part in a task, given its name, public arrays and public settings."""

# `Work` as it is sent.
_WORK = (np.int32(0), np.float32(0), *[np.zeros(4, np.uint32)] * 5)
# These decide how a cohort is drawn and summed, and must be equal everywhere.
_EQUAL = ("versions", "options")


class SharedRounds:
    """The releases of one run, in process 0, which makes them, and in the others, which `serve`.

    Args:
      asks: returns a stage's queries and clients, given its name and its public inputs; the same
        in all processes.
      tasks: takes part in a task, given its name, arrays and settings (`together`).

    Attributes:
      environment: the environments of all processes, for the identities of releases; in process 0.
      released: the value of the last sum, in the others.
    """

    def __init__(self, group: Group, asks: Asks, tasks: Tasks | None = None) -> None:
        self._group, self._asks, self._tasks = group, asks, tasks
        self._stage: Any = None
        self._prepared: list[PreparedQuery] = []
        self.environment: Any = None
        self.released: Any = None
        self._summed: Any = None
        if group.index:
            group.answer(environment=identity.environment())
        else:
            environments = [identity.environment()]
            for index, answer in enumerate(self._answers(), 1):
                _require_equal(index, environments[0], answer["environment"])
                environments.append(answer["environment"])
            distinct = sorted({json.dumps(own, sort_keys=True) for own in environments})
            # On equal machines, a run has the same identities however many processes share it.
            self.environment = [*map(json.loads, distinct)] if distinct[1:] else environments[0]

    def at(self, stage: str, inputs: PyTree = ()) -> Self:
        """Process 0 comes to a stage, which depends on `inputs`: public arrays and numbers."""
        self._prepared.clear()
        self._send(inputs, stage=stage)
        return self

    def together(self, task: str, inputs: PyTree, about: Any, compute: Callable[[], T]) -> T:
        """Process 0 computes something while the others take part in it, to the end.

        Args:
          inputs: public arrays that they need.
          about: public settings, in JSON's types.
        """
        self._send(inputs, task=task, about=about)
        result = compute()
        self._answers()
        return result

    def _send(self, inputs: PyTree, **message: Any) -> None:
        inputs = jax.tree.map(np.asarray, inputs)
        description = trees.described(inputs, "the inputs of a stage")
        self._group.tell(**message, inputs=description, awaited=True)
        self._group.send(trees.content_of(jax.tree.leaves(inputs)))

    def _received(self, message: dict[str, Any]) -> PyTree:
        shapes, structure = jax.tree.flatten(trees.shapes_of(message["inputs"]))
        return jax.tree.unflatten(structure, trees.received(shapes, self._group.receive))

    def prepared(
        self, number: int, query: Query, broadcast: PyTree, population: Population, states: StatesAt
    ) -> PreparedQuery:
        """Prepares query `number` of the stage in process 0, once all agree on it.

        Raises:
          InputError: it cannot be shared, or a process has other clients or cannot prepare it.
        """
        _check_shareable(query, broadcast)
        description = trees.described(broadcast, f"the broadcast of query {query.label!r}")
        self._group.tell(prepare=number, broadcast=description, awaited=True)
        key = os.urandom(16)
        self._group.send(key)
        prepared = PreparedQuery.of(query, broadcast, population, states)
        for index, answer in enumerate(self._answers(), 1):
            if answer["digest"] != _digest(key, prepared):
                raise InputError(
                    f"process {index} has other clients or another config than process 0: all "
                    f"must be given the same; nothing was charged for query {query.label!r}"
                )
        self._prepared.append(prepared)
        return prepared

    def sum(self, prepared: PreparedQuery, work: Work) -> tuple[Summed, dict[str, Any]]:
        """The sum of a release, on the devices of process 0, which alone calls this.

        The others get the broadcast's bits from process 0, which sends only leaves that changed.
        """
        number = next(n for n, query in enumerate(self._prepared) if query is prepared)
        changed, sent = list(prepared.broadcast.changed), prepared.broadcast.changes()
        chosen = prepared.drawn(work)
        parts = [np.asarray(part, like.dtype) for part, like in zip(work, _WORK, strict=True)]
        content = trees.content_of([*parts, *sent])
        # Told last, because the others wait for the bytes from then on.
        self._group.tell(sum=number, changed=changed, cohort=_name(chosen, work))
        self._group.send(content)
        if prepared.states is not None:
            self._group.send(prepared.states.records(chosen).tobytes())
        summed, facts = prepared.sum(work, chosen)
        return here(summed), facts

    def recorded(self) -> None:
        """Process 0 has the last release on its disk, so that all may hand it out."""
        self._group.tell(recorded=True)

    def serve(self) -> dict[str, Any]:
        """The other processes: work with process 0, until it tells something else."""
        while True:
            message = self._group.hear()
            if "stage" in message:
                self._prepared.clear()
                self._stage = None  # Not two populations at a time.
                self._stage = self._asks(message["stage"], self._received(message))
            elif "prepare" in message:
                self._prepare(message)
            elif "sum" in message:
                self._sum(message)
            elif "recorded" in message:
                self.released, self._summed = self._summed, None
            elif "task" in message:
                assert self._tasks is not None
                self._tasks(message["task"], self._received(message), message["about"])
                self._group.answer()
            else:
                return message

    def _prepare(self, message: dict[str, Any]) -> None:
        key = self._group.receive(16)
        queries, clients = self._stage
        broadcast = trees.shapes_of(message["broadcast"])
        prepared = PreparedQuery.of(queries[message["prepare"]], broadcast, clients)
        self._prepared.append(prepared)
        self._group.answer(digest=_digest(key, prepared))

    def _sum(self, message: dict[str, Any]) -> None:
        prepared, changed = self._prepared[message["sum"]], message["changed"]
        shapes = prepared.broadcast.shapes
        changes = [shape for shape, new in zip(shapes, changed, strict=True) if new]
        parts = trees.received([*_WORK, *changes], self._group.receive)
        round, *secrets = parts[: len(_WORK)]
        work = Work(int(round), *secrets)
        chosen = prepared.drawn(work)
        if _name(chosen, work) != message["cohort"]:
            raise InputError(
                "this process drew another cohort than process 0, with the same versions: "
                "nothing was released"
            )
        states = prepared.states
        if states is not None:
            content = self._group.receive(len(chosen) * states.record_bytes)
            states.put(chosen, np.frombuffer(content, np.uint8).reshape(-1, states.record_bytes))
        prepared.broadcast.receive(changed, parts[len(_WORK) :])
        self.released = self._summed = None  # Not two at a time.
        self._summed = here(prepared.sum(work, chosen)[0]).value

    def _answers(self) -> list[dict[str, Any]]:
        """The answers of processes 1, 2, ..., unless one failed."""
        answers = self._group.answers()
        for index, answer in enumerate(answers, 1):
            if "failed" in answer:
                raise InputError(f"process {index}: {answer['failed']}")
        return answers


def _require_equal(index: int, own: dict[str, Any], environment: dict[str, Any]) -> None:
    """Refuses process `index` if it could draw other clients than process 0, or sum otherwise."""
    for kind in _EQUAL:
        for name, ours in own[kind].items():
            there = environment[kind].get(name)
            if ours != there:
                raise InputError(
                    f"process {index} has {name} {there}, process 0 has {ours}: all must have the "
                    "same, or they could draw different clients; nothing was charged"
                )


def _check_shareable(query: Query, broadcast: PyTree) -> None:
    """Refuses a query that would fail, or be computed several times."""
    if set(query.execution.devices.devices.flat) != set(jax.devices()):
        raise InputError(
            f"query {query.label!r} must be computed by all devices of all processes: leave "
            "Execution.mesh out, or make it of jax.devices()"
        )
    for leaf in jax.tree.leaves(broadcast):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise InputError(
                f"the broadcast of query {query.label!r} must be arrays of numbers for several "
                f"processes, found {leaf.dtype}: give jax.random.key_data of a key"
            )


def _name(chosen: np.ndarray, work: Work) -> str:
    """Names a cohort; without the secret of the release, no guess of it can be tested."""
    content = np.asarray(chosen, np.int64).tobytes()
    return hmac.new(work.cohort.tobytes(), content, hashlib.sha256).hexdigest()


def _digest(key: bytes, prepared: PreparedQuery) -> str:
    """A keyed hash of clients and program; without the key, no guess of them can be tested."""
    return hmac.new(key, prepared.described(None).encode(), hashlib.sha256).hexdigest()
