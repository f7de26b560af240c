"""Rounds that several processes compute together: what process 0 tells, and what the others do.

Process 0 alone runs the algorithm: it holds the state, the secret, the ledger and all files. The
others have the clients and the queries, and wait. For a release, which process 0 has charged, it
sends them the broadcast and the release's own secrets (not the run's), and all of them sum their
devices' share of the same cohort. The network between the processes sees both: it must be trusted
as the machines are.

With another cohort in one process, a client could be in two processes' shares and move the sum by
twice the clip norm. Therefore all must have the same versions, clients and queries before anything
is charged, and each compares its cohort with that of process 0 in every release.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Stateful
from jaxpfl.federated.hosts.processes import Group
from jaxpfl.federated.mesh import here, put
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import PreparedQuery, Summed, Work
from jaxpfl.federated.release.query import Query, arrays, prepared, read_columns, require_room
from jaxpfl.federated.release.releaser import Released
from jaxpfl.privacy.secret import RunSecret

PyTree = Any

# `Work` as it is sent.
_WORK = (np.int32(0), np.float32(0), *[np.zeros(4, np.uint32)] * 5)
# What draws the cohort and computes its sum, and must be equal everywhere.
_EQUAL = ("versions", "options")


class SharedRounds:
    """The rounds of one run, in process 0 and in the others, which `serve`.

    Args:
      group: the processes.
      init, step, queries: of the algorithm, whose first round must be traceable.
      population: the clients, the same in every process. PRIVATE.

    Attributes:
      environment: of all processes, as identities of releases have it; in process 0 alone.
    """

    def __init__(
        self,
        group: Group,
        init: Callable,
        step: Callable,
        queries: Sequence[Query],
        population: Population,
    ) -> None:
        self._group = group
        self._rounds = [
            _Round(PreparedQuery.of(query, broadcast, population), broadcast)
            for query, broadcast in _broadcasts(init, step, queries, population)
        ]
        self.environment: Any = None
        if group.index:
            group.answer("")
        else:
            self.environment = self._agreed()

    def sum(self, query: Query, broadcast: PyTree, work: Work) -> tuple[Summed, dict[str, Any]]:
        """The sum of a release, on the devices of process 0, which alone calls this."""
        number = next(i for i, each in enumerate(self._rounds) if each.prepared.query is query)
        shared = self._rounds[number]
        changed = shared.changed(broadcast)
        leaves = jax.tree.leaves(broadcast)
        sent = [np.asarray(leaf) for leaf, new in zip(leaves, changed, strict=True) if new]
        work = work._replace(clip_norm=np.asarray(work.clip_norm))
        chosen = shared.prepared.drawn(work)
        parts = [np.asarray(each, like.dtype) for each, like in zip(work, _WORK, strict=True)]
        content = b"".join(each.tobytes() for each in (*parts, *sent))
        # Told last, because the others wait for the bytes from then on.
        self._group.tell(query=number, changed=changed, cohort=_name(chosen, work))
        self._group.send(content)
        return shared.sum(changed, sent, work, chosen)

    def serve(self) -> dict[str, Any]:
        """The other processes: sums with process 0, until it tells something else."""
        message = self._group.hear()
        if "compare" in message:
            digest = self._program(self._group.receive(16))
            self._group.answer(json.dumps([digest, identity.environment()]))
            message = self._group.hear()
        while "query" in message:
            shared, changed = self._rounds[message["query"]], message["changed"]
            shapes = [s for s, new in zip(shared.shapes, changed, strict=True) if new]
            shapes = [*_WORK, *shapes]
            sizes = [shape.size * shape.dtype.itemsize for shape in shapes]
            content, edges = self._group.receive(sum(sizes)), np.cumsum(sizes)
            round, *sent = (
                np.frombuffer(content[end - size : end], shape.dtype).reshape(shape.shape)
                for shape, size, end in zip(shapes, sizes, edges, strict=True)
            )
            work, sent = Work(int(round), *sent[: len(_WORK) - 1]), sent[len(_WORK) - 1 :]
            chosen = shared.prepared.drawn(work)
            if _name(chosen, work) != message["cohort"]:
                raise InputError(
                    "this process drew another cohort than process 0, with the same versions: "
                    "nothing was released"
                )
            shared.sum(changed, sent, work, chosen)
            message = self._group.hear()
        return message

    def _agreed(self) -> Any:
        """Compares what all processes have, without telling it, and returns their environments."""
        for index, sentence in enumerate(self._group.answers(), 1):
            if sentence:
                raise InputError(f"process {index}: {sentence}")
        self._group.tell(compare=True)
        key = RunSecret().words
        self._group.send(key)
        answers = [json.loads(answer) for answer in self._group.answers()]
        own = identity.environment()
        for index, (digest, environment) in enumerate(answers, 1):
            _require_equal(index, own, environment)
            if digest != self._program(key):
                raise InputError(
                    f"process {index} has other clients or another config than process 0: all "
                    "must be given the same; nothing was charged"
                )
        found = sorted({json.dumps(e, sort_keys=True) for e in (own, *(e for _, e in answers))})
        # On equal machines, a run has the same identities however many processes share it.
        return own if len(found) == 1 else [json.loads(each) for each in found]

    def _program(self, key: bytes) -> str:
        """A digest of clients and queries; without the key, no guess of them can be tested."""
        program = "\n".join(each.prepared.described(None) for each in self._rounds)
        return RunSecret(key).digest("program", program)


class _Round:
    """A query's broadcast, of which a process keeps what does not change between rounds."""

    def __init__(self, prepared: PreparedQuery, broadcast: PyTree) -> None:
        self.prepared = prepared
        self.shapes, self._structure = jax.tree.flatten(broadcast)
        self._last: list[Any] = [None] * len(self.shapes)
        self._placed: list[Any] = [None] * len(self.shapes)

    def changed(self, broadcast: PyTree) -> list[bool]:
        """Which leaves are other arrays than in the round before."""
        leaves, structure = jax.tree.flatten(broadcast)
        found = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if structure != self._structure or found != [(s.shape, s.dtype) for s in self.shapes]:
            raise InputError(
                f"the broadcast of query {self.prepared.query.label!r} must have the shapes of the "
                "first round, which several processes share"
            )
        # The values of an array of numpy can be replaced.
        changed = [
            a is not b or not isinstance(a, jax.Array)
            for a, b in zip(leaves, self._last, strict=True)
        ]
        self._last = leaves
        return changed

    def sum(
        self, changed: list[bool], sent: list[np.ndarray], work: Work, chosen: np.ndarray
    ) -> tuple[Summed, dict[str, Any]]:
        everywhere = NamedSharding(self.prepared.door.mesh, PartitionSpec())
        new = iter(sent)
        for place in np.flatnonzero(changed):
            self._placed[place] = put(next(new), everywhere)
        broadcast = jax.tree.unflatten(self._structure, self._placed)
        summed, facts = self.prepared.sum(broadcast, work, chosen)
        return here(summed), facts


