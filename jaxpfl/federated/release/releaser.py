"""The release: the one object that charges, samples, sums, noises and records.

    identity  a hash, under the run's secret, of everything that a release depends on (see
              `identity`), the broadcast and the clip norm included
    charge    the ledger is charged, on the disk, for this identity; once
    sample    a cohort, a secret draw, a function of (secret, identity)
    sum       the door: clients in a scan over chunks, sharded over devices; clip; sum
    noise     its key is a function of (secret, identity, the exact sum)
    record    the release's name is on the disk, and only then is the value handed out

An algorithm never sees a cohort: its step gets a `Release`, which is its only access to clients.

Replays. A round of a resumed run, or of a copied run directory, with the same identity draws the
same cohort.

- Nothing is recorded: nobody saw a value, so whatever the sum is, the replay costs nothing.
- The same name is recorded: it is the same release to the bit, and costs nothing.
- Another name is recorded: the sum differs for an unknown reason. This is a second release on the
  SAME secret cohort, which amplification by sampling does not cover. It is charged by
  `Plan.released_again_event`, on the disk, before it is handed out.

Another identity (broadcast, clip norm, client function, plan, data, machine, flag or version) draws
a cohort of its own and is charged as a round of its own.

The rounds of an epoch share one charge and one assignment of clients to rounds (`Cyclic`), and may
share noise (`privacy.correlated_noise`), which can then follow from the identity alone. These three
have the epoch's identity, which no broadcast is part of. A round's question, the digest of its
broadcast and clip norm, is on the disk before anything is computed, and another question in the
same round is refused. With correlated or local noise, so is a replay with another name.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from dp_accounting import DpEvent

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.mesh import PyTree, require_one_process
from jaxpfl.federated.release import identity as identities
from jaxpfl.federated.release.identity import Identity
from jaxpfl.federated.release.prepared_query import PreparedQuery, StatesAt, Summed, Work
from jaxpfl.federated.release.query import Query, arrays, require_population
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.simulated import SIMULATED


class Released(NamedTuple):
    """The answer to a query; public.

    Attributes:
      value: the noisy SUM of clipped contributions, float32, shaped like one contribution; divide
        by `plan.denominator` for a mean.
      clip_norm: float32 scalar, the clip norm of the next round; it only changes under adaptive
        clipping.
    """

    value: PyTree
    clip_norm: jax.Array


@dataclass(frozen=True)
class OneRelease:
    """One noisy sum without an algorithm, and what it cost; public.

    Attributes:
      value: as of `Released`, numpy float32; of a secure sum, float64.
      privacy: the guarantee of this release alone, in one line.
      ledger: the guarantee of everything that was charged to the ledger, in one line.
    """

    value: PyTree
    privacy: str
    ledger: str = field(repr=False)


class OtherProcesses(Protocol):
    """The other processes of a run, which sum every release with this one.

    A releaser is handed them (`hosts.shared_rounds`) and knows of no other way to reach them.

    Attributes:
      environment: the environments of all processes, for the identities of releases.
      decide: `(label, act)`; the others wait until this process has acted, or raise what it raised.
    """

    environment: Any
    decide: Callable[[str, Callable[[], None]], None]

    def prepared(
        self, query: Query, broadcast: PyTree, population: Population, states: StatesAt
    ) -> PreparedQuery:
        """Prepares a query as `PreparedQuery.of` does, once all processes agree on it."""
        ...

    def sum(self, prepared: PreparedQuery, work: Work | None) -> tuple[Summed, dict[str, Any]]:
        """The sum of a release that was charged, on the devices of this process."""
        ...


class Release:
    """A step's access to clients in one round: `release(query, broadcast)`.

    It only holds a number, and no reference to the clients' data, which stay with the `Releaser`.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(
        self, query: Query, broadcast: PyTree = (), *, clip_norm: jax.Array | None = None
    ) -> Released:
        """Charges the ledger, and returns the noisy sum of the clients' contributions.

        Args:
          query: one of the algorithm's queries; others are refused.
          broadcast: public pytree of arrays that every client gets.
          clip_norm: under adaptive clipping that of the last `Released`; None in the first round.
            It is part of the release's identity, as the broadcast is.

        Raises:
          InputError: the query is not the algorithm's or was already asked in this round, a clip
            norm is given although the plan's is constant, or the round is over.
          BudgetExhausted: the release does not fit the ledger's budget; nothing was released.
        """
        checks.instance("what is asked", query, Query, "one of the algorithm's queries")
        opened = _OPEN.get(self._number)
        if opened is None:
            raise InputError("this round is over: a step must ask clients before it returns")
        return opened.ask(query, broadcast, clip_norm)


