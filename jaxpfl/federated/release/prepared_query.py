"""A query at work: what is kept of it, and its sum. Private to `federated.release.releaser`.

`hosts.shared_rounds` computes the same sum in the other processes of a run that has several.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.data.cohort import Bucket, Cohort, gather
from jaxpfl.data.content import origin_hash
from jaxpfl.data.population import Population
from jaxpfl.data.prefetch import prefetch
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import PyTree, TracedClient
from jaxpfl.federated.flow.client_program import needs_alone
from jaxpfl.federated.flow.lowered import require_known_calls
from jaxpfl.federated.mesh import leads, put, put_shares, several, shardings, shares, whole
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.broadcast import OwnBroadcast
from jaxpfl.federated.release.door import Door, Keys, Summed
from jaxpfl.federated.release.information_flow import check_release
from jaxpfl.federated.release.query import Query, read_columns, require_room
from jaxpfl.privacy.keys import key_from_words
from jaxpfl.privacy.participation import shuffled

Kept = tuple[Path | None, int, bytes]
"""Where the states of clients are, after which round, and the key of their names there. SECRET."""

_NUMBERS = "example"


class Work(NamedTuple):
    """What decides a release besides the query, the clients and the broadcast. SECRET.

    Attributes:
      cohort, train, noise, checksum, shared: uint32 [4], see `privacy.keys`.
    """

    round: int
    clip_norm: Any
    cohort: np.ndarray
    train: np.ndarray
    noise: np.ndarray
    checksum: np.ndarray
    shared: np.ndarray

    @property
    def seed(self) -> int:
        """Of the cohort, the order of its examples and their subsets; 128 bits."""
        return int.from_bytes(self.cohort.tobytes(), "big")


@dataclass
class PreparedQuery:
    """What a process keeps of a query.

    Attributes:
      clients: with the columns that the client function reads. PRIVATE.
      program: the SHA-256 of what trains and sums clients, for every shape of a bucket, as JAX
        lowers it.
      captured: the numbers that its functions and its programs hold, by name or line, and kind.
      content: the SHA-256 of `clients`. PRIVATE.
      broadcast: what this process has of the broadcast.
      states: what clients keep between rounds; None = nothing. PRIVATE.
    """

    query: Query
    door: Door
    clients: Population
    fingerprint: str
    program: str
    captured: list[str]
    content: str
    broadcast: OwnBroadcast
    states: Any = None  # `client_states.ClientStates`
    noise: Any = None  # `correlated_noise.NoiseStream`, once one is drawn
    _asked: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of(
        cls, query: Query, broadcast: PyTree, population: Population, kept: Kept = (None, 0, b"")
    ) -> "PreparedQuery":
        """Traces the client function and checks its flow of information; nothing is compiled.

        Args:
          broadcast: only shapes and dtypes are used.
          kept: where the states of clients are, if they have any.

        Raises:
          InformationLeak: as `information_flow.check_release`.
          InputError: the query does not fit the data.
          CorruptFile: as `ClientStates`.
        """
        found = population
        if query.prepare is not None:
            # Seldom used, and therefore loaded here.
            from jaxpfl.federated.release.preparation import prepared

            found = prepared(query, population)
        columns = read_columns(query, found)
        require_room(query, columns)
        door, client = opened(query, broadcast, columns)
        # From here on, these are the only programs of this query: checked, hashed and run.
        programs, captured = door.programs(broadcast, columns), query.captured
        if not query.plan.unchecked:
            # Before anything is lowered, for which JAX may call what a client function brings.
            flow = check_release(query, door, client, broadcast, columns)
            captured = list(dict.fromkeys([*captured, *flow.constants]))
        texts = [program.text for program in programs]
        if not query.plan.unchecked:
            require_known_calls(texts, query.execution.platform, query.label)
        program = identity.digest(texts)
        content = origin_hash(columns, found.offsets)
        clients = Population(columns, found.offsets, found.client_ids)
        states = None
        if client.client_state is not None:
            # Seldom used, and therefore loaded here.
            from jaxpfl.federated.release.client_states import ClientStates

            states = ClientStates(kept, clients.client_ids.to_pylist(), client.client_state)
        own = OwnBroadcast(broadcast, shardings(query.client_fn, door.mesh, broadcast))
        given = query, door, clients, population.fingerprint, program, captured, content, own
        return cls(*given, states)

    def described(self, environment: Any) -> str:
        """Everything that the releases depend on, except run and round, as text. PRIVATE."""
        return identity.described(
            self.query, self.program, self.content, self.fingerprint, environment
        )

    @cached_property
    def asked(self) -> dict[str, Any]:
        """What clients are asked, as ledgers and certificates tell it; public.

        What a client function captured is public by declaration: a reader must be able to see it.
        """
        plan = self.query.plan.to_dict()
        # Of FreD, whose units all take part, the number may be private; no charge depends on it.
        if plan["sampling"] == "poisson" and plan["clients_per_round"] == plan["population"]:
            plan |= {"clients_per_round": None, "population": None}
        return {
            "plan": plan,
            "program": self.program,
            "captured": self.captured,
            "flow_checked": not self.query.plan.unchecked,
        }

    def drawn(self, work: Work) -> np.ndarray:
        """The cohort, int64 [units]: clients, or examples in the order of their places. PRIVATE.

        The same in all processes.
        """
        chosen = self.query.plan.sample(work.seed, work.round)
        by_client = self.query.plan.unit == "client"
        return chosen if by_client else shuffled(chosen, work.seed, work.round)

    def sum(self, work: Work, chosen: np.ndarray) -> tuple[Summed, dict[str, Any]]:
        """Packs, clips, sums and adds the noise; in a run of several processes, all call it.

        The broadcast is the one that this process read, or received, last.

        Args:
          chosen: what `drawn` returns.

        Returns:
          The release; and, PRIVATE, "clients", how many took part, or blocks of examples, and
          "padding_waste" of the buckets of this process.
        """
        plan, door = self.query.plan, self.door
        clients = self.clients
        if plan.unit == "example":
            clients = in_blocks(chosen, self.query.cohort.max_examples)
            chosen = np.arange(len(clients))
        cohort = Cohort(
            clients,
            chosen,
            self.query.cohort,
            # As secret as the cohort: shuffles depend on clients' indices, so that with a public
            # seed everyone could compute how the removal of a client reorders the others' batches.
            seed=work.seed,
            round=work.round,
            shards=self.query.execution.replicas,
            blocks=shares(door.mesh),
            states=self.states and self._rows,
        )
        shared = None
        if plan.correlated:
            shared = self._stream(work).noise(work.round)
        everywhere = NamedSharding(door.mesh, PartitionSpec())
        clip_norm, train, shared = put((work.clip_norm, work.train, shared), everywhere)
        keys = Keys(key_from_words(train), np.concatenate([work.noise, work.checksum]))
        self._asked.clear()
        kept: list[PyTree] = []
        filled = cohort if clients is self.clients else self._filled(cohort)
        with prefetch(filled) as buckets:
            summed = door(self.broadcast.placed(), buckets, clip_norm, keys, shared, kept.append)
        if self.states is not None:
            self._keep(work.round, kept)
        return summed, {"clients": len(chosen), "padding_waste": cohort.padding_waste}

    def _filled(self, blocks: Cohort) -> Iterator[Bucket]:
        """The buckets with examples in place of their numbers."""
        columns = self.clients.numeric()
        for bucket in blocks:
            rows, mask = bucket.batches[_NUMBERS], bucket.mask
            batches = {name: gather(column, rows, mask) for name, column in columns.items()}
            yield bucket._replace(batches=batches)

    def _rows(self, clients: np.ndarray) -> tuple[PyTree, np.ndarray]:
        assert self.states is not None
        self._asked.append(clients)
        return self.states.rows(clients)

    def _keep(self, round: int, kept: list[PyTree]) -> None:
        """Writes the next states of all buckets, whose clients `_rows` has noted."""
        assert self.states is not None
        asked: Any = self._asked
        if several():
            # A process has what its own devices computed, and process 0 keeps all.
            slots = [put_shares(each, self.door.mesh) for each in asked]
            asked, kept = whole((slots, kept))
            if not leads():
                return
        slots = np.concatenate(asked or [np.empty(0, np.int64)])
        real = slots >= 0
        if not kept:
            kept = [self.states.rows(slots)[0]]
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves)[real], *jax.device_get(kept))
        self.states.write(round, slots[real], rows)

    def _stream(self, work: Work) -> Any:
        from jaxpfl.privacy.correlated_noise import NoiseStream

        if self.noise is None:
            plan, root = self.query.plan, key_from_words(work.shared)
            self.noise = NoiseStream(plan.bands, root, self.door.coordinates, plan.exact)
        return self.noise


def opened(
    query: Query, broadcast: PyTree, columns: Mapping[str, Any]
) -> tuple[Door, TracedClient]:
    """The door of a query, and its client function as traced for one client."""
    client = identity.traced(query, broadcast, columns)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(client.contribution)}
    if query.plan.unit == "example" and dtypes != {"float32"}:
        raise InputError(
            f"with unit = 'example' the client function of query {query.label!r} must return sums "
            f"in float32, which rounds little, found {', '.join(sorted(dtypes))}"
        )
    alone = not query.plan.unchecked and needs_alone(client.jaxpr, query.execution.platform)
    return Door(query, client.contribution, client.client_state, alone), client


def in_blocks(chosen: np.ndarray, size: int) -> Population:
    """The numbers of the chosen examples in blocks of `size`, of which the last alone has room.

    So one example more takes a place, whose holder moves to the end, and two blocks change: see
    `release.rounding`.
    """
    number = -(-len(chosen) // size)
    edges = np.minimum(np.arange(number + 1) * size, len(chosen))
    return Population({_NUMBERS: chosen}, edges, [str(block) for block in range(number)])
