"""What was checked is what runs: a trace that nobody read does not run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.federated import ClientSteps
from jaxpfl.federated.release.program import Program
from tests.federated.lowering import lowered_programs
from tests.federated.releases import releasing, sum_by

WEAK = [
    pytest.param(lambda: jnp.asarray(1.0), id="weakly typed"),
    pytest.param(lambda: np.ones((), np.float32), id="an array of NumPy"),
    pytest.param(lambda: 1.0, id="a number"),
]


@pytest.mark.parametrize("how", ["release", "secure_release", "run"])
@pytest.mark.parametrize("broadcast", WEAK)
def test_every_broadcast_of_one_type_runs_the_program_that_was_checked(broadcast, how, tmp_path):
    """A client function can ask for its tracers' types: JAX would trace it again for a weak one."""
    told, types = [], []

    def client_fn(broadcast, examples, key):
        types.append(broadcast.weak_type)
        total = jnp.where(examples.mask, examples.batches["x"], 0).sum()
        if broadcast.weak_type:
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            total = jax.pure_callback(told.append, shape, total, vmap_method="sequential")
        return total * broadcast

    clients = jp.data.from_clients({f"c{i}": {"x": np.float32([i])} for i in range(6)})
    plan = jp.Plan(1, jp.Clip(15.0), jp.Noise(0.01), jp.Poisson(6, 6), 1e-2)
    value = sum_by(how, client_fn, clients, plan, tmp_path / "l", broadcast())
    assert value == pytest.approx(15, abs=1) and not told and set(types) == {False}


def test_a_program_refuses_other_types_than_it_was_traced_for():
    program = Program(jax.jit(lambda x: x * 2).trace(jax.ShapeDtypeStruct((3,), jnp.float32)))
    np.testing.assert_array_equal(program(jnp.ones(3)), np.full(3, 2.0))
    np.testing.assert_array_equal(jax.jit(program)(jnp.ones(3)), np.full(3, 2.0))
    for other in (jnp.ones(4), jnp.ones(3, jnp.int32)):
        with pytest.raises(TypeError):
            program(other)


def test_every_shape_of_a_bucket_is_checked_hashed_and_lowered_before_a_charge(tmp_path):
    """Of a ladder with two rungs, not the largest alone: each is a trace of its own."""
    rungs = []

    steps = ClientSteps(
        lambda broadcast, key: jnp.float32(0),
        lambda broadcast, state, batch, mask, key: state + jnp.where(mask, batch["x"], 0).sum(),
        lambda broadcast, state: state,
    )
    clients = jp.data.from_clients(
        {f"c{i}": {"x": np.ones(1 + 11 * (i == 0), np.float32)} for i in range(4)}
    )
    plan = jp.Plan(2, jp.Clip(15.0), jp.Noise(0.01), jp.Poisson(4, 4), 1e-2)
    spec = jp.CohortSpec(1, 12, clients_per_bucket=2)
    query = jp.Query("sum", steps, plan, spec)
    assert len(spec.rungs) == 2
    with releasing(tmp_path / "l", clients) as releaser, lowered_programs() as names:
        charge = releaser.ledger.charge

        def first(*given, **named):
            rungs.append(sum("accumulate" in name for name in names))
            return charge(*given, **named)

        releaser.ledger.charge = first
        for round in (1, 2):
            value = releaser.release(query, jnp.float32(0), round=round).value
            assert value == pytest.approx(15, abs=1)
    assert rungs == [2, 2]
