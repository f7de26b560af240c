"""What a client sends is the same, bit for bit, whoever else takes part: every system's queries.

`tests/federated/test_own_data_alone.py` shows it of whatever a client function is handed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.data import Population
from jaxpfl.data.cohort import Cohort
from jaxpfl.federated import ClientSteps, Execution, Query, Released, client_mesh
from jaxpfl.federated.release.door import Door
from jaxpfl.federated.release.identity import traced
from jaxpfl.federated.release.query import prepared, read_columns
from tests.algorithms.systems import SYSTEMS
from tests.federated.cohorts import keys, no_noise

# Their models take seconds to compile.
LONG = ("fed_avg_gan", "popri", "private_evolution")
NO_CLIP = 1e12


def of_one(client_fn):
    """A system's client function, with a contribution of zero of all clients but one."""

    def step(broadcast, state, batch, mask, key):
        own = {name: column for name, column in batch.items() if name != "self"}
        found = client_fn.step(broadcast, state[1], own, mask, key)
        return state[0] | jnp.any(batch["self"] & mask), found

    def finish(broadcast, state):
        found = client_fn.finish(broadcast, state[1])
        return jax.tree.map(lambda leaf: jnp.where(state[0], leaf, jnp.zeros_like(leaf)), found)

    return ClientSteps(
        lambda broadcast, key: (jnp.bool_(False), client_fn.init(broadcast, key)), step, finish
    )


def sent(query, clients, broadcast, execution):
    """What the client with the column "self" sends."""
    count = len(clients)
    plan = no_noise(population=count, clients_per_round=count, clip_norm=NO_CLIP)
    asked = Query("q", of_one(query.client_fn), plan, query.cohort, execution=execution)
    columns = read_columns(query, clients) | {"self": clients.columns["self"]}
    door = Door(asked, traced(asked, broadcast, columns).contribution)
    buckets = Cohort(clients, np.arange(count), asked.cohort, seed=7, round=1)
    return jax.device_get(door(broadcast, buckets, jnp.float32(NO_CLIP), keys()).value)


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(system, id=name, marks=pytest.mark.long if name in LONG else ())
        for name, system in SYSTEMS.items()
    ],
)
def test_what_a_client_sends_is_the_same_beside_others(system):
    """TRUST 41: alone, and among all others, whose sizes decide the bucket's shape."""
    algorithm, clients = system()

    def release(query, broadcast=(), *, clip_norm=None):
        held, broadcast = prepared(query, clients), jax.device_get(broadcast)
        if query.plan.unit == "client":
            sizes, given = held.sizes(), clients.sizes()
            # Of the smallest, so that others are the largest of its bucket.
            chosen = int(np.argmin(np.where(given > 0, given, given.max() + 1)))
            own = np.repeat(np.arange(len(held)) == chosen, sizes)
            columns = {**read_columns(query, held), "self": own}
            held = Population(columns, held.offsets, held.client_ids)
            for chunk in (1, 4):
                execution = Execution(client_mesh(1), chunk)
                alone, beside = (
                    sent(query, held.select(which), broadcast, execution)
                    for which in ([chosen], list(range(len(held))))
                )
                jax.tree.map(np.testing.assert_array_equal, beside, alone)
                assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(alone))
        shapes = traced(
            query, broadcast, read_columns(query, prepared(query, clients))
        ).contribution
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        return Released(zeros, jnp.float32(query.plan.clip_norm))

    algorithm.step(algorithm.init(jax.random.key(0)), release, 1)