def _broadcasts(
    init: Callable, step: Callable, queries: Sequence[Query], population: Population
) -> list[tuple[Query, PyTree]]:
    """The shapes of each query's broadcast, from a round of shapes alone."""
    found: list[tuple[Query, PyTree]] = []

    def release(query: Query, broadcast: PyTree = (), *, clip_norm: Any = None) -> Any:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays(query, broadcast)
        )
        _check_shareable(query, shapes)
        found.append((query, shapes))
        columns = read_columns(query, prepared(query, population))
        require_room(query, columns)
        contribution = identity.traced(query, shapes, columns).contribution
        value = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), contribution)
        next_norm = jnp.float32(query.plan.clip_norm) if clip_norm is None else clip_norm
        return Released(value, next_norm)

    def first_round(key: jax.Array) -> None:
        step(init(key), release, 1)

    try:
        jax.eval_shape(first_round, jax.eval_shape(lambda: jax.random.key(0)))
    except jax.errors.JAXTypeError as error:
        raise InputError(
            "this algorithm's step computes with numbers on the host, so that its rounds cannot be "
            f"shared: run it in one process ({str(error).splitlines()[0]})"
        ) from error
    missing = [query.label for query in queries if all(query is not each for each, _ in found)]
    if missing:
        raise InputError(
            f"query {missing[0]!r} is not asked in the first round, so that its rounds cannot be "
            "shared: run the algorithm in one process"
        )
    return found


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


def _check_shareable(query: Query, shapes: PyTree) -> None:
    """Refuses what would fail or be computed several times, when it was charged already."""
    if set(query.execution.devices.devices.flat) != set(jax.devices()):
        raise InputError(
            f"query {query.label!r} must be computed by all devices of all processes: leave "
            "Execution.mesh out, or make it of jax.devices()"
        )
    if isinstance(query.client_fn, Stateful):
        raise InputError(
            f"query {query.label!r} keeps a state of each client between rounds, which one process "
            "holds: run it in one process"
        )
    for leaf in jax.tree.leaves(shapes):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise InputError(
                f"the broadcast of query {query.label!r} must be arrays of numbers for several "
                f"processes, found {leaf.dtype}: give jax.random.key_data of a key"
            )


def _name(chosen: np.ndarray, work: Work) -> str:
    """Names a cohort; without the secret of the release, no guess of it can be tested."""
    content = np.asarray(chosen, np.int64).tobytes()
    return hmac.new(work.cohort.tobytes(), content, hashlib.sha256).hexdigest()
