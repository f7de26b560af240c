"""The interface of an algorithm, and helpers that most algorithms share."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dp_accounting import ComposedDpEvent, DpEvent
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl import checks
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import ClientFn
from jaxpfl.federated.clients.optimizers import require_optimizer
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.federated.release.releaser import Release, Releaser
from jaxpfl.models import base as models
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

State = Any
UNTRAINED = "untrained"


class Algorithm(NamedTuple):
    """A server that asks clients in rounds: functions of a state, and the queries it asks.

    Attributes:
      name: names the algorithm's entries in the ledger.
      init: `(key) -> state`, a pytree of arrays.
      step: `(state, release, round) -> (state, metrics)`, one round. `release` is its only access
        to clients (`federated.Release`), so everything that it returns is public. The state's
        buffers may be donated. Metrics are scalars.
      queries: everything that it will ever ask, so its privacy cost is known before it starts.
        Their plans have equal numbers of rounds. Each query is asked at most once in a round, and
        before the step donates a buffer of its state.
      params: `(state) -> model parameters`; None where there is no model.
      begins_as: names the model of the initial state beside that of the last round.
      model: what the parameters are of, for `jaxpfl export`; None where that is not said.
    """

    name: str
    init: Callable[[jax.Array], State]
    step: Callable[[State, Release, int], tuple[State, Mapping[str, Any]]]
    queries: tuple[Query, ...]
    params: Callable[[State], Any] | None = None
    begins_as: str = UNTRAINED
    model: Any = None

    @property
    def rounds(self) -> int:
        """The number of rounds; `InputError` without a query, or if the plans' numbers differ."""
        rounds = {query.plan.rounds for query in self.queries}
        if len(rounds) != 1:
            what = f"the plans of all queries of {self.name!r} must have the same number of rounds"
            raise InputError(f"{what}, found {sorted(rounds) or 'no query'}")
        return rounds.pop()

    def event(self, rounds: int | None = None) -> DpEvent:
        """Returns the event of the first `rounds` rounds (default: all): every query in each."""
        return ComposedDpEvent([query.plan.event(rounds) for query in self.queries])

    @property
    def private(self) -> bool:
        """Whether every query's plan is private."""
        return all(query.plan.private for query in self.queries)

    def _repr_html_(self) -> str:
        from jaxpfl.printable import facts

        plans = {f"asks {query.label}": query.plan.statement() for query in self.queries}
        return facts(f"Algorithm {self.name}", {"rounds": self.rounds, **plans})


def require_parts(model: object, plan: object, **optimisers: object) -> None:
    """Refuses a model, plan or optimiser of another kind, before a program is compiled."""
    models.require_model(model)
    checks.instance("plan", plan, Plan, "a jaxpfl.Plan")
    for name, optimiser in optimisers.items():
        require_optimizer(name, optimiser)


def update_query(
    model: Any,
    client: ClientFn,
    plan: Plan,
    cohort: CohortSpec | None = None,
    execution: Execution | None = None,
) -> Query:
    """The query for clients' updates of a model: by default batches of 16, at most 256 examples."""
    cohort = CohortSpec(batch_size=16, max_examples=256) if cohort is None else cohort
    if hasattr(client, "optimizer"):
        own: Any = client
        require_optimizer("client", own.optimizer, cohort.max_steps)
    return Query(
        "update",
        client,
        plan,
        cohort,
        columns=None if model.columns is None else tuple(model.columns),
        execution=Execution() if execution is None else execution,
    )


def answered_once(
    name: str,
    label: str,
    client: ClientFn,
    plan: Plan,
    *,
    column: str,
    max_examples: int,
    first: State,
    broadcast: Any = (),
) -> Algorithm:
    """Returns an algorithm of one round, in which all clients take part with so many examples.

    Its state is `first` and then the query's answer.
    """
    per_bucket = 32 * Execution().replicas
    cohort = CohortSpec(min(256, max_examples), max_examples, clients_per_bucket=per_bucket)
    query = Query(label, client, plan, cohort, columns=(column,))

    def step(state, release, round):
        return release(query, broadcast).value, {}

    return Algorithm(name, copied(first), step, (query,))


def placed(query: Query, state: State) -> State:
    """A first state on all devices of a query."""
    mesh = query.execution.devices.local_mesh
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=0)
def server_state(optimizer, params):
    """The server optimiser's first state; compiled once, however often a run begins."""
    return optimizer.init(params)


@partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("params", "state"))
def server_step(optimizer, params, state, release, divisor):
    """The server optimiser on `release / divisor`: parameters, its state, L2 norm of the gradient.

    The divisor of clients' changes of the parameters is negative: their mean points downhill.
    """
    gradient = jax.tree.map(lambda leaf: leaf / divisor, release)
    updates, state = models.updated(optimizer, gradient, state, params)
    return optax.apply_updates(params, updates), state, optax.tree.norm(gradient)


def initial_params(model: Any, start: Any = None) -> Callable[[jax.Array], Any]:
    """Returns `(key) -> parameters`: a copy of `start`, which must fit, or, of None, new ones.

    It is a copy because a step donates the state's buffers, while `start` remains the caller's.
    """
    if start is None:
        return partial(models.initialised, model)
    expected = models.named_leaves(jax.eval_shape(lambda: model.init(jax.random.key(0))))
    models.require_same_leaves(models.schema(models.named_leaves(start)), expected, "start")
    return copied(start)


def copied(start: Any) -> Callable[[jax.Array], Any]:
    """Returns `(key) -> parameters`: a copy of `start` as in `initial_params`, unchecked."""
    return lambda key: jax.tree.map(jnp.array, start)


def releaser_of(
    algorithm: Algorithm,
    clients: Population,
    ledger: Ledger,
    secret: RunSecret | None = None,
    **more: Any,
) -> Releaser:
    """Returns the releaser of an algorithm's queries, under its name; `more` as of `Releaser`."""
    more |= {"name": algorithm.name, "queries": algorithm.queries}
    return Releaser(clients, ledger, secret, **more)


def run_rounds(algorithm: Algorithm, releaser: Releaser, key: jax.Array) -> State:
    """Runs all rounds in memory and returns the last state.

    `jaxpfl.run` adds checkpoints, metrics and a run directory. `BudgetExhausted` if all rounds
    together do not fit the ledger's budget; nothing was released then.
    """
    decide("the budget", lambda: require_affordable(algorithm, releaser.ledger, releaser.run))
    state = algorithm.init(key)
    for round in range(1, algorithm.rounds + 1):
        state, _ = releaser.step(algorithm.step, state, round)
    return state


def require_affordable(algorithm: Algorithm, ledger: Ledger, run: str) -> None:
    """Refuses an algorithm that does not fit the ledger's budget, before clients compute anything.

    A run that was charged before is accepted, because it may make the same releases again.
    """
    begun = any(charge.run == run for charge in ledger.charges)
    if not begun and not ledger.fits(algorithm.event()):
        raise ledger.exhausted(f"all releases of {algorithm.name!r} together")
