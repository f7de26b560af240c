"""Gaussian noise in whole steps, drawn exactly: no draw is computed in floating point.

With a whole number T and a standard normal N, floor(T + s N) = T + floor(s N). Whoever adds
floor(s N) to a sum of whole numbers therefore releases a function of the Gaussian mechanism's
output, and every accountant of that mechanism holds as it is. Here s = `STEPS`, so that a sum has
to be counted in steps of the noise's standard deviation / `STEPS`.

A draw is N = +-(k + x) / 16 with a whole number k and a fraction x, proposed with weights
exp(-(k / 16)^2 / 2) and uniformly, and kept with probability exp(-x (2 k + x) / 512). That coin is
made of comparisons of uniform numbers (Karney 2016, "Sampling exactly from the normal
distribution", Algorithm B; von Neumann 1951).

Uniform numbers, threefry's, have 96 bits, and draws beyond 13 standard deviations are left out. The
distribution of a coordinate is within 2^-90 of the exact one (total variation), which adds at most
(1 + exp(epsilon)) 2^-50 to the delta of 2^40 coordinates.
"""

from decimal import Context, Decimal
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpfl.privacy.keys import require_noise_key

STEPS = 2**20  # of one standard deviation

_CELLS, _MOST, _WORDS = 16, 14, 3  # cells of a deviation; deviations; words of a uniform number


class _Draws(NamedTuple):
    """Draws of P coordinates at work: each tosses coins until the first tails."""

    tosses: jax.Array  # how often each has tossed, uint32 [P]
    k: jax.Array  # the proposal, uint32 [P]
    x: jax.Array  # and its fraction, uint32 [3, P]
    last: jax.Array  # the uniform number that the next must be below for heads, uint32 [3, P]
    even: jax.Array  # whether heads came an even number of times, bool [P]
    fresh: jax.Array  # whether a new proposal is due, bool [P]
    negative: jax.Array  # whether the accepted draw is negative, bool [P]
    done: jax.Array  # whether a draw was accepted, bool [P]


@partial(jax.jit, static_argnames=("count", "mesh"))
def exact_normal(key: jax.Array, count: int, mesh: Mesh) -> jax.Array:
    """Returns independent draws of floor(STEPS N(0, 1)), int32 [P].

    Draw i is a function of the key and of i alone, whatever the devices that share the work. The
    key, a typed threefry4x32 one, is for this draw alone; P is a multiple of the devices.
    """
    require_noise_key(key)
    share = count // mesh.size

    def of_one_device(key):
        place_P = jax.lax.axis_index(mesh.axis_names) * share + jnp.arange(share)
        whole_P, part_P = exact_cells(key, place_P)
        return (whole_P << 16) | (part_P >> 16).astype(jnp.int32)

    everywhere, shares = PartitionSpec(), PartitionSpec(mesh.axis_names)
    return jax.shard_map(
        of_one_device, mesh=mesh, in_specs=everywhere, out_specs=shares, check_vma=False
    )(key)


