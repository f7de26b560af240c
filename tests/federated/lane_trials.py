"""What one lane computes in `test_lanes`: functions that between them need each listed primitive.

Each is of float [SIZE, SIZE], and uses what several lanes share (constants), too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.extend.random import threefry_2x32

SIZE = 5
_RNG = np.random.default_rng(7)
_WIDE, _SQUARE = _RNG.normal(size=(SIZE, 13)), _RNG.normal(size=(SIZE, SIZE))
_KERNEL, _LINE = _RNG.normal(size=(2, 2, 3, 4)), np.arange(100.0)

_OF_EACH = (
    *(lax.abs, lax.acos, lax.acosh, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.bessel_i0e),
    *(lax.bessel_i1e, lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.digamma, lax.erf, lax.erf_inv),
    *(lax.erfc, lax.exp, lax.exp2, lax.expm1, lax.floor, lax.is_finite, lax.lgamma, lax.log),
    *(lax.log1p, lax.logistic, lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh),
    *(lax.sqrt, lax.square, lax.tan, lax.tanh, jnp.log2),
    partial(lax.integer_pow, y=3),
    partial(lax.integer_pow, y=-2),
    partial(lax.reduce_precision, exponent_bits=5, mantissa_bits=7),
)
_OF_TWO = (
    *(lax.add, lax.atan2, lax.div, lax.max, lax.min, lax.mul, lax.nextafter, lax.pow, lax.rem),
    *(lax.sub, lax.eq, lax.ne, lax.ge, lax.gt, lax.le, lax.lt),
    lambda x, y: lax.polygamma(lax.round(lax.abs(y)), x),
    lambda x, y: lax.zeta(lax.abs(x) + 2.0, lax.abs(y) + 1.0),
)


def _like(array, x):
    return jnp.asarray(array, x.dtype)


def _whole(x):
    """Whole numbers, int32."""
    return lax.clamp(-1e4, jnp.nan_to_num(x) * 50, 1e4).astype(jnp.int32)


def _places(x, number):
    return lax.rem(lax.abs(_whole(x)), jnp.int32(number))


def _words(x):
    return lax.bitcast_convert_type(x[0, :4].astype(jnp.float32), jnp.uint32)


def of_each_number(x):
    return [function(x) for function in _OF_EACH], jax.grad(lambda y: jnp.sum(jnp.tanh(y)))(x)


def of_each_number_in_half_precision(x):
    return [function(x.astype(jnp.bfloat16)) for function in _OF_EACH if function != lax.lgamma]


def of_two_numbers(x):
    own, common = [f(x, x.T) for f in _OF_TWO], [f(x, _like(_SQUARE, x)) for f in _OF_TWO]
    ordered = primitives.eq_to_p, primitives.le_to_p, primitives.lt_to_p
    parts = jnp.frexp(x)
    return own, common, parts, jnp.ldexp(parts[0], _whole(x)), [p.bind(x, x.T) for p in ordered]


def of_complex_numbers(x):
    z, w = lax.complex(x, x.T), lax.complex(x.T, x)
    each = (lax.exp, lax.log, lax.sin, lax.tanh, lax.sqrt, lax.rsqrt, lax.abs, lax.neg, lax.square)
    return [f(z) for f in each], z * w, z / w, z @ w, lax.real(z), lax.imag(lax.conj(z))


def of_bits(x):
    i, words, true = _whole(x), lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32), x > 0.5
    j, by = i.T, lax.rem(lax.abs(i.T), jnp.int32(7))
    logic = i & j, i | j, i ^ j, ~i, true & ~true.T, lax.clz(words), lax.population_count(words)
    shifts = lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical
    numbers = i + j, i * j, lax.div(i, j), lax.rem(i, j), lax.max(i, j), lax.sign(i), lax.abs(i)
    small = [i.astype(each) + j.astype(each) for each in (jnp.int8, jnp.int16, jnp.uint8)]
    return (
        logic,
        [shift(i, by) for shift in shifts],
        numbers,
        small,
        lax.pow(x, j),
        words.astype("u2"),
    )


def of_places(x):
    return [
        jnp.broadcast_to(x[None], (3, SIZE, SIZE)),
        lax.concatenate([x, x.T], 0),
        lax.expand_dims(x, (1,)),
        lax.pad(x, x.dtype.type(0), ((1, 2, 1), (-1, 0, 0))),
        lax.reshape(x, (SIZE * SIZE,)),
        lax.rev(x, (1,)),
        x[1:4:2],
        lax.squeeze(x[:1], (0,)),
        x.T,
        lax.select_n(x > 0, x, x.T),
        lax.clamp(x.dtype.type(0), x, x.dtype.type(1)),
        lax.split(x, (2, 3)),
        jnp.stack([x, x]),
        jnp.unstack(x),
        jnp.tile(x, (2, 3)),
        lax.iota(jnp.int32, 4) + _whole(x)[0, :4],
        lax.stop_gradient(x),
        lax.optimization_barrier(x),
        checkpoint_name(x, "name"),
        jnp.copy(x),
        jax.device_put(x),
        x.astype(jnp.bfloat16),
        x.astype(jnp.float16),
        lax.empty((SIZE, SIZE), x.dtype) + x,
        jnp.nonzero(x[0] > 0.5, size=3),
    ]


def sums(x):
    true, i = x > 0.5, _whole(x)
    along = jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.mean, jnp.var, jax.nn.logsumexp
    running = lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp
    return [
        [function(x, axis) for function in along for axis in (0, 1)],
        [function(x, axis) for function in running for axis in (0, 1)],
        lax.cumsum(x, 1, reverse=True),
        jnp.any(true, 0),
        jnp.all(true, 1),
        lax.reduce_xor(i, (0,)),
        lax.argmax(x, 1, jnp.int32),
        lax.argmin(x, 0, jnp.int32),
        lax.reduce(x, x.dtype.type(0), lambda a, b: a * 0.5 + b, (0,)),
        lax.associative_scan(jnp.add, x),
        jax.grad(lambda y: jnp.sum(y) * jnp.max(y) + jnp.sum(jnp.sort(y) * y))(x),
    ]


def windows(x):
    def largest(y):
        return lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")

    def mean(y):
        return lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), "SAME")

    return [
        mean(x),
        largest(x),
        lax.reduce_window(x, jnp.inf, lax.min, (2, 2), (1, 1), "SAME"),
        lax.reduce_window(x, x.dtype.type(1), lambda a, b: a * b + 0.1, (2, 2), (1, 1), "VALID"),
        jax.grad(lambda y: jnp.sum(jnp.sin(largest(y)) + 0 * jnp.sum(mean(y))))(x),
        jax.jvp(largest, (x,), (x.T,)),
    ]


def orders(x):
    rows = x.ravel()
    return [
        lax.sort(x, dimension=1),
        lax.sort((rows, -rows), num_keys=1),
        lax.sort((_whole(x), x), num_keys=2),
        lax.sort(x, dimension=0, is_stable=False),
        jnp.argsort(rows),
        lax.top_k(x, 3),
        jnp.median(x),
        jnp.searchsorted(jnp.sort(x[0]), x[1]),
    ]


def products(x):
    row, wide, square = x[0], _like(_WIDE, x), _like(_SQUARE, x)
    half, common = x.astype(jnp.bfloat16), wide.astype(jnp.bfloat16)
    small = _whole(x).astype(jnp.int8)
    return [
        x @ x.T,
        x @ wide,
        square @ x,
        row @ wide,
        wide.T @ row,
        jnp.outer(row, row),
        jnp.dot(row, row),
        jnp.tensordot(x, x, 2),
        jnp.einsum("ij,jk,kl->il", x, x, wide),
        lax.dot(x, x, precision="highest"),
        lax.dot_general(x[None], x[None], (((2,), (1,)), ((0,), (0,)))),
        half @ half.T,
        lax.dot(half, common, preferred_element_type=jnp.float32),
        x.astype(jnp.float16) @ x.T.astype(jnp.float16),
        lax.dot(small, small, preferred_element_type=jnp.int32),
    ]


def convolutions(x):
    image, kernel = jnp.stack([x, x.T, x * 2], -1)[None], _like(_KERNEL, x)
    own, two = x.ravel()[:24].reshape(2, 2, 3, 2), jnp.concatenate([image, image * 3])
    deep = jnp.repeat(own[:, :, :1], 3, axis=-1)
    order = "NHWC", "HWIO", "NHWC"

    def conv(image, kernel, strides=(1, 1), padding="SAME", **how):
        return lax.conv_general_dilated(
            image, kernel, strides, padding, dimension_numbers=order, **how
        )

    def slopes(function, *given):
        return jax.grad(lambda *y: jnp.sum(jnp.sin(function(*y))), tuple(range(len(given))))(*given)

    return [
        conv(image, kernel),
        conv(image, own),
        conv(jnp.ones_like(image), own),
        conv(image, kernel, (2, 2)),
        conv(image, kernel, rhs_dilation=(2, 2)),
        conv(image, kernel, padding=((1, 1), (0, 1)), lhs_dilation=(2, 2)),
        conv(image, deep, feature_group_count=3),
        slopes(conv, image, own),
        slopes(lambda image: conv(image, kernel), image),
        slopes(lambda kernel: conv(image, kernel), kernel),
        slopes(lambda image: conv(image, deep, feature_group_count=3), image),
        slopes(partial(conv, strides=(2, 2)), two, own),
        slopes(conv, image.astype(jnp.bfloat16), own.astype(jnp.bfloat16)),
        slopes(conv, image.astype(jnp.float16), own.astype(jnp.float16)),
        lax.conv_transpose(image, own, (2, 2), "SAME"),
    ]


# With what is promised of the indices and is not so.
_PROMISES = [
    {"mode": mode, "indices_are_sorted": lie, "unique_indices": lie}
    for mode in ("clip", "fill", "promise_in_bounds")
    for lie in (False, True)
]


def gathers(x):
    i, few = _places(x[0], 40) - 8, _places(x[0], SIZE)
    numbers, line, wide = x.ravel(), _like(_LINE, x), _like(_WIDE, x)

    def slopes(function, of):
        return jax.grad(lambda y: jnp.sum(jnp.sin(function(y))))(of)

    promised = [
        [numbers.at[i].get(**p), line.at[i].get(**p), x.at[i].get(**p), x.at[i, i].get(**p)]
        for p in _PROMISES
    ]
    return [
        promised,
        jnp.take(x, _places(x[1], SIZE), axis=1),
        jnp.take_along_axis(x, _places(x, SIZE), 1),
        lax.dynamic_slice(x, (i[0], i[1]), (2, 2)),
        lax.dynamic_update_slice(x, x[:2, :2], (i[0], i[1])),
        lax.dynamic_index_in_dim(x, i[0]),
        wide[few[0]],
        jnp.roll(x, i[0]),
        slopes(lambda w: w[few], wide),
        slopes(lambda y: y[few], x),
        slopes(lambda y: lax.dynamic_slice(y, (i[0], i[1]), (2, 2)), x),
    ]


def scatters(x):
    i, few = _places(x[0], 40) - 8, _places(x[0], SIZE)
    numbers, wide, made = x.ravel(), _like(_WIDE, x), []
    for p in _PROMISES:
        for before in (jnp.zeros_like(numbers), numbers):
            at = before.at[i]
            made += [at.set(x[1], **p), at.add(x[1], **p), at.multiply(x[1], **p)]
            made += [at.min(x[1], **p), at.max(x[1], **p), at.subtract(x[1], **p)]
        made += [x.at[i].add(x, **p), wide.at[few].add(x[0, 0], **p)]
    made += [x.at[few, few].apply(jnp.sin), jnp.bincount(_places(numbers, 7), length=7)]
    return [*made, jax.ops.segment_sum(x, few, 3), jnp.histogram(x, bins=4, range=(0.0, 1.0))[0]]


def loops(x):
    """Ends and branches that depend on the lane."""
    times, square = _places(x[0, 0], 60), _like(_SQUARE, x)

    def until(index, y):
        return lax.while_loop(
            lambda c: c[0] < _places(c[1][0], 5),
            lambda c: (c[0] + 1, c[1] * 0.9 + x[3]),
            (jnp.int32(0), y),
        )[1]

    return [
        lax.fori_loop(0, times, lambda i, y: y * 1.1 + 1, x[1]),
        lax.while_loop(
            lambda y: jnp.max(jnp.abs(y)) < 100, lambda y: y * 1.5 + 0.1, jnp.nan_to_num(x[2])
        ),
        lax.while_loop(
            lambda c: (c[0] < 20) & jnp.all(c[1] < 3),
            lambda c: (c[0] + 1, c[1] + x[0]),
            (jnp.int32(0), x[1]),
        ),
        lax.fori_loop(0, times, until, x[4]),
        lax.cond(x[0, 0] > 0.5, jnp.sin, lambda y: y - 1, x),
        lax.cond(
            jnp.all(x > 0), lambda y: lax.fori_loop(0, times, lambda i, z: z + y, y), jnp.sin, x
        ),
        lax.switch(_places(x[0, 0], 3), [jnp.sin, lambda y: y @ y, jnp.sort], x),
        lax.scan(lambda c, y: (c * 0.5 + y @ square, c), x[0], x),
        lax.fori_loop(0, 7, lambda i, y: y * 0.7 + x[i % 5], x[0]),
        lax.map(lambda row: jnp.sum(jnp.exp(row)), x),
    ]


@jax.custom_jvp
def _wave(y):
    return jnp.sin(y)


@jax.custom_vjp
def _other_wave(y):
    return jnp.cos(y)


_wave.defjvp(lambda values, slopes: (jnp.sin(values[0]), slopes[0] * 2))
_other_wave.defvjp(lambda y: (jnp.cos(y), y), lambda y, slope: (slope * y,))


def calls(x):
    again = jax.checkpoint(lambda y: jnp.sin(y @ y))
    functions = _wave, _other_wave, again, jax.nn.relu, jax.nn.gelu, jax.jit(jnp.tanh)
    return [
        [function(x) for function in functions],
        [jax.grad(lambda y, f=function: jnp.sum(f(y)))(x) for function in functions],
        jax.custom_batching.sequential_vmap(lambda y: jnp.sin(y) @ y)(x),
    ]


def solves(x):
    matrix = x @ x.T + jnp.eye(SIZE, dtype=x.dtype)
    half = lax.custom_linear_solve(lambda v: matrix @ v, x[0], lambda mv, b: b / 2)
    return half, jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0])[0]


def _keys(x):
    words = _words(x)
    return [
        jax.random.wrap_key_data(words[:2], impl="threefry2x32"),
        jax.random.wrap_key_data(words, impl="threefry4x32"),
        jax.random.key(words[0], impl="threefry2x32"),
        jax.random.key(words[0], impl="threefry4x32"),
    ]


def _each_by_its_own(key, draws):
    return [draw(jax.random.fold_in(key, place)) for place, draw in enumerate(draws)]


def draws(x):
    """By keys that differ between lanes."""
    random, made = jax.random, [threefry_2x32(_words(x)[:2], _words(x))]
    for key in _keys(x):
        made += _each_by_its_own(
            random.fold_in(key, _whole(x)[1, 1]),
            [
                lambda key: random.key_data(random.split(key, 3)),
                lambda key: random.key_data(random.clone(key)),
                lambda key: random.bits(key, (3,), "u2"),
                lambda key: random.normal(key, (SIZE,)),
                lambda key: random.categorical(key, x),
                lambda key: random.permutation(key, 5),
            ],
        )
    return made


TRIALS = {
    function.__name__.replace("_", " "): function
    for function in (
        *(of_each_number, of_each_number_in_half_precision, of_two_numbers, of_complex_numbers),
        *(of_bits, of_places, sums, windows, orders, products, convolutions, gathers),
        *(scatters, loops, calls, solves, draws),
    )
}
