"""`jaxpfl.release`: one noisy sum over clients, without an algorithm."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpfl import checks
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.columns import warn_of_numbers
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import ClientFn, PyTree, Stepping
from jaxpfl.federated.mesh import leads, several
from jaxpfl.federated.release.query import Execution, Query
from jaxpfl.federated.release.releaser import OneRelease, OtherProcesses, Releaser
from jaxpfl.privacy.ledger import Budget, Ledger, guarantee_of
from jaxpfl.privacy.plan import Plan


def release(
    client_fn: ClientFn,
    clients: Population,
    plan: Plan,
    *,
    ledger: str | Path,
    broadcast: PyTree = (),
    cohort: CohortSpec | None = None,
    label: str = "release",
    budget: Budget | None = None,
) -> OneRelease:
    """Makes one release of `clients`: charges the ledger, samples, clips, sums and adds the noise.

    Called again, it makes and charges another one. Several processes that `jax.distributed` joined
    share one if all call this alike: process 0 alone uses `ledger`, and all return the release.

    Args:
      client_fn: what one client computes, by steps or whole, see `clients.client`. It is traced
        with abstract shapes, and its flow of information checked, before anything is charged.
      clients: as many as the plan's population.
      plan: of one round.
      ledger: file that the release is charged to; made if absent.
      broadcast: public pytree of arrays that every client gets.
      cohort: how a client's examples are capped and batched; by default batches of 32, at most 256.
      label: names the release in the ledger.
      budget: hard limit of the whole ledger.

    Raises:
      InformationLeak: the client function does something else than compute, such as a callback.
      InputError: an argument is of another kind, the plan has several rounds or another population,
        or the client function does not fit the data.
      BudgetExhausted: the release does not fit the budget; nothing was released.
    """
    expected = "a function (broadcast, examples, key) -> contribution or ClientSteps"
    if not callable(client_fn) and not isinstance(client_fn, Stepping):
        raise InputError(f"client_fn must be {expected}, found {type(client_fn).__name__}")
    checks.instance("clients", clients, Population, "a Population, see jaxpfl.data.from_clients")
    checks.instance("plan", plan, Plan, "a jaxpfl.Plan")
    if plan.rounds != 1:
        raise InputError(f"the plan of one release must have rounds = 1, found {plan.rounds}")
    usual = CohortSpec(32, 256, clients_per_bucket=32 * Execution().replicas)
    query = Query(label, client_fn, plan, cohort or usual)
    checks.instance("ledger", ledger, (str, Path), "the path of a file")
    warn_of_numbers(clients.numeric())

    opened: Any = None

    def make(others: OtherProcesses | None = None) -> Releaser:
        return Releaser(clients, opened, queries=(query,), processes=others)

    def total() -> str:
        return guarantee_of(opened.charges, plan.delta, plan.unit).statement()

    releaser, stated = make, total
    with ExitStack() as stack:
        if several():
            # Loaded here, because few use it.
            from jaxpfl.federated.hosts import processes, shared_rounds

            stack.enter_context(processes.Group())
            releaser = partial(shared_rounds.releaser, make, clients, (query,))
            stated = partial(processes.decide, "its cost", total)
        if leads():
            opened = Ledger(ledger, clients, budget=budget, unit=plan.unit)
            stack.enter_context(opened)
        released = releaser().release(query, broadcast, round=1)
        return OneRelease(jax.device_get(released.value), plan.statement(), stated())
