"""`jaxpfl.secure_release`: one sum as clients with secure aggregation would compute it. SIMULATED.

The counterpart of `jaxpfl.release`, in which a trusted server adds the noise: here each client adds
a share of it, and the server learns the sum of the messages alone (`privacy.secure_sum`). Updates
are computed as in every release, and the rest on the host, client by client.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxpfl import checks
from jaxpfl.data.cohort import Bucket, Cohort, CohortSpec
from jaxpfl.data.columns import warn_of_numbers
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import (
    ClientFn,
    Examples,
    PyTree,
    Static,
    contribution,
    keys_of,
)
from jaxpfl.federated.mesh import client_mesh, require_one_process
from jaxpfl.federated.release.information_flow import check_client
from jaxpfl.federated.release.prepared_query import PreparedQuery
from jaxpfl.federated.release.program import Program, require_known_calls
from jaxpfl.federated.release.query import Execution, Query, arrays
from jaxpfl.federated.release.releaser import OneRelease, Releaser
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.keys import RunSecret
from jaxpfl.privacy.ledger import Budget, Ledger, guarantee_of
from jaxpfl.privacy.mechanisms import cut
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.secure_sum import SecureSum


def secure_release(
    client_fn: ClientFn,
    clients: Population,
    secure: SecureSum,
    *,
    delta: float,
    ledger: str | Path,
    broadcast: PyTree = (),
    cohort: CohortSpec | None = None,
    label: str = "secure release",
    budget: Budget | None = None,
    dropped: int = 0,
) -> OneRelease:
    """Charges the ledger, and returns the sum of all clients' messages, in float64.

    The probability that a coordinate left the range is stated with the guarantee.

    Called again, it makes and charges another release.

    Args:
      client_fn, ledger, broadcast, label, budget: as for `jaxpfl.release`.
      clients: as many as `secure` has; all take part.
      delta: of the stated guarantees, below 1 / clients.
      cohort: as for `jaxpfl.release`, but for the buckets: clients are computed one at a time.
      dropped: this many random clients do not answer after they were asked, to try it out.

    Raises:
      InputError: an argument is of another kind, or more clients drop out than `secure` plans for;
        then the release is charged, because it was begun, but nothing is released.
      BudgetExhausted: the release does not fit the budget; nothing was released.
    """
    require_one_process("jaxpfl.secure_release", "it computes one client at a time")
    checks.instance("clients", clients, Population, "a Population, see jaxpfl.data.from_clients")
    checks.instance("secure", secure, SecureSum, "a jaxpfl.SecureSum")
    checks.non_negative_int("dropped", dropped)
    warn_of_numbers(clients.numeric())
    if secure.clients != len(clients):
        raise InputError(
            f"the secure sum is planned for {secure.clients} clients, the data has another number, "
            "for which its epsilon is not valid"
        )
    plan = Plan(
        rounds=1,
        clip=Clip(secure.clip_norm),
        noise=Noise(secure.noise_multiplier),
        participation=Poisson(secure.clients, secure.clients),
        delta=delta,
    )
    cohort = cohort or CohortSpec(32, 256)
    # One client a bucket, in one shape: how a client's update is rounded must not depend on how
    # many examples others have.
    alone = dataclasses.replace(cohort, clients_per_bucket=1, one_shape=True)
    query = Query(label, client_fn, plan, alone, execution=Execution(client_mesh(1)))
    broadcast = arrays(query, broadcast)
    prepared = PreparedQuery.of(query, broadcast, clients)
    prepared.broadcast.read(broadcast)
    secret = RunSecret()
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), broadcast)
    bucket = prepared.door.bucket(prepared.clients.numeric())
    program = Program(_update.trace(Static(client_fn), like, bucket, secret.key("train", "")))
    check_client(query, program)
    require_known_calls([program.text], query.execution.platform, label)
    width = prepared.door.coordinates
    event = secure.event(width)
    run = secret.digest("run", label)[:12]
    with Ledger(ledger, clients, budget=budget) as opened:
        Releaser(clients, opened, secret, run=run).charge_secure_sum(prepared, event)
        total_P = secure.add(_messages(prepared, program, secure, secret, dropped))
        total = guarantee_of(opened.charges, delta, plan.unit)
    cost = Guarantee(event, delta, "client", "zero_out_one", "rdp")
    overflow = f"; a sum overflows with probability {secure.overflow_probability(width):.1g}"
    value = cut(secure.value(total_P), prepared.door.contribution, np.reshape)
    return OneRelease(value, cost.statement() + overflow, total.statement())


def _messages(
    prepared: PreparedQuery, program: Program, secure: SecureSum, secret: RunSecret, dropped: int
) -> Iterator[np.ndarray]:
    """The message of each client that did not drop out. Only their sum may be released."""
    count = len(prepared.clients)
    generator = np.random.default_rng(secret.seed("dropped", ""))
    missing = set(generator.permutation(count)[:dropped].tolist())
    key, seed = secret.key("train", ""), secret.seed("cohort", "")
    for client in sorted(set(range(count)) - missing):
        chosen, spec = np.array([client]), prepared.query.cohort
        (bucket,) = Cohort(prepared.clients, chosen, spec, seed=seed, round=1)
        update = jax.device_get(program(prepared.broadcast.placed(), bucket, key))
        leaves = [leaf.ravel() for leaf in jax.tree.leaves(update)]
        update_P = np.concatenate(leaves, dtype=np.float64)
        share = np.random.Philox(key=secret.seed("noise share", str(client)))
        yield secure.message(update_P, np.random.Generator(share))


@partial(jax.jit, static_argnames=("client_fn",))
def _update(client_fn: Static, broadcast: PyTree, bucket: Bucket, key: jax.Array) -> PyTree:
    """The contribution of a bucket's one client. PRIVATE."""
    alone = jax.tree.map(lambda leaf: leaf[0], bucket._replace(key=keys_of(key, bucket.key)))
    own_key = jax.random.wrap_key_data(alone.key, impl=jax.random.key_impl(key))
    examples = Examples(alone.batches, alone.mask, alone.steps)
    return contribution(client_fn.function, broadcast, examples, own_key)
