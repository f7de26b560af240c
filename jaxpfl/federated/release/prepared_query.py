"""A query at work: its clients, programs and door, and its sum, for `federated.release.releaser`.

`hosts.shared_rounds` computes the same sum in the other processes of a run that has several.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.data.cohort import Bucket, Cohort, gather, prefetch
from jaxpfl.data.content import origin_hash
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import PyTree, TracedClient
from jaxpfl.federated.flow.client_program import needs_alone
from jaxpfl.federated.mesh import leads, put, put_shares, several, shardings, shares, whole
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.broadcast import OwnBroadcast
from jaxpfl.federated.release.door import Door, Keys, Summed
from jaxpfl.federated.release.information_flow import check_release
from jaxpfl.federated.release.program import require_known_calls
from jaxpfl.federated.release.query import Query, read_columns, require_room
from jaxpfl.privacy.keys import key_from_words
from jaxpfl.privacy.participation import shuffled

StatesAt = tuple[Path | None, int, bytes]
"""The folder of clients' states, the round after which to read them, the key of names. SECRET."""

_NUMBERS = "example"


class Work(NamedTuple):
    """A round's number, clip norm and secrets: all that a release needs besides the query. SECRET.

    Attributes:
      cohort, train, noise, checksum, shared: uint32 [4], see `privacy.keys`; `shared` is of local
        noise, where clients add it.
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
        """Seeds the cohort, the order of its examples and their subsets; 128 bits."""
        return int.from_bytes(self.cohort.tobytes(), "big")


@dataclass
class PreparedQuery:
    """A query that was traced and checked, with its clients.

    Attributes:
      clients: with the columns that the client function reads. PRIVATE.
      program: the SHA-256 of the programs that train and sum clients, one for each shape of a
        bucket, as JAX lowers them.
      captured: the numbers that its functions and its programs hold, by name or line, and kind.
      content: the SHA-256 of `clients`. PRIVATE.
      broadcast: this process's copy of the broadcast.
      states: the clients' states between rounds; None = they have none. PRIVATE.
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
    noise: Any = None  # `correlated_noise.stream_of`, once one is drawn
    _slots: list[np.ndarray] = field(default_factory=list)  # each bucket's clients

    @classmethod
    def of(
        cls,
        query: Query,
        broadcast: PyTree,
        population: Population,
        states_at: StatesAt = (None, 0, b""),
    ) -> "PreparedQuery":
        """Traces the client function and checks its flow of information; nothing is compiled.

        Args:
          broadcast: only shapes and dtypes are used.
          states_at: is read if clients keep states.

        Raises:
          InformationLeak: as `information_flow.check_release`.
          InputError: the query does not fit the data.
          CorruptFile: as `ClientStates`.
        """
        clients = population
        if query.prepare is not None:
            # Seldom used, and therefore loaded here.
            from jaxpfl.federated.release.preparation import prepared

            clients = prepared(query, population)
        columns = read_columns(query, clients)
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
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        program = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        content = origin_hash(columns, clients.offsets)
        clients = Population(columns, clients.offsets, clients.client_ids)
        states = None
        if client.client_state is not None:
            # Seldom used, and therefore loaded here.
            from jaxpfl.federated.release.client_states import ClientStates

            states = ClientStates(states_at, clients.client_ids.to_pylist(), client.client_state)
        own = OwnBroadcast(broadcast, shardings(query.client_fn, door.mesh, broadcast))
        fingerprint = population.fingerprint
        return cls(query, door, clients, fingerprint, program, captured, content, own, states)

    def described(self, environment: Any) -> str:
        """Everything that the releases depend on, except run and round, as text. PRIVATE."""
        return identity.described(
            self.query, self.program, self.content, self.fingerprint, environment
        )

    @cached_property
    def ledger_entry(self) -> dict[str, Any]:
        """The query as ledgers and certificates describe it; public.

        What a client function captured is public by declaration: a reader must be able to see it.
        """
        plan, n = self.query.plan.to_dict(), self.query.plan.clients_per_round
        # All of FreD's units take part. Their number may be private, and no charge depends on it.
        if plan["sampling"] == "poisson" and n == plan["population"] and "trust" not in plan:
            plan |= {"clients_per_round": None, "population": None}
        return {
            "plan": plan,
            "program": self.program,
            "captured": self.captured,
            "flow_checked": not self.query.plan.unchecked,
        }

    def drawn(self, work: Work) -> np.ndarray:
        """The cohort, int64 [units]: clients, or examples in the order of their places. PRIVATE.

        All processes draw the same.
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
          The release; and, PRIVATE, the "query", "clients", the number of clients (or blocks of
          examples) that took part, of "coordinates" each, and "padding_waste" of the buckets of
          this process.
        """
        plan, door, clients = self.query.plan, self.door, self.clients
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
            if self.noise is None:
                from jaxpfl.privacy.correlated_noise import stream_of

                self.noise = stream_of(plan, key_from_words(work.shared), door.coordinates)
            shared = self.noise.noise(work.round)
        everywhere = NamedSharding(door.mesh, PartitionSpec())
        words = np.stack([work.train, work.shared]) if plan.local else work.train
        clip_norm, train, shared = put((work.clip_norm, words, shared), everywhere)
        keys = Keys(key_from_words(train), np.concatenate([work.noise, work.checksum]))
        self._slots.clear()
        states: list[PyTree] = []
        filled = cohort if clients is self.clients else self._filled(cohort)
        with prefetch(filled) as buckets:
            summed = door(self.broadcast.placed(), buckets, clip_norm, keys, shared, states.append)
        if self.states is not None:
            self._keep(work.round, states)
        facts = {"query": self.query.label, "clients": len(chosen), "coordinates": door.coordinates}
        return summed, {**facts, "padding_waste": cohort.padding_waste}

    def _filled(self, blocks: Cohort) -> Iterator[Bucket]:
        """The buckets with examples in place of their numbers."""
        columns = self.clients.numeric()
        for bucket in blocks:
            rows, mask = bucket.batches[_NUMBERS], bucket.mask
            batches = {name: gather(column, rows, mask) for name, column in columns.items()}
            yield bucket._replace(batches=batches)

    def _rows(self, clients: np.ndarray) -> tuple[PyTree, np.ndarray]:
        self._slots.append(clients)
        return self.states.rows(clients)

    def _keep(self, round: int, states: list[PyTree]) -> None:
        """Writes the next states of all buckets, whose clients `_rows` has noted."""
        parts: Any = self._slots
        if several():
            # A process has the states that its own devices computed, and process 0 keeps all.
            parts = [put_shares(part, self.door.mesh) for part in parts]
            parts, states = whole((parts, states))
            if not leads():
                return
        slots = np.concatenate(parts or [np.empty(0, np.int64)])
        real = slots >= 0
        if not states:
            states = [self.states.rows(slots)[0]]
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves)[real], *jax.device_get(states))
        self.states.write(round, slots[real], rows)


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

    One more example takes a place, whose holder moves to the end. So two blocks change: see
    `release.example_rounding`.
    """
    number = -(-len(chosen) // size)
    edges = np.minimum(np.arange(number + 1) * size, len(chosen))
    return Population({_NUMBERS: chosen}, edges, [str(block) for block in range(number)])
