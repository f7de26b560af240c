"""What is proven of every system's programs: they tell nothing of clients but noisy sums."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpfl.federated import Released, check_information_flow
from jaxpfl.federated.release import identity
from jaxpfl.federated.release.query import read_columns
from tests.algorithms.systems import every_system


def with_chunk(query, chunk):
    """The query with so many clients side by side; None = as it is."""
    if chunk is None:
        return query
    cohort = dataclasses.replace(query.cohort, clients_per_bucket=64)
    execution = dataclasses.replace(query.execution, chunk=chunk)
    return dataclasses.replace(query, cohort=cohort, execution=execution)


# The models of two take seconds to trace.
@every_system("fed_avg_gan", "popri")
@pytest.mark.parametrize("chunk", [None, 1, 32])
def test_every_query_of_a_system_tells_nothing_but_its_noisy_sum(system, chunk):
    """The first round of each: its step gets zeros instead of releases."""
    algorithm, clients = system()
    asked = []

    def release(query, broadcast=(), *, clip_norm=None):
        found = check_information_flow(with_chunk(query, chunk), clients, broadcast)
        prepared = clients if query.prepare is None else query.prepare(clients)
        columns = read_columns(query, prepared)
        shapes = identity.traced(query, broadcast, columns).contribution
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        # No more and no less than the sum.
        assert len(found.noisy) == len(jax.tree.leaves(zeros))
        assert found.bounded_by_client == (query.plan.unit == "example")
        asked.append(query)
        return Released(zeros, jnp.float32(query.plan.clip_norm))

    algorithm.step(algorithm.init(jax.random.key(0)), release, 1)
    assert asked == list(algorithm.queries)
