"""Small programs, honest and not: each planted leak is found and named with its line."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InformationLeak
from jaxpfl.federated import client_mesh
from jaxpfl.federated.double_word import DoubleWord
from jaxpfl.federated.flow.check import Labelled, check_program
from jaxpfl.federated.release.accumulators import rounded_sum, scaled
from jaxpfl.federated.release.information_flow import STEPS
from jaxpfl.federated.release.sum_digest import bound_to_bits
from jaxpfl.privacy.clipping import clip_factors
from jaxpfl.privacy.mechanisms import standard_normal
from tests.federated.cohorts import DIM

CLIENTS = 8
MESH = client_mesh(1)
GIVEN = Labelled(
    jax.ShapeDtypeStruct((DIM,), np.float32),
    jax.ShapeDtypeStruct((), np.float32),
    jax.ShapeDtypeStruct((CLIENTS, DIM), np.float32),
    jax.ShapeDtypeStruct((4,), np.uint32),
    jax.eval_shape(lambda: jax.random.key(0, impl="threefry4x32")),
)


def factors_of(contributions, bound):
    return jax.vmap(lambda leaf: clip_factors(leaf, bound)[0])(contributions)


def total_of(given, bound=None):
    bound = given.clip_norm if bound is None else bound
    return jnp.sum(scaled(given.clients, factors_of(given.clients, bound)), axis=0)


def noise_of(given, *sums, width=DIM, std=None):
    key = bound_key(given, sums)
    return standard_normal(key, (width,)) * (given.clip_norm if std is None else std)


def bound_key(given, sums):
    return typed(bound_to_bits(given.noise_key, sums, ())[0])


def typed(words):
    return jax.random.wrap_key_data(words, impl="threefry4x32")


def noisy(total, noise):
    return rounded_sum(DoubleWord(total, jnp.zeros_like(total)), noise)


def noised(given, total):
    return noisy(total, noise_of(given, total))


def honest(given):
    return noised(given, total_of(given)) / 7 + given.public


def metric_beside_it(given):
    return honest(given), jnp.mean(jnp.abs(given.clients))


def bounded_metric_beside_it(given):
    return honest(given), jnp.sum(jnp.where(given.clients[:, 0] > 0, 1.0, 0.0))


def denominator_of_the_data(given):
    return honest(given) / jnp.sum(jnp.float32(jnp.any(given.clients != 0, axis=1)))


def clip_norm_of_the_data(given):
    return noised(given, total_of(given, jnp.median(jnp.abs(given.clients))))


def another_clip_norm(given):
    return noised(given, total_of(given, 1000 * given.clip_norm))


def sum_without_clip(given):
    return noised(given, jnp.sum(given.clients, axis=0))


def one_term_without_clip(given):
    return noised(given, total_of(given) + given.clients[0])


def factors_of_others(given):
    factors = factors_of(given.clients, given.clip_norm)
    return noised(given, jnp.sum(scaled(given.clients, factors[::-1]), axis=0))


def clipped_and_then_changed(given):
    factors = factors_of(given.clients, given.clip_norm)
    return noised(given, jnp.sum(scaled(jnp.exp(given.clients), factors), axis=0))


def function_of_the_sum(given):
    return noised(given, jnp.square(total_of(given)))


def deviation_of_the_data(given):
    total = total_of(given)
    return noisy(total, noise_of(given, total, std=jnp.std(given.clients)))


def coordinates_without_noise(given):
    total = total_of(given)
    noise = noise_of(given, total, width=DIM - 1)
    return noisy(total, jnp.concatenate([noise, jnp.zeros(1)]))


def noise_masked(given):
    total = total_of(given)
    return noisy(total, noise_of(given, total) * jnp.float32(jnp.arange(DIM) > 0))


def noise_repeated(given):
    total = total_of(given)
    noise = noise_of(given, total, width=1)
    return noisy(total, jnp.broadcast_to(noise, (DIM,)))


def same_noise_in_two_sums(given):
    total, other = total_of(given), total_of(given._replace(clients=given.clients[:4]))
    noise = noise_of(given, total, other)
    return noisy(total, noise), noisy(other, noise)


def key_and_one_made_of_it(given):
    total, other = total_of(given), total_of(given._replace(clients=given.clients[:4]))
    key = bound_key(given, (total, other))
    first, second = (standard_normal(each, (DIM,)) for each in (key, jax.random.split(key, 1)[0]))
    return noisy(total, first), noisy(other, second)


def two_sums(derive):
    """Each sum gets noise of one of two keys, which are derived from the bound one."""

    def program(given):
        total, other = total_of(given), total_of(given._replace(clients=given.clients[:4]))
        keys = derive(bound_key(given, (total, other)))
        first, second = (standard_normal(key, (DIM,)) for key in keys)
        return noisy(total, first), noisy(other, second)

    program.__name__ = derive.__name__
    return program


@two_sums
def folded_with_two_numbers(key):
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)


@two_sums
def first_keys_of_two_splits(key):
    return jax.random.split(key, 2)[0], jax.random.split(key, 3)[0]


@two_sums
def first_of_a_split_and_folded_with_zero(key):
    return jax.random.split(key)[0], jax.random.fold_in(key, 0)


@two_sums
def folded_by_row_and_alone(key):
    rows = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(3))
    return jax.random.fold_in(key, 0), rows[0]


@two_sums
def folded_with_numbers_that_may_be_equal(key):
    return jax.random.fold_in(key, jnp.argmax(jnp.zeros(2))), jax.random.fold_in(key, 0)


def factors_of_other_rows(given):
    """Each client's contribution times every client's factor."""
    factors = factors_of(given.clients, given.clip_norm)
    return noised(given, jnp.sum(scaled(given.clients[None], factors), axis=(0, 1)))


def name_beside_it(given):
    total = total_of(given)
    words, name = bound_to_bits(given.noise_key, total, ())
    return noisy(total, standard_normal(typed(words), (DIM,))), name


def row_by_row(given, place=lambda index: index):
    """Each client's contribution, and the factor at another place, if it is another."""
    factors = factors_of(given.clients, given.clip_norm)

    def add_row(index, total):
        row = jax.lax.dynamic_slice_in_dim(given.clients, index, 1)
        factor = jax.lax.dynamic_slice_in_dim(factors, place(index), 1)
        return total + jnp.sum(scaled(row, factor), axis=0)

    return noised(given, jax.lax.fori_loop(0, CLIENTS // 2, add_row, jnp.zeros(DIM)))


def factors_of_rows_elsewhere(given):
    return row_by_row(given, lambda index: index + 2)


def same_key_drawn_twice(given):
    total, other = total_of(given), total_of(given._replace(clients=given.clients[:4]))
    key = bound_key(given, (total, other))
    return noisy(total, standard_normal(key, (DIM,))), noisy(other, standard_normal(key, (DIM,)))


def noise_not_bound(given):
    total = total_of(given)
    return noisy(total, standard_normal(typed(given.noise_key), (DIM,)))


def noise_bound_to_another_sum(given):
    total = total_of(given)
    return noisy(total, noise_of(given, total_of(given._replace(clients=given.clients[:4]))))


def noise_of_a_public_key(given):
    total = total_of(given)
    return noisy(total, standard_normal(jax.random.key(0, impl="threefry4x32"), (DIM,)))


def noise_keyed_by_the_data(given):
    total = total_of(given)
    key = jax.random.fold_in(bound_key(given, total), jnp.int32(given.clients[0, 0]))
    return noisy(total, standard_normal(key, (DIM,)))


def key_beside_it(given):
    total = total_of(given)
    key = bound_key(given, total)
    return noisy(total, standard_normal(key, (DIM,))), jax.random.key_data(key)


def noise_beside_it(given):
    total = total_of(given)
    noise = noise_of(given, total)
    return noisy(total, noise), noise


def secret_beside_it(given):
    return honest(given), given.noise_key


def words_of_the_key_beside_it(given):
    total = total_of(given)
    words, name = bound_to_bits(given.noise_key, total, ())
    return noisy(total, standard_normal(typed(words), (DIM,))), words, name


def branch_by_the_data(given):
    found = honest(given)
    return jax.lax.cond(given.clients[0, 0] > 0, lambda: found, lambda: -found)


def loop_as_long_as_the_data(given):
    steps = jnp.int32(given.clients[0, 0])
    return honest(given), jax.lax.while_loop(lambda n: n < steps, lambda n: n + 1, 0)


def scan_over_the_data(given):
    total, _ = jax.lax.scan(lambda sum, x: (sum + x, x), jnp.zeros(DIM), given.clients)
    return honest(given), total


def hidden_in_calls(given):
    @jax.custom_vjp
    def inner(x):
        return jax.checkpoint(lambda y: jnp.max(y))(x)

    inner.defvjp(lambda x: (inner(x), x), lambda x, g: (g * x,))
    spec = jax.sharding.PartitionSpec()
    outer = jax.shard_map(jax.jit(inner), mesh=MESH, in_specs=spec, out_specs=spec)
    return honest(given), outer(given.clients)


def noise_in_a_loop(given):
    total = total_of(given)
    key = bound_key(given, total)

    def draw(_, row):
        return None, standard_normal(key, (1,))

    return noisy(total, jax.lax.scan(draw, None, jnp.arange(DIM))[1].reshape(-1))


def noise_added_in_a_loop(given):
    total = total_of(given)
    noise = noise_of(given, total)
    totals = scaled(given.clients, factors_of(given.clients, given.clip_norm))
    return jax.lax.map(lambda each: noisy(each, noise), totals)


def noise_of_many_sums(given):
    totals = scaled(given.clients, factors_of(given.clients, given.clip_norm))
    return jax.vmap(noisy, (0, None))(totals, noise_of(given, totals))


def noise_on_each_device(given):
    total = jnp.concatenate([total_of(given)] * 2)
    key = bound_key(given, total)
    spec = jax.sharding.PartitionSpec
    drawn = jax.shard_map(
        lambda key: standard_normal(key, (DIM,)),
        mesh=client_mesh(2),
        in_specs=spec(),
        out_specs=spec("clients"),
        check_vma=False,
    )
    return noisy(total, drawn(key))


def noise_from_outside_on_each_device(given):
    sums = scaled(given.clients, factors_of(given.clients, given.clip_norm))
    spec = jax.sharding.PartitionSpec
    on_each = jax.shard_map(
        lambda sums, noise: noisy(sums.sum(0), noise),
        mesh=client_mesh(2),
        in_specs=(spec("clients"), spec()),
        out_specs=spec("clients"),
        check_vma=False,
    )
    return on_each(sums, noise_of(given, sums))


def same_noise_reversed(given):
    total, half = total_of(given), DIM // 2
    noise = noise_of(given, total)
    return noisy(total[:half], jnp.flip(noise)[:half]), noisy(total[-half:], noise[-half:])


def one_key_as_two(given):
    total = total_of(given)
    key = bound_key(given, total)
    first, second = jnp.broadcast_to(key, (2,))
    zero = jnp.zeros_like(total)
    return tuple(
        noisy(part, standard_normal(key, (DIM,)) * given.clip_norm)
        for part, key in ((total, first), (zero, second))
    )


LEAKS = {
    noise_from_outside_on_each_device: r"on every coordinate",
    same_noise_reversed: r"on every coordinate",
    one_key_as_two: r"a key that depends on secret keys",
    first_keys_of_two_splits: r"a key that depends on secret keys",
    first_of_a_split_and_folded_with_zero: r"a key that depends on secret keys",
    folded_by_row_and_alone: r"a key that depends on secret keys",
    folded_with_numbers_that_may_be_equal: r"a key that depends on secret keys",
    noise_added_in_a_loop: r"on every coordinate",
    noise_of_many_sums: r"one draw of noise is added to several sums",
    noise_on_each_device: r"drawn in a loop or on each device",
    metric_beside_it: r"\[1\] depends on the clients' data",
    bounded_metric_beside_it: r"\[1\] depends on the clients' data",
    denominator_of_the_data: r"the result depends on the clients' data .* = div ",
    clip_norm_of_the_data: r"clipped to a norm that depends on the clients' data",
    another_clip_norm: r"clipped to another norm than the round's",
    sum_without_clip: r"added to what is no sum of clipped contributions",
    one_term_without_clip: r"added to what is no sum of clipped contributions.* = add ",
    factors_of_others: r"added to what is no sum of clipped contributions.* = scaled ",
    clipped_and_then_changed: r"added to what is no sum of clipped contributions.* = scaled ",
    function_of_the_sum: r"added to what is no sum of clipped contributions.* = square ",
    deviation_of_the_data: r"noise of a public size .* depends on the clients' data.* = mul ",
    coordinates_without_noise: r"on every coordinate",
    noise_masked: r"on every coordinate",
    noise_repeated: r"on every coordinate",
    same_noise_in_two_sums: r"have the same noise",
    key_and_one_made_of_it: r"drawn twice with one key",
    factors_of_other_rows: r"added to what is no sum of clipped contributions.* = scaled ",
    factors_of_rows_elsewhere: r"added to what is no sum of clipped contributions.* = scaled ",
    same_key_drawn_twice: r"drawn twice with one key",
    noise_not_bound: r"a key that is not bound to the sum",
    noise_bound_to_another_sum: r"not bound to the sum that it is added to",
    noise_of_a_public_key: r"a key that depends on public values alone",
    noise_keyed_by_the_data: r"a key that depends on the clients' data.* = random_fold_in ",
    key_beside_it: r"\[1\] depends on secret keys",
    noise_beside_it: r"\[1\] depends on secret keys",
    secret_beside_it: r"\[1\] depends on secret keys",
    words_of_the_key_beside_it: r"\[1\] depends on secret keys",
    branch_by_the_data: r"the result depends on the clients' data .* = cond ",
    loop_as_long_as_the_data: r"\[1\] depends on the clients' data .* = while ",
    scan_over_the_data: r"\[1\] depends on the clients' data",
    hidden_in_calls: r"\[1\] depends on the clients' data .* = reduce_max ",
    noise_in_a_loop: r"drawn in a loop or on each device",
}
# Whose cause is no equation, but an input, or the whole.
WITHOUT_LINE = {
    "same_noise_in_two_sums",
    "key_beside_it",
    "noise_beside_it",
    "secret_beside_it",
    "words_of_the_key_beside_it",
    "bounded_metric_beside_it",
    "scan_over_the_data",
}


@pytest.mark.parametrize("program", [honest, row_by_row, name_beside_it])
def test_an_honest_program_passes(program):
    """A release's name is an output of the hash, of which no noise is drawn."""
    found = check_program(program, GIVEN, STEPS)
    assert len(found.noisy) == 1
    assert found.constants == ()


def test_keys_that_are_folded_with_two_numbers_are_two():
    assert len(check_program(folded_with_two_numbers, GIVEN, STEPS).noisy) == 2


@pytest.mark.parametrize("program", LEAKS, ids=lambda program: program.__name__)
def test_a_planted_leak_is_named_with_its_equation(program):
    # Otherwise JAX's own check of keys, where a test asks for it, comes first.
    with (
        jax.debug_key_reuse(False),
        pytest.raises(InformationLeak, match=LEAKS[program]) as caught,
    ):
        check_program(program, GIVEN, STEPS)
    named = re.findall(r"test_planted_leaks\.py:(\d+)", str(caught.value))
    if program.__name__ not in WITHOUT_LINE:
        assert named


def test_a_function_of_the_same_name_is_not_taken_for_a_step():
    """Steps are recognised by where they are defined."""

    @partial(jax.jit)
    def rounded_sum(pair, noise):
        return pair.high

    def program(given):
        total = total_of(given)
        return rounded_sum(DoubleWord(total, total), noise_of(given, total))

    with pytest.raises(InformationLeak, match="depends on the clients' data otherwise"):
        check_program(program, GIVEN, STEPS)
