"""What a client computes follows from the broadcast, its own examples and its key: nothing else.

An adversary's client function may return anything that it is handed. What it is handed for one
client must be the same, bit for bit, whoever else takes part.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jaxpfl as jp
from jaxpfl.data import from_clients
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated import ClientSteps, Execution, Query, client_mesh
from tests.federated.cohorts import no_noise, sum_of_all
from tests.federated.own_functions import FUNCTIONS, of_self

# Batches of two, and two shapes: which one a bucket has follows from its largest client.
SPECS = {
    "two shapes": CohortSpec(2, 24, clients_per_bucket=32),
    "large buckets": CohortSpec(2, 24, clients_per_bucket=64),
    "two epochs": CohortSpec(2, 12, epochs=2, clients_per_bucket=32),
}
CLIP = 1.0


def exact_sum(client_fn, held, spec, chunk):
    """The sum of everybody's clipped contributions, without noise, through the door."""
    clients = from_clients({name: {"x": np.float32(x)} for name, x in held.items()})
    execution = Execution(client_mesh(1), chunk)
    return np.float64(sum_of_all(client_fn, clients, spec, execution, jnp.float32(1), CLIP))


def clients_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {f"client {i}": 3 * rng.normal(size=n) for i, n in enumerate(sizes)}


QUICK = [("two shapes", 1), ("large buckets", 32)]
LAYOUTS = [
    pytest.param(name, chunk, marks=() if (name, chunk) in QUICK else pytest.mark.long)
    for name in SPECS
    for chunk in (1, 32)
]


@pytest.mark.parametrize("examples", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layout", "chunk"), LAYOUTS)
def test_one_client_moves_the_sum_by_at_most_the_clip_norm(layout, chunk, examples):
    """TRUST 41: drawn client functions in both forms.

    The client may be the bucket's largest, and all others come after it or before it.
    """
    spec, others = SPECS[layout], clients_of([1, 3, 0, 2, 5, 1, 4, 2])

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(FUNCTIONS, st.integers(0, 9), st.sampled_from([0, 1, 16, 40]))
    def check(client_fn, place, size):
        giant = 5 * np.random.default_rng(place).normal(size=size)
        with_it = list(others.items())
        with_it.insert(place, ("giant", giant))
        moved = exact_sum(client_fn, dict(with_it), spec, chunk)
        moved -= exact_sum(client_fn, others, spec, chunk)
        assert np.linalg.norm(moved) <= CLIP * (1 + 1e-5)

    check()


def whole_adversary(broadcast, examples, key):
    """Everything that a whole function is handed, and the shapes of all of it."""
    shapes = [float(size) for each in (examples.batches["x"], examples.mask) for size in each.shape]
    return {
        "x": examples.batches["x"].ravel(),
        "mask": examples.mask.ravel().astype(jnp.float32),
        "steps": examples.steps.astype(jnp.float32),
        "key": jax.random.key_data(key).astype(jnp.float32),
        "shapes": jnp.asarray(shapes),
    }


STEPS = 12


def _seen(batch, mask, key):
    words = jax.random.key_data(key).astype(jnp.float32)
    shape = jnp.asarray([float(mask.shape[0]), float(batch["x"].shape[0])])
    return jnp.concatenate([batch["x"], mask.astype(jnp.float32), words, shape])


stepping_adversary = ClientSteps(
    lambda broadcast, key: (
        jnp.int32(0),
        jax.random.key_data(key).astype(jnp.float32),
        jnp.zeros((2 * STEPS, 2 + 2 + 4 + 2)),
    ),
    # All that was ever handed over, one row a step, and how often.
    lambda broadcast, state, batch, mask, key: (
        state[0] + 1,
        state[1],
        state[2].at[state[0]].set(_seen(batch, mask, key)),
    ),
    lambda broadcast, state: {
        "steps": state[0].astype(jnp.float32),
        "key": state[1],
        "seen": state[2],
    },
)


def contribution_beside(client_fn, others, spec, chunk):
    """What "self" sends, with these others."""
    held = others | {"self": np.float32([1.5, -2.0, 0.25])}
    clients = from_clients(
        {
            name: {"x": np.float32(x), "self": np.full(len(x), name == "self")}
            for name, x in held.items()
        }
    )
    execution = Execution(client_mesh(1), chunk)
    return sum_of_all(of_self(client_fn), clients, spec, execution, (), 1e12)


OTHERS = {
    "nobody": {},
    "small ones": {f"a {i}": np.ones(1, np.float32) for i in range(5)},
    "a giant": {"a giant": np.full(60, 7.0, np.float32)},
    "many": {f"{i}": np.full(i % 13, float(i), np.float32) for i in range(70)},
}


@pytest.mark.parametrize(("layout", "chunk"), LAYOUTS)
@pytest.mark.parametrize("adversary", [whole_adversary, stepping_adversary], ids=["whole", "steps"])
def test_nothing_that_a_client_is_handed_depends_on_others(adversary, layout, chunk):
    """TRUST 41: shapes, steps, mask, values, keys: all of it is sent, and is always the same."""
    expected, *found = (
        contribution_beside(adversary, others, SPECS[layout], chunk) for others in OTHERS.values()
    )
    assert np.any(expected["key"] != 0)
    for each in found:
        jax.tree.map(np.testing.assert_array_equal, each, expected)


def test_whole_functions_get_one_public_shape():
    query = Query("q", whole_adversary, no_noise(), SPECS["large buckets"])
    assert query.cohort.rungs == (STEPS,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"init": lambda broadcast: 0.0}, "init"),
        ({"step": lambda broadcast, state, batch, mask: state}, "step"),
        ({"finish": lambda state: state}, "finish"),
        ({"step": lambda broadcast, state, batch, mask, key: jnp.zeros(3)}, "state"),
        ({"finish": lambda broadcast, state: jnp.int32(1)}, "float"),
    ],
)
def test_steps_that_do_not_fit_together_are_refused_before_a_charge(change, named, tmp_path):
    parts = {
        "init": lambda broadcast, key: jnp.float32(0),
        "step": lambda broadcast, state, batch, mask, key: state + 1,
        "finish": lambda broadcast, state: state,
    }
    clients = from_clients({"a": {"x": np.ones(2)}, "b": {"x": np.ones(1)}})
    plan = jp.Plan(1, jp.Clip(1.0), jp.Noise(1.0), jp.Poisson(2, 1), 1e-2)
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(InputError, match=named):
        jp.release(ClientSteps(**{**parts, **change}), clients, plan, ledger=ledger)
    assert not ledger.exists() or len(jp.Ledger.read(ledger)) == 0
