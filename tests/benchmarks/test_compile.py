"""What the compile check reads off a program, and that its programs can be traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from benchmarks.compile import reading
from benchmarks.compile.programs import PROGRAMS
from benchmarks.compile.targets import Target


class Here(Target):
    """The machine that the tests run on."""

    def mesh(self, **axes: int) -> Mesh:
        devices, kinds = np.array(jax.devices()), (AxisType.Auto,) * len(axes)
        return Mesh(devices.reshape(*axes.values()), tuple(axes), axis_types=kinds)


@pytest.fixture
def here() -> Target:
    return Here("here", "cpu", "", len(jax.devices()), 1e12, 1e12, 1e12)


def test_products_are_counted_through_loops_and_shards(here):
    mesh = here.mesh(clients=2)

    def on_a_device(x_2x3, w_3x3):
        def layer(x, _):
            return x @ w_3x3, None

        def step(_, x):
            return jax.lax.scan(layer, x, length=5)[0]

        return jax.lax.fori_loop(0, jnp.max(x_2x3).astype(jnp.int32), step, x_2x3)

    dealt, whole = PartitionSpec("clients"), PartitionSpec()
    sharded = jax.shard_map(
        on_a_device, mesh=mesh, in_specs=(dealt, whole), out_specs=dealt, check_vma=False
    )
    traced = jax.jit(sharded).trace(jnp.ones((4, 3)), jnp.ones((3, 3)))
    once = 2 * (2 * 3 * 3) * 5 * 2  # multiply and add, five layers, two devices
    assert reading.products(traced.jaxpr) == {"float32": once}
    assert reading.products(traced.jaxpr, (7,)) == {"float32": 7 * once}
    assert reading.products(reading.live(traced.jaxpr)) == {"float32": once}
    unused = jax.jit(lambda x: (x @ x, x)[1]).trace(jnp.ones((3, 3)))
    assert reading.products(unused.jaxpr) and not reading.products(reading.live(unused.jaxpr))

    def step(x):
        _ = x @ x
        return x + 1

    loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, step, x))
    assert not reading.products(loop.trace(jnp.ones((3, 3))).jaxpr)


def test_products_of_convolutions_and_narrow_types_are_counted():
    image, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 5))

    def both(image, kernel, narrow):
        layout = ("NHWC", "HWIO", "NHWC")
        found = jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", None, None, layout)
        return found, narrow @ narrow.T

    traced = jax.jit(both).trace(image, kernel, jnp.ones((4, 6), jnp.bfloat16))
    expected = {"float32": 2.0 * 2 * 6 * 6 * 5 * 27, "bfloat16": 2.0 * 4 * 4 * 6}
    assert reading.products(traced.jaxpr) == expected


def test_a_compiled_program_tells_its_collectives_memory_and_transfers_to_the_host(here):
    dealt = PartitionSpec("clients")

    def exchange(x):
        shares = jax.lax.all_to_all(x.reshape(2, 500), "clients", 0, 0)
        return shares, jax.lax.psum(x, "clients")

    sharded = jax.shard_map(
        exchange, mesh=here.mesh(clients=2), in_specs=dealt, out_specs=(dealt, dealt)
    )
    compiled = jax.jit(sharded).lower(jnp.ones((2, 1_000))).compile()
    text = reading.text_of(compiled)
    assert reading.collectives(text) == {"all-reduce": [4_000], "all-to-all": [4_000]}
    assert reading.memory(compiled)["arguments"] == 4_000
    assert reading.transfers(text) == 0

    def printed(x):
        jax.debug.callback(print, x)
        return x

    assert reading.transfers(reading.text_of(jax.jit(printed).lower(1.0).compile())) > 0


@pytest.mark.parametrize("name", ["word model", "POPri scores"])
def test_programs_are_traced_for_a_machine(here, name):
    programs = list(PROGRAMS[name](here))
    assert {"accumulate", "exchange", "release"} <= {program.what for program in programs}
    assert all(program.traced.out_info is not None for program in programs)


@pytest.mark.long
@pytest.mark.parametrize("name", ["DPO of Llama 3 8B", "Llama 3 8B LoRA", "DistilGPT2"])
def test_training_in_bfloat16_has_no_float32_product(here, name):
    """Forwards and backwards: a float32 product takes an accelerator several times as long.

    Embeddings' gradients are added up by one, of less than a hundredth of the operations.
    """
    for program in PROGRAMS[name](here):
        found = reading.products(program.traced.jaxpr)
        assert set(found) <= {"bfloat16", "float32"}
        assert found.get("float32", 0) <= sum(found.values()) / 100


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"word model", "POPri scores"}))
def test_every_program_is_traced(here, name):
    assert list(PROGRAMS[name](here))
