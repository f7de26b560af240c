"""Operations that keep lanes apart: clients, or examples, that `vmap` computes side by side.

A client's program computes its contribution from its own data alone. A rule of `vmap`, or the loop
that XLA makes of one operation, may not. `betainc` goes on for all until the slowest has converged;
the gradient of a depthwise convolution's kernel, on a CPU, is one convolution over all, in which a
neighbour's NaN is everyone's. So this lists the operations that were tried, and not those that are
suspect: `tests/federated/test_lanes.py` builds each member, puts NaN, infinity, 1e30, zeros and
other numbers in the lanes beside it, moves it to other lanes, and wants the same bits. `TRIED` has
the trials of each platform.

An operation that is not on the list, but computes from its operands alone, runs one client at a
time, without `vmap` (`unlisted`, `InformationFlow.alone`): slower, and no query fails for it. With
the example as unit, the client function itself maps over examples, so that such an operation is
refused. All others are refused everywhere: draws with a state of their own, callbacks, kernels, and
primitives, key types and batching rules that are not JAX's own objects, whatever their names.
"""

import functools
import sys
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive


class Trial(NamedTuple):
    """How the members of the list were tried on a platform; without a device, if none was there."""

    device: str | None
    versions: tuple[str, ...]
    date: str
    what: str


_RUN = "every member is run, clients side by side and examples within clients"
_LOWERED = "every member is lowered to the operations of a CPU's, without a custom call; not run"
_VERSIONS = ("jax 0.10.2", "jax 0.12.0.1")

TRIED = {
    "cpu": Trial("AMD EPYC", _VERSIONS, "2026-11-29", _RUN),
    "gpu": Trial(None, _VERSIONS, "2026-11-29", _LOWERED),
    "tpu": Trial(None, _VERSIONS, "2026-11-29", _LOWERED),
}
"""By platform, as `jax.Device.platform` names it; nothing is on the list of any other."""

# These compute each number from one number of each operand.
_NUMBERS = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type cos cosh digamma div eq
eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le le_to lgamma log
log1p log2 logistic lt lt_to max min mul ne neg nextafter not one_minus_square or polygamma
population_count pow real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta Frexp
Ldexp
"""
_PLACES = """
broadcast_in_dim concatenate copy device_put dynamic_slice dynamic_update_slice empty gather iota
name optimization_barrier pad reshape rev scatter scatter-add scatter-max scatter-min scatter-mul
scatter-sub slice split squeeze stack stop_gradient tile transpose unstack Nonzero
"""
_SUMS = """
argmax argmin conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general reduce
reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window reduce_window_max
reduce_window_min reduce_window_sum reduce_xor select_and_gather_add select_and_scatter_add sort
top_k SearchSorted
"""
_DRAWS = """
random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap
threefry2x32
"""
# Under `vmap`, a loop whose end depends on the lane selects: a lane that is done stays as it is.
_PROGRAMS = """
cond custom_jvp_call custom_linear_solve custom_vjp_call custom_vmap_call jit remat2 scan while
"""
# Functions of their operands, iterated until all have converged, or libraries for whole batches.
# The bits of a Fourier transform on a CPU, for one, follow from its place in the batch.
_ITERATED = """
approx_top_k cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product igamma
igamma_grad_a igammac lu lu_pivots_to_permutation ormqr platform_index qr ragged_dot_general
random_gamma regularized_incomplete_beta schur svd symmetric_product triangular_solve tridiagonal
tridiagonal_solve
"""
# Messages between devices, or clients side by side. No client function needs them.
_TELLING = """
all_gather all_gather_invariant all_to_all axis_index pbroadcast pmax pmin ppermute psum
psum_invariant pvary ragged_all_to_all reduce_scatter shard_map
"""
# The types of numbers that were tried.
_NUMBER_TYPES = """
bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float16 float32 float64 complex64
complex128
"""


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


LISTED = _names(_NUMBERS, _PLACES, _SUMS, _DRAWS, _PROGRAMS)
"""Operations that keep lanes apart; `unlisted` has the parameters for which they do."""

COLLECTIVES, PROGRAMS, _TYPES = _names(_TELLING), _names(_PROGRAMS), _names(_NUMBER_TYPES)
_CONVOLVED = {"bfloat16", "float16", "float32"}
# It only says where an array is.
_PLACED = {"sharding_constraint"}
COMPUTES = LISTED | _names(_ITERATED) | _PLACED
"""The operations of which a client function may consist: they compute from operands alone."""

# The rule by which JAX takes lanes in turn, each by itself.
_ONE_BY_ONE = jax.custom_batching.sequential_vmap(abs).vmap_rule.__code__  # pyright: ignore


@functools.cache
def of_jax() -> dict[int, str]:
    """JAX's own primitives, and the classes behind `call_hi_primitive`: ids and names.

    They are read from JAX's modules, which hold no other package's. A name proves nothing: anybody
    may give it to a primitive with a lowering of his own.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("jax._src.") and "pallas" not in name
    ]
    values = [value for module in modules for value in list(vars(module).values())]
    primitives = {id(value): value.name for value in values if isinstance(value, Primitive)}
    return primitives | {id(value): value.__name__ for value in values if isinstance(value, type)}


def name_of(eqn: Any) -> str | None:
    """The name of an equation's operation; None if it is not JAX's own."""
    name = of_jax().get(id(eqn.primitive))
    if name == "call_hi_primitive":
        return of_jax().get(id(type(eqn.params["_prim"])))
    return name


@functools.cache
def _implementations() -> tuple[Any, ...]:
    names = ("threefry2x32", "threefry4x32")
    keys = [jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)) for name in names]
    return tuple(key.dtype._impl for key in keys)  # pyright: ignore[reportAttributeAccessIssue]


def strange_type(aval: Any) -> str | None:
    """A type other than arrays of numbers or threefry keys, whose Python JAX might run; or None.

    With other implementations of keys, `vmap` uses the first lane's for all, or keeps a state.
    """
    if type(aval) is not ShapedArray:
        return type(aval).__name__
    if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    dtype: Any = aval.dtype
    threefry = any(getattr(dtype, "_impl", None) is own for own in _implementations())
    return None if threefry else f"{dtype}, and not of threefry,"


def own_rule(eqn: Any, rules: tuple[Any, ...]) -> bool:
    """Whether a `custom_vmap_call` has a rule for lanes that is not among `rules`, nor JAX's."""
    # JAX wraps the rule, in an attribute of that name. Compared by identity, since an object of
    # one's own may say that it is equal to another.
    rule = eqn.params["rule"].rule
    in_turn = type(rule) is FunctionType and rule.__code__ is _ONE_BY_ONE
    return not in_turn and not any(rule is allowed for allowed in rules)


def unlisted(eqn: Any, platform: str) -> bool:
    """Whether an equation of `COMPUTES` was not tried with its types and parameters."""
    name, params = name_of(eqn), eqn.params
    if platform not in TRIED or name not in LISTED:
        return name not in _PLACED
    types = {variable.aval.dtype.name for variable in (*eqn.invars, *eqn.outvars)}
    if name == "conv_general_dilated":
        # XLA may make one convolution of a group's, with zeros for the others, and NaN * 0 is NaN:
        # on a CPU for groups of a batch, and for all in double precision. Nobody has tried a TPU.
        tried = platform != "tpu" and params["batch_group_count"] == 1
        return not (tried and types <= _CONVOLVED)
    return any(name not in _TYPES and not name.startswith("key<") for name in types)
