"""Releases that several processes compute together, all of which execute the same program.

Process 0 alone has the run's secret, the ledger and all files. The others have the clients and the
queries, and ask them by a `Follower`. Of each release:

    prepare    before its query's first charge, every process traces it, and a keyed digest of
               program and clients must be equal
    charge     process 0 decides, on its disk
    sum        process 0 sends the bits of the broadcast that have changed, the release's own
               secrets (not the run's) and its clients' states; all sum their devices' share of
               the same cohort, and process 0 gets the clients' next states
    record     the release is on process 0's disk: only now do all hand it out

The network between the processes sees both: it must be trusted as the machines are.

With another cohort in one process, a client could be in two processes' shares and move the sum by
twice the clip norm. Therefore all must have the same versions, clients and queries before anything
is charged, and each compares its cohort with that of process 0 in every release. What other
processes compute beside their share, such as the state of a server, may differ in the last bit, for
process 0's broadcast is what all sum.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.hosts.processes import Group
from jaxpfl.federated.mesh import PyTree, here
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import PreparedQuery, StatesAt, Summed, Work
from jaxpfl.federated.release.query import Query, arrays, require_population
from jaxpfl.federated.release.releaser import Released, Releaser

# These decide how a cohort is drawn and summed, and must be equal everywhere.
_EQUAL = ("versions", "options")


def releaser(
    make: Callable[["SharedRounds | None"], Releaser],
    population: Population,
    queries: Sequence[Query],
) -> Releaser:
    """What `make` returns, given the other processes if there are any; in these, a `Follower`."""
    if Group.current is None:
        return make(None)
    shared = SharedRounds(Group.current)
    return Follower(population, queries, shared) if Group.current.index else make(shared)


class SharedRounds:
    """The releases of one run; all processes call the same methods in the same order."""

    def __init__(self, group: Group) -> None:
        self.decide = group.decide
        # Of all processes, for the identities of releases.
        self.environment: Any = self.decide("its releases", _environment, identity.environment())

    def prepared(
        self, query: Query, broadcast: PyTree, population: Population, states: StatesAt
    ) -> PreparedQuery:
        """As `PreparedQuery.of`, once all processes have prepared the same.

        Raises:
          InputError: it cannot be shared, or a process has other clients or cannot prepare it.
        """

        def require_alike(digests: list[str]) -> None:
            for index, digest in enumerate(digests):
                if digest != digests[0]:
                    raise InputError(
                        f"process {index} has other clients or another config than process 0: all "
                        f"must be given the same; nothing was charged for {label}"
                    )

        label = f"query {query.label!r}"
        # What would fail, or be computed several times.
        if {*query.execution.devices.devices.flat} != {*jax.devices()}:
            raise InputError(
                f"{label} must be computed by all devices of all processes: leave Execution.mesh "
                "out, or make it of jax.devices()"
            )
        for leaf in jax.tree.leaves(broadcast):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise InputError(
                    f"the broadcast of {label} must be arrays of numbers for several processes, "
                    f"found {leaf.dtype}: give jax.random.key_data of a key"
                )
        key = bytes.fromhex(self.decide(label, lambda: os.urandom(16).hex()))
        prepared = PreparedQuery.of(query, broadcast, population, states)
        # Without the key, no guess of clients and program can be tested.
        content = prepared.described(None).encode()
        digest = hmac.new(key, content, hashlib.sha256).hexdigest()
        self.decide(f"{label}, prepared", require_alike, digest)
        return prepared

    def sum(self, prepared: PreparedQuery, work: Work | None) -> tuple[Summed, dict[str, Any]]:
        """The sum of a release that was charged, on this process's devices.

        Another process than 0 has no `work`, and gets it from there with the broadcast's bits.
        """
        chosen = None if work is None else prepared.drawn(work)

        def parts() -> dict[str, Any]:
            assert chosen is not None and work is not None
            states = None if prepared.states is None else prepared.states.records(chosen)
            return {
                "work": work,
                "cohort": _name(chosen, work),
                "states": states,
                "changed": list(prepared.broadcast.changed),
                "changes": prepared.broadcast.changes(),
            }

        message = self.decide(f"the sum of query {prepared.query.label!r}", parts)
        if work is None or chosen is None:
            work = Work(*message["work"])
            chosen = prepared.drawn(work)
            if _name(chosen, work) != message["cohort"]:
                raise InputError(
                    "this process drew another cohort than process 0, with the same versions: "
                    "nothing was released"
                )
            if prepared.states is not None:
                prepared.states.put(chosen, message["states"])
            prepared.broadcast.receive(message["changed"], message["changes"])
        summed, facts = prepared.sum(work, chosen)
        return here(summed), facts


class Follower(Releaser):
    """Makes the releases of process 0 with it, in another process: without secret and ledger."""

    def __init__(
        self, population: Population, queries: Sequence[Query], processes: SharedRounds
    ) -> None:
        self._population, self._queries, self._processes = population, tuple(queries), processes
        self._prepared, self._states_at = {}, (None, 0, b"")

    def release(
        self,
        query: Query,
        broadcast: PyTree = (),
        *,
        round: int,
        clip_norm: jax.Array | None = None,
    ) -> Released:
        """Sums this process's share; broadcast and clip norm are those of process 0."""
        prepared = self._prepare(query, arrays(query, broadcast))
        self._decided("charge", query, round, _of_process_0)
        summed, _ = self._processes.sum(prepared, None)
        self._decided("record", query, round, _of_process_0)
        return Released(summed.value, summed.clip_norm)

    def _check(self, query: Query) -> None:
        require_population(query, self._population)


def _of_process_0() -> None:
    """What only process 0 does, with the secret or the ledger."""
    raise AssertionError("another process than 0 has neither a secret nor a ledger")


def _environment(environments: list[Any]) -> Any:
    """The environments of all processes, if all would draw and sum alike; or the only one."""
    for index, environment in enumerate(environments):
        for kind in _EQUAL:
            for name, ours in environments[0][kind].items():
                there = environment[kind].get(name)
                if ours != there:
                    raise InputError(
                        f"process {index} has {name} {there}, process 0 has {ours}: all must have "
                        "the same, or they could draw different clients; nothing was charged"
                    )
    distinct = sorted({json.dumps(own, sort_keys=True) for own in environments})
    # On equal machines, a run has the same identities however many processes share it.
    return [*map(json.loads, distinct)] if distinct[1:] else environments[0]


def _name(chosen: np.ndarray, work: Work) -> str:
    """Names a cohort; without the secret of the release, no guess of it can be tested."""
    content = np.asarray(chosen, np.int64).tobytes()
    return hmac.new(work.cohort.tobytes(), content, hashlib.sha256).hexdigest()
