"""The release: the one object that charges, samples, sums, noises and records.

    identity  a hash, under the run's secret, of everything a release depends on (see `identity`)
    charge    first, on the ledger and on the disk; the same identity is charged only once
    sample    a cohort, a secret draw, a function of (secret, identity)
    sum       the door: clients in a scan over chunks, sharded over devices; clip; sum
    noise     its key is a function of (secret, identity, the exact sum)
    record    the release's name, in the ledger; a replay with another result is charged again

An algorithm never sees a cohort. Its step gets a `Release`, which is its only access to clients:
it asks one of the algorithm's queries and gets the noisy sum. Nothing in it refers to the clients'
data.

Second releases. A replayed round (of a resumed run, or in a copied run directory) with the same
identity draws the same cohort. If its sum is the same to the bit, so is the release, which costs
nothing. If not, for an unknown reason, it is a second release on the SAME secret cohort, which
amplification by sampling does not cover: it is charged by `Plan.released_again_event`. A replay
with another identity (client function, plan, machine, flag, version or data) draws a cohort of its
own and is charged as a round of its own.

Noise that several rounds share (`privacy.correlated_noise`) cannot depend on one sum, but only on
the identity. A run whose identity changed, or a replay with another result, is then refused.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from dp_accounting import DpEvent

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.mesh import PyTree, require_one_process, shardings
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.prepared_query import Kept, PreparedQuery, Summed, Work
from jaxpfl.federated.release.query import Query, arrays, require_population
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.secret import RunSecret
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


class Others(Protocol):
    """The other processes of a run, which sum every release with this one.

    A releaser is handed them (`hosts.shared_rounds`) and knows of no other way to reach them.

    Attributes:
      environment: of all processes, as identities of releases have it.
    """

    environment: Any

    def prepared(
        self, number: int, query: Query, broadcast: PyTree, population: Population, kept: Kept
    ) -> PreparedQuery:
        """As `PreparedQuery.of`, of query `number`, once all processes agree on it."""
        ...

    def sum(
        self, prepared: PreparedQuery, broadcast: PyTree, work: Work
    ) -> tuple[Summed, dict[str, Any]]:
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


@dataclass(frozen=True)
class _Pending:
    """A release that is not recorded yet, because the device may still compute its name."""

    query: Query
    label: str
    round: int
    identity: str
    name: jax.Array


@dataclass(eq=False)
class _Round:
    """An open round of a releaser, in which each query may be asked once."""

    releaser: "Releaser"
    round: int
    asked: list[Query] = field(default_factory=list)

    def ask(self, query: Query, broadcast: PyTree, clip_norm: jax.Array | None) -> Released:
        if any(query is each for each in self.asked):
            raise InputError(
                f"query {query.label!r} was already asked in round {self.round}: its stated cost "
                "is for one release per round"
            )
        self.asked.append(query)
        return self.releaser.release(query, broadcast, round=self.round, clip_norm=clip_norm)


# Weak references, so that rounds, and with them the clients' data, only live as long as their step.
_OPEN: "weakref.WeakValueDictionary[int, _Round]" = weakref.WeakValueDictionary()


class Releaser(AbstractContextManager["Releaser"]):
    """Makes releases of one population, for one run.

    It is a context manager, and records all releases at its end.

    Args:
      population: the clients. PRIVATE.
      ledger: of these clients, open.
      secret: of the run.
      run: names the run in the ledger and in identities; public.
      name: of the ledger's entries; None = each query's label.
      queries: the only ones that may be asked; None = any.
      warn: is called with a sentence if a replayed round has another result.
      observe: is called after each release with {"round", "clients", "padding_waste"}. PRIVATE.
      others: the other processes of the run, which wait for its rounds; None = there are none.
      kept: where clients' states are, and after which round, see `client_states`; by default for
        this object's lifetime.

    Raises:
      InputError: the ledger has other clients or another unit, a query's plan is for another
        population, or there are other processes, and `others` is None.
    """

    def __init__(
        self,
        population: Population,
        ledger: Ledger,
        secret: RunSecret,
        *,
        run: str,
        name: str | None = None,
        queries: Sequence[Query] | None = None,
        warn: Callable[[str], None] = lambda message: None,
        observe: Callable[[dict[str, Any]], None] = lambda record: None,
        others: Others | None = None,
        kept: tuple[Path | None, int] = (None, 0),
    ) -> None:
        self.ledger = ledger
        self.run = run
        self._population = population
        self._secret = secret
        self._name = name
        self._queries = None if queries is None else tuple(queries)
        self._warn = warn
        self._observe = observe
        self._kept = (*kept, secret.words_of("names", "").tobytes())
        self._prepared: dict[Any, PreparedQuery] = {}
        self._next_clip_norm: dict[int, jax.Array] = {}
        self._pending: list[_Pending] = []
        if others is None:
            require_one_process("a Releaser of its own", "call jaxpfl.run or jaxpfl.release")
        self._others = others
        self._environment = identity.environment() if others is None else others.environment
        if not ledger.covers(population):
            raise InputError(
                f"{ledger.path}: is the ledger of another population: all releases of the same "
                "clients must be charged to one ledger"
            )
        for query in self._queries or ():
            self._check(query)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.confirm()

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
        """Charges and makes one release; see `Release`.

        Returns as soon as the work is dispatched, and records the releases of earlier rounds. A
        round must not be published before it is recorded; `confirm` records the rest.

        Raises:
          InputError: the round is not in the plan, the query does not fit the data, or it was asked
            in this round before and that release is not yet recorded.
          BudgetExhausted: this release, or an earlier replay with another result, does not fit the
            budget.
        """
        broadcast = arrays(query, broadcast)
        plan = query.plan
        number = plan.charge_number(round)
        cyclic = plan.sampling == "cyclic"
        first_round = (number - 1) * plan.rounds_per_epoch + 1 if cyclic else number
        prepared = self._prepare(query, broadcast)
        clip = self._clip_norm(query, clip_norm)
        label = self._label(query)
        started = f"{prepared.described(self._environment)} {self.run} {query.label}"
        self._require_same_noise(query, started, number, round)
        states = "" if prepared.states is None else prepared.states.before(round)
        if cyclic or plan.correlated:
            states = ""  # because several rounds share a cohort, or their noise
        released = f"{started} {round} {states}".rstrip()
        record = self._secret.digest("record", released)
        # Its charge, if the result is another, would wait for a `confirm` that may never come.
        if any(each.identity == record for each in self._pending):
            raise InputError(
                f"query {query.label!r} was already asked in round {round}, and its stated cost is "
                "for one release per round: call `confirm` before it is asked again"
            )
        self.ledger.charge(
            plan.charge_event(),
            label,
            run=self.run,
            round=first_round,
            identity=self._secret.digest("charge", f"{started} {number} {states}".rstrip()),
            query=prepared.asked,
        )
        work = Work(
            round=round,
            clip_norm=clip,
            # With cyclic participation, a client has the same place in all epochs.
            cohort=self._secret.words_of("cohort", started if cyclic else released),
            train=self._secret.words_of("train", released),
            noise=self._secret.words_of("noise", released),
            checksum=self._secret.words_of("checksum", released),
            shared=self._secret.words_of("shared noise", started),
        )
        if self._others is None:
            places = shardings(query.client_fn, prepared.door.mesh, broadcast)
            broadcast = jax.device_put(broadcast, places)
            summed, facts = prepared.sum(broadcast, work, prepared.drawn(work))
        else:
            summed, facts = self._others.sum(prepared, broadcast, work)
        self._observe({"round": round, **facts})
        self.confirm(before=round)
        self._pending.append(_Pending(query, label, round, record, summed.name))
        if plan.correlated:
            # Recorded at once, so that no second sum with the same noise is ever published.
            self.confirm()
        self._next_clip_norm[id(query)] = summed.clip_norm
        return Released(summed.value, summed.clip_norm)

    def charge_secure_sum(self, prepared: PreparedQuery, event: DpEvent) -> None:
        """Charges a sum to which clients add the noise themselves, for `secure_release` alone.

        Raises:
          InputError: the query's plan is for another population or unit.
          BudgetExhausted: the sum does not fit the budget.
        """
        query = prepared.query
        self._check(query)
        described = f"{prepared.described(self._environment)} {self.run} {query.label} {event}"
        name = self._secret.digest("secure sum", described)
        self.ledger.charge(event, self._label(query), run=self.run, round=1, identity=name)

    def confirm(self, before: int | None = None) -> None:
        """Records releases, and charges replays with another result than was recorded.

        It waits for the device. Until it returns, a release must not leave the process.

        Args:
          before: only the releases of rounds before this one; None = all.

        Raises:
          BudgetExhausted: a second release does not fit the budget, and must not be published.
          InputError: a replay with noise that rounds share has another sum than before.
        """
        while self._pending and (before is None or self._pending[0].round < before):
            self._record(self._pending[0])
            # Removed last, so that a release that exceeds the budget stays unconfirmed.
            del self._pending[0]

    @property
    def client_states(self) -> list[Any]:
        """The `ClientStates` of each query whose clients keep something. PRIVATE."""
        return [each.states for each in self._prepared.values() if each.states is not None]

    def _record(self, made: _Pending) -> None:
        words = np.asarray(made.name)
        name = "".join(f"{int(word):08x}" for word in words)
        recorded = self.ledger.recorded(made.identity)
        if recorded == name:
            return
        if recorded is None:
            self.ledger.record(made.identity, name)
            return
        plan = made.query.plan
        if plan.correlated:
            raise InputError(
                f"round {made.round} of {made.label!r} was replayed, and its result is not the "
                "recorded one. Its noise is shared between rounds, so that a second release would "
                "reveal it: nothing is released, and the run cannot go on here"
            )
        self._warn(
            f"round {made.round} of {made.label!r} was replayed and its release is not the one "
            "recorded before: it is charged as a second release on the same cohort, without "
            "amplification"
        )
        self.ledger.charge(
            plan.released_again_event(),
            f"{made.label} released again",
            run=self.run,
            round=made.round,
            identity=self._secret.digest("again", f"{made.identity} {name}"),
        )

    def _check(self, query: Query) -> None:
        plan = query.plan
        if self.ledger.unit != plan.unit:
            raise InputError(
                f"the ledger protects each {self.ledger.unit}, query {query.label!r} each "
                f"{plan.unit}: they must protect the same unit"
            )
        require_population(query, self._population)

    def _prepare(self, query: Query, broadcast: PyTree) -> PreparedQuery:
        """What is kept of the query; traces the client function before anything is charged."""
        places = [i for i, each in enumerate(self._queries or ()) if each is query]
        if self._queries is not None and not places:
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
            given = query, broadcast, self._population, self._kept
            if self._others is None:
                prepared = PreparedQuery.of(*given)
            else:
                prepared = self._others.prepared(places[0], *given)
            # It keeps the query alive, so that no other object gets its id.
            self._prepared[key] = prepared
        return prepared

    def _clip_norm(self, query: Query, clip_norm: jax.Array | None) -> jax.Array:
        if clip_norm is None:
            return jnp.float32(query.plan.clip_norm)
        if query.plan.adaptive_clip is None:
            which = "has a constant clip norm: clip_norm is for adaptive clipping only"
            raise InputError(f"query {query.label!r} {which}")
        if clip_norm is self._next_clip_norm.get(id(query)):
            return clip_norm  # which the device may still compute
        shape, dtype = np.shape(clip_norm), getattr(clip_norm, "dtype", type(clip_norm).__name__)
        found = f"{dtype}{list(shape)}"
        if found == "float32[]" and 0 < float(clip_norm) < np.inf:
            return clip_norm
        raise InputError(
            f"query {query.label!r}: clip_norm must be that of the last release, a float32 scalar "
            f"that is positive and finite, found {clip_norm if found == 'float32[]' else found}"
        )

    def _label(self, query: Query) -> str:
        """What a query's charges are called in the ledger."""
        found, alone = self._name or query.label, len(self._queries or ()) == 1
        if self._name is not None and not alone:
            found = f"{self._name} {query.label}"
        return f"{found} ({SIMULATED})" if query.plan.simulates else found

    def _require_same_noise(self, query: Query, started: str, number: int, round: int) -> None:
        """Refuses to go on with correlated noise if the identity is not that of round 1."""
        plan = query.plan
        if round == 1 or not plan.correlated:
            return
        first = self._secret.digest("charge", f"{started} {plan.charge_number(1)}")
        if not self.ledger.charged(first):
            raise InputError(
                "the noise of this run is correlated between rounds, so that the data, the client "
                "function, the plan, the versions, the devices, the processor and the flags of XLA "
                "must be those of its first round"
            )
