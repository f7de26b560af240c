"""What a client sends is the same, bit for bit, whoever else takes part: every system's queries.

`tests/federated/test_own_data_alone.py` shows it of whatever a client function is handed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.data import Population
from jaxpfl.federated import Execution, Released, client_mesh
from jaxpfl.federated.release.identity import traced
from jaxpfl.federated.release.preparation import prepared
from jaxpfl.federated.release.query import read_columns
from tests.algorithms.systems import every_system
from tests.federated.cohorts import sum_of_all
from tests.federated.own_functions import of_self
from tests.trees import assert_same


# The models of three take seconds to compile.
@every_system("fed_avg_gan", "popri", "private_evolution")
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
            fn = of_self(query.client_fn)
            for chunk in (1, 4):
                execution = Execution(client_mesh(1), chunk)
                settings = query.cohort, execution, broadcast, 1e12
                alone, beside = (
                    sum_of_all(fn, c, *settings) for c in (held.select([chosen]), held)
                )
                assert_same(beside, alone)
                assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(alone))
        columns = read_columns(query, prepared(query, clients))
        shapes = traced(query, broadcast, columns).contribution
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
        return Released(zeros, jnp.float32(query.plan.clip_norm))

    algorithm.step(algorithm.init(jax.random.key(0)), release, 1)
