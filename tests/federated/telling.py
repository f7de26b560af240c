"""Client functions that tell something otherwise than by what they send, and what is named."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from jaxpfl.federated import ClientSteps, client_mesh
from tests.federated.cohorts import DIM

MESH, EVERYWHERE = client_mesh(1), jax.sharding.PartitionSpec()


def sending(function):
    """A client function that sends a function of the client's own vector."""

    def client_fn(broadcast, examples, key):
        return function(examples.batches["x"][0, 0])

    return client_fn


def printing(broadcast, examples, key):
    jax.debug.print("{}", jnp.sum(examples.mask))
    return {"a": examples.batches["x"][0, 0]}


def printing_in_steps(broadcast, state, batch, mask, key):
    jax.debug.print("{}", jnp.sum(mask))
    return state + jnp.sum(batch["x"])


@sending
def asking_the_host(x):
    return jax.lax.fori_loop(0, 2, lambda index, found: jax.pure_callback(np.abs, found, found), x)


@jax.custom_batching.custom_vmap
def mixing(x):
    return x


@mixing.def_vmap
def _sum_of_all(axis_size, batched, x):
    return jnp.broadcast_to(x.sum(0), x.shape), True


class EqualToAll:
    """A rule for several clients that passes for any other."""

    __code__ = jax.custom_batching.sequential_vmap(abs).vmap_rule.__code__

    def __eq__(self, other):
        return True

    def __call__(self, axis_size, batched, x):
        return _sum_of_all(axis_size, batched, x)


def mixing_by_a_rule_that_passes_for_another(x):
    function = jax.custom_batching.custom_vmap(lambda x: x)
    function.def_vmap(EqualToAll())
    return function(x)


def hidden_in_a_solver(x):
    def matvec(v):
        return jax.pure_callback(np.asarray, v, v, vmap_method="sequential") * 2.0

    return jax.lax.custom_linear_solve(matvec, x, solve=lambda mv, b: b / 2, symmetric=True)


def on_a_mesh(x):
    return jax.shard_map(
        lambda x: x, mesh=MESH, in_specs=EVERYWHERE, out_specs=EVERYWHERE, check_vma=False
    )(x)


def _words(x, number):
    return jax.lax.bitcast_convert_type(x[:number], jnp.uint32)


def _run_by_jax(key, shape, width=32):
    raise AssertionError("a key type's own Python ran")


OWN_KEYS = jax.extend.random.define_prng_impl(
    key_shape=(2,),
    seed=_run_by_jax,
    split=_run_by_jax,
    random_bits=_run_by_jax,
    fold_in=_run_by_jax,
    name="threefry2x32 of one's own",
    tag="fry",
)


def drawing_by_keys_of_ones_own(x):
    own = jax.random.wrap_key_data(_words(x, 2), impl=OWN_KEYS)
    return jax.random.bits(own, (DIM,)).astype(jnp.float32)


def of_ones_own(name):
    """By a primitive of one's own, whose lowering could be anything."""
    made = jax.extend.core.Primitive(name)
    made.def_abstract_eval(lambda x, **params: x)
    jax.interpreters.batching.defvectorized(made)
    inner = jax.make_jaxpr(jnp.sin)(np.zeros(DIM, np.float32))
    return lambda x: made.bind(x, jaxpr=inner, call_jaxpr=inner)


def in_a_jvp(function):
    made = jax.custom_jvp(function)
    made.defjvp(lambda values, slopes: (function(*values), slopes[0]))
    return made


OWN = of_ones_own("mine")
TELLING = {
    "print": (printing, "debug_print"),
    "steps": (
        ClientSteps(lambda b, key: jnp.float32(0), printing_in_steps, lambda b, state: state),
        "debug_print",
    ),
    "callback": (asking_the_host, "pure_callback"),
    "rule": (sending(lambda x: mixing(x)), "custom_vmap_call"),
    "rule of no function": (sending(mixing_by_a_rule_that_passes_for_another), "custom_vmap_call"),
    "foreign": (
        sending(lambda x: jax.ffi.ffi_call("f", jax.typeof(x), vmap_method="sequential")(x)),
        "ffi_call",
    ),
    "solver": (sending(hidden_in_a_solver), "pure_callback"),
    "mesh": (sending(on_a_mesh), "shard_map"),
    "collective": (sending(lambda x: jax.lax.psum(x, "clients")), "psum"),
    "draws with a state": (
        sending(
            lambda x: x + jax.lax.fori_loop(0, 3, lambda i, u: jax.lax.rng_uniform(0.0, u, ()), 1.0)
        ),
        "rng_uniform",
    ),
    "draws of another generator": (
        sending(lambda x: x * jax.lax.rng_bit_generator(_words(x, 4), ())[1].astype(jnp.float32)),
        "rng_bit_generator",
    ),
    "other keys": (
        sending(lambda x: x * jax.random.normal(jax.random.key(_words(x, 1)[0], impl="rbg"))),
        "key<rbg>",
    ),
    "keys of one's own": (sending(drawing_by_keys_of_ones_own), "key<fry>"),
    "own": (sending(OWN), "mine"),
    "own by another's name": (sending(of_ones_own("sin")), "sin"),
    "own in a jit": (sending(jax.jit(OWN)), "mine"),
    "own in a derivative": (sending(in_a_jvp(OWN)), "mine"),
    "own as a jit": (sending(of_ones_own("jit")), "jit"),
    "own as a derivative": (sending(of_ones_own("custom_jvp_call")), "custom_jvp_call"),
    "own as a loop": (sending(of_ones_own("while")), "while"),
}