def exact_cells(key: jax.Array, place_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns floor(2^32 16 N), N the draws at these places: 2^32 times int32 [P], plus uint32 [P].

    In each pass, as many toss as there is room for.
    """
    count = place_P.size
    room = _room(count)

    def uniform(place, tosses):
        own = jax.random.fold_in(jax.random.fold_in(key, place), tosses)
        return jax.random.bits(own, (1 + 4 * _WORDS,))

    def toss(state):
        left_R, uniform_UxR, draws = state
        some = jax.tree.map(lambda leaf: leaf.at[..., left_R].get(mode="clip"), draws)
        some = _tossed(some, uniform_UxR)
        draws = jax.tree.map(
            lambda leaf, part: leaf.at[..., left_R].set(part, mode="drop"), draws, some
        )
        (left_R,) = jnp.nonzero(~draws.done, size=room, fill_value=count)
        place_R, tosses_R = (
            array_P.at[left_R].get(mode="clip") for array_P in (place_P, draws.tosses)
        )
        # For the next pass: XLA would compute it again for each use in this one.
        return left_R, jax.vmap(uniform, out_axes=1)(place_R, tosses_R), draws

    zero_P, no_P = jnp.zeros(count, jnp.uint32), jnp.zeros(count, bool)
    number = jnp.zeros((_WORDS, count), jnp.uint32)
    begun = _Draws(zero_P, zero_P, number, number, no_P, ~no_P, no_P, no_P)
    # The first pass finds out who is left, and nobody tosses in it.
    nobody_R, nothing = jnp.full(room, count), jnp.zeros((1 + 4 * _WORDS, room), jnp.uint32)
    _, _, draws = jax.lax.while_loop(
        lambda state: ~jnp.all(state[2].done), toss, (nobody_R, nothing, begun)
    )
    # floor(-y) = -1 - floor(y), which inverts all bits: with more bits of x, y would not be whole.
    inverted_P = jnp.where(draws.negative, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return (draws.k ^ inverted_P).astype(jnp.int32), draws.x[0] ^ inverted_P


def _room(count: int) -> int:
    return count // 4 + 64


def _tossed(draws: _Draws, uniform_UxP: jax.Array) -> _Draws:
    """Each coordinate proposes, if it is to, and tosses one coin."""
    below_KxW, other_K = (jnp.asarray(table) for table in _alias_table())
    few_P, numbers = uniform_UxP[0], uniform_UxP[1:].reshape(4, _WORDS, -1)
    slot_P = few_P & 0xFF
    own_P = _less(numbers[0], jnp.moveaxis(below_KxW[slot_P], -1, 0))
    fresh_P = draws.fresh
    k_P = jnp.where(fresh_P, jnp.where(own_P, slot_P, other_K[slot_P]), draws.k)
    x_WxP = jnp.where(fresh_P, numbers[1], draws.x)
    last_WxP = jnp.where(fresh_P, x_WxP, draws.last)
    even_P = draws.even | fresh_P
    # Heads with probability last (2 k + x) / 512.
    whole_P = (few_P >> 8) & 0x1FF
    second_P = (whole_P < 2 * k_P) | ((whole_P == 2 * k_P) & _less(numbers[2], x_WxP))
    heads_P = _less(numbers[3], last_WxP) & second_P
    accepted_P = ~heads_P & even_P
    negative_P = (few_P >> 17) & 1 == 1
    tosses_P, even_P = draws.tosses + jnp.uint32(1), even_P ^ heads_P
    return _Draws(tosses_P, k_P, x_WxP, numbers[3], even_P, ~heads_P, negative_P, accepted_P)


def _less(first_WxP: jax.Array, second_WxP: jax.Array) -> jax.Array:
    """Compares numbers of several words, the highest first."""
    less_P = first_WxP[-1] < second_WxP[-1]
    for first_P, second_P in zip(first_WxP[-2::-1], second_WxP[-2::-1], strict=True):
        less_P = (first_P < second_P) | ((first_P == second_P) & less_P)
    return less_P


def _alias_table() -> tuple[np.ndarray, np.ndarray]:
    """Walker's table of the weights exp(-(k / 16)^2 / 2), in whole numbers.

    Returns:
      For each of 256 slots, the probability that its own k is taken, uint32 [256, 3] of 2^96; and
      the k that is taken otherwise, uint32 [256].
    """
    exact = Context(prec=80)
    weights = [0] * 256
    for k in range(_CELLS * _MOST):
        weight = exact.exp(exact.divide(Decimal(-k * k), Decimal(2 * _CELLS**2)))
        weights[k] = 256 * int(exact.multiply(weight, Decimal(2**128)))
    share = sum(weights) // 256
    other = list(range(256))
    small = [k for k in other if weights[k] < share]
    large = [k for k in other if weights[k] >= share]
    below = [2**96 - 1] * 256
    while small and large:
        k, giver = small.pop(), large[-1]
        below[k], other[k] = (weights[k] << 96) // share, giver
        weights[giver] -= share - weights[k]
        if weights[giver] < share:
            small.append(large.pop())
    words = [[(number >> shift) & 0xFFFFFFFF for shift in (64, 32, 0)] for number in below]
    return np.array(words, np.uint32), np.array(other, np.uint32)