@dataclass(eq=False)
class _Round:
    """An open round of a releaser, in which each query may be asked once."""

    releaser: "Releaser"
    round: int
    queries: list[Query] = field(default_factory=list)

    def ask(self, query: Query, broadcast: PyTree, clip_norm: jax.Array | None) -> Released:
        if any(query is earlier for earlier in self.queries):
            raise InputError(
                f"query {query.label!r} was already asked in round {self.round}: its stated cost "
                "is for one release per round"
            )
        self.queries.append(query)
        return self.releaser.release(query, broadcast, round=self.round, clip_norm=clip_norm)


# Weak references, so that rounds, and with them the clients' data, only live as long as their step.
_OPEN: "weakref.WeakValueDictionary[int, _Round]" = weakref.WeakValueDictionary()


class Releaser(AbstractContextManager["Releaser"]):
    """Makes releases of one population, for one run.

    As a context manager, it lets go of programs, broadcasts and clients' states at its end.

    Args:
      population: the clients. PRIVATE.
      ledger: of these clients, open.
      secret: of the run; None draws one, which goes with this object.
      run: names the run in the ledger and in identities; None takes the secret's public name.
      name: of the ledger's entries; None = each query's label.
      queries: the only ones that may be asked; None = any.
      warn: is called with a sentence if a replayed round has another result.
      observe: is called after each release with the round and what `sum` of `prepared_query` says.
      processes: the other processes of the run, which sum with this one; None = there are none.
      states: the folder of clients' states, and the round after which they are to be read, see
        `client_states`; by default they live as long as this object.

    Raises:
      InputError: the ledger has other clients or another unit, a query's plan is for another
        population, or there are other processes, and `processes` is None.
    """

    def __init__(
        self,
        population: Population,
        ledger: Ledger,
        secret: RunSecret | None = None,
        *,
        run: str | None = None,
        name: str | None = None,
        queries: Sequence[Query] | None = None,
        warn: Callable[[str], None] = lambda message: None,
        observe: Callable[[dict[str, Any]], None] = lambda record: None,
        processes: OtherProcesses | None = None,
        states: tuple[Path | None, int] = (None, 0),
    ) -> None:
        secret = secret or RunSecret()
        self.ledger, self.run = ledger, run or secret.public_name
        self._population, self._secret, self._name = population, secret, name
        self._queries = None if queries is None else tuple(queries)
        self._warn, self._observe = warn, observe
        self._prepared: dict[Any, PreparedQuery] = {}
        if processes is None:
            require_one_process("a Releaser of its own", "call jaxpfl.run or jaxpfl.release")
            self._environment = identities.environment()
        else:
            self._environment = processes.environment
        self._processes = processes
        self._states_at = (*states, secret.words_of("names", "").tobytes())
        if not ledger.covers(population):
            raise InputError(
                f"{ledger.path}: is the ledger of another population: all releases of the same "
                "clients must be charged to one ledger"
            )
        for query in self._queries or ():
            self._check(query)

    def __exit__(self, *_: object) -> None:
        self._prepared.clear()

    def step(self, step: Callable, state: Any, round: int) -> tuple[Any, dict[str, Any]]:
        """Runs one step of an algorithm: `step(state, release, round)`."""
        opened = _Round(self, round)
        number = id(opened)
        _OPEN[number] = opened
        try:
            return step(state, Release(number), round)
        finally:
            del _OPEN[number]

    def release(
        self,
        query: Query,
        broadcast: PyTree = (),
        *,
        round: int,
        clip_norm: jax.Array | None = None,
    ) -> Released:
        """Charges, makes and records one release; see `Release`.

        It waits for the device. When it returns, the release is on the disk: whatever happens to it
        afterwards, it was paid for. When it raises, nothing of the release was handed out.

        Raises:
          InputError: the round is not in the plan, the query does not fit the data, or the release
            would reveal noise that rounds share.
          BudgetExhausted: this release, or a replay with another result, does not fit the budget.
        """
        broadcast = arrays(query, broadcast)
        norm = self._clip_norm(query, clip_norm)
        prepared = self._prepare(query, broadcast)
        digest = prepared.broadcast.read(broadcast)
        question = self._secret.digest("question", f"{digest} {norm.tobytes().hex()}")
        # `before` refuses a round that does not come after the states' last one.
        states = "" if prepared.states is None else prepared.states.before(round)
        run_identity = self._run_identity(prepared)
        release_identity = Identity.of(query.plan, run_identity, f"{question} {states}", round)

        # 1. The charge is on the disk before anybody is drawn.
        def charge() -> None:
            self._charge(prepared, release_identity, round)
            self._bind_to_question(query, release_identity, question, round)

        self._decided("charge", query, round, charge)
        # 2. Sum and noise are computed, and nothing is handed out.
        summed = self._sum(prepared, release_identity, round, norm)
        # 3. The release's name is on the disk, and the charge of another name.
        record = partial(self._record, query, release_identity, summed.name, round)
        self._decided("record", query, round, record)
        # 4. Only now can anybody see the value.
        return Released(summed.value, summed.clip_norm)

    def _decided(self, what: str, query: Query, round: int, act: Callable[[], None]) -> None:
        """Acts; the other processes go on once this is done, or raise what it raises."""
        label = f"the {what} of query {query.label!r} in round {round}"
        return act() if self._processes is None else self._processes.decide(label, act)

    def _run_identity(self, prepared: PreparedQuery) -> str:
        """The part of a release's identity that all rounds of the run share, as text."""
        return f"{prepared.described(self._environment)} {self.run} {prepared.query.label}"

    def _charge(self, prepared: PreparedQuery, identity: Identity, round: int) -> None:
        """Charges the ledger, once for each identity.

        Correlated noise that is not that of round 1 is refused.
        """
        query, plan = prepared.query, prepared.query.plan
        if plan.correlated and round > 1:
            first = self._secret.digest("charge", f"{identity.shared} {plan.charge_number(1)}")
            if not self.ledger.charged(first):
                raise InputError(
                    "the noise of this run is correlated between rounds, so that the data, the "
                    "client function, the plan, the versions, the devices, the processor and the "
                    "flags of XLA must be those of its first round"
                )
        cycle = plan.participation.rounds_per_epoch
        first_round = (plan.charge_number(round) - 1) * cycle + 1
        self.ledger.charge(
            plan.charge_event(),
            self._label(query),
            run=self.run,
            round=first_round if plan.participation.in_epochs else round,
            identity=self._secret.digest("charge", identity.charge),
            query=prepared.ledger_entry,
        )

    def _bind_to_question(
        self, query: Query, identity: Identity, question: str, round: int
    ) -> None:
        """Records what a round of an epoch asks, and refuses another question in this round."""
        if not query.plan.participation.in_epochs:
            return  # The question is part of the identity.
        key = self._secret.digest("asked", identity.release)
        recorded = self.ledger.recorded(key)
        if recorded is None:
            self.ledger.record(key, question)
        elif recorded != question:
            raise InputError(
                f"query {query.label!r} was already asked in round {round} with another broadcast. "
                "The rounds of an epoch share one charge, which is for one question a round: "
                "nothing is released, and the run cannot go on here"
            )

    def _sum(
        self, prepared: PreparedQuery, identity: Identity, round: int, clip_norm: np.float32
    ) -> Summed:
        """The noisy sum, which nobody has seen yet."""
        secret = self._secret
        work = Work(
            round=round,
            clip_norm=clip_norm,
            cohort=secret.words_of("cohort", identity.cohort),
            train=secret.words_of("train", identity.release),
            noise=secret.words_of("noise", identity.release),
            checksum=secret.words_of("checksum", identity.release),
            shared=secret.words_of("shared noise", identity.shared),
        )
        if self._processes is None:
            summed, facts = prepared.sum(work, prepared.drawn(work))
        else:
            summed, facts = self._processes.sum(prepared, work)
        self._observe({"round": round, **facts})
        return summed

    def _record(self, query: Query, identity: Identity, name: jax.Array, round: int) -> None:
        """Records the release's name; another name than was recorded is charged, too."""
        plan, label = query.plan, self._label(query)
        key = self._secret.digest("record", identity.release)
        name_text = "".join(f"{int(word):08x}" for word in np.asarray(name))
        recorded = self.ledger.recorded(key)
        if recorded is None:
            self.ledger.record(key, name_text)
        if recorded in (None, name_text):
            return
        if plan.correlated or plan.local:
            raise InputError(
                f"round {round} of {label!r} was replayed, and its result is not the recorded one. "
                "Its noise is shared, or clients', so that a second release would reveal it: "
                "nothing is released, and the run cannot go on here"
            )
        self._warn(
            f"round {round} of {label!r} was replayed and its release is not the one recorded "
            "before: it is charged as a second release on the same cohort, without amplification"
        )
        self.ledger.charge(
            plan.released_again_event(),
            f"{label} released again",
            run=self.run,
            round=round,
            identity=self._secret.digest("again", f"{key} {name_text}"),
        )

    def charge_secure_sum(self, prepared: PreparedQuery, event: DpEvent) -> None:
        """Charges a sum to which clients add the noise themselves, for `secure_release` alone.

        Raises:
          InputError: the query's plan is for another population or unit.
          BudgetExhausted: the sum does not fit the budget.
        """
        query = prepared.query
        self._check(query)
        identity = self._secret.digest("secure sum", f"{self._run_identity(prepared)} {event}")
        self.ledger.charge(event, self._label(query), run=self.run, round=1, identity=identity)

    @property
    def client_states(self) -> list[Any]:
        """The `ClientStates` of each query whose clients keep something. PRIVATE."""
        return [query.states for query in self._prepared.values() if query.states is not None]

    def _check(self, query: Query) -> None:
        plan = query.plan
        if self.ledger.unit != plan.unit:
            raise InputError(
                f"the ledger protects each {self.ledger.unit}, query {query.label!r} each "
                f"{plan.unit}: they must protect the same unit"
            )
        require_population(query, self._population)

    def _prepare(self, query: Query, broadcast: PyTree) -> PreparedQuery:
        """Prepares a query once; traces the client function before anything is charged."""
        if self._queries is not None and not any(query is allowed for allowed in self._queries):
            raise InputError(
                f"query {query.label!r} is not one of the algorithm's queries, for which its cost "
                "was stated"
            )
        leaves, structure = jax.tree.flatten(broadcast)
        shapes = [(np.shape(leaf), str(leaf.dtype)) for leaf in leaves]
        key = (id(query), structure, tuple(shapes))
        prepared = self._prepared.get(key)
        if prepared is None:
            self._check(query)
            parts = query, broadcast, self._population, self._states_at
            others = self._processes
            prepared = PreparedQuery.of(*parts) if others is None else others.prepared(*parts)
            # It keeps the query alive, so that no other object gets its id.
            self._prepared[key] = prepared
        return prepared

    def _clip_norm(self, query: Query, clip_norm: jax.Array | None) -> np.float32:
        if clip_norm is None:
            return np.float32(query.plan.clip_norm)
        if query.plan.clip.adaptive is None:
            which = "has a constant clip norm: clip_norm is for adaptive clipping only"
            raise InputError(f"query {query.label!r} {which}")
        dtype = getattr(clip_norm, "dtype", type(clip_norm).__name__)
        kind = f"{dtype}{list(np.shape(clip_norm))}"
        if kind == "float32[]" and 0 < float(clip_norm) < np.inf:
            return np.float32(clip_norm)
        raise InputError(
            f"query {query.label!r}: clip_norm must be that of the last release, a float32 scalar "
            f"that is positive and finite, found {clip_norm if kind == 'float32[]' else kind}"
        )

    def _label(self, query: Query) -> str:
        """The label of a query's charges in the ledger."""
        label = query.label
        if self._name is not None:
            label = self._name if len(self._queries or ()) == 1 else f"{self._name} {label}"
        return f"{label} ({SIMULATED})" if query.plan.simulates else label
