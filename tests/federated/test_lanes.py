"""Lanes of `vmap`, clients or examples: each listed operation keeps them apart."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.federated.flow import lanes
from jaxpfl.federated.flow.client_program import programs
from tests.federated.lane_trials import SIZE, TRIALS

LANES = 9
RNG = np.random.default_rng(0)
NEIGHBOURS = [np.nan, np.inf, -np.inf, 1e30, 0.0, 1e-40, 1e6, RNG.normal(size=(SIZE, SIZE))]


def lane_by_lane(function, shape, dtype=np.float32):
    """Wants the same bits of each lane, whatever is in the others and wherever it is itself."""
    mapped = function
    for _ in shape:
        mapped = jax.vmap(mapped)
    mapped = jax.jit(mapped)

    def results(rows):
        found = jax.tree.leaves(mapped(jnp.asarray(rows.reshape(*shape, SIZE, SIZE))))
        return [np.asarray(each).reshape(LANES, -1) for each in found]

    rows = np.random.default_rng(1).uniform(size=(LANES, SIZE, SIZE)).astype(dtype)
    alone = results(rows)
    for place in (0, LANES // 2, LANES - 1):
        for value in NEIGHBOURS:
            changed = rows.copy()
            changed[place] = value
            for expected, found in zip(alone, results(changed), strict=True):
                others = np.delete(np.arange(LANES), place)
                assert expected[others].tobytes() == found[others].tobytes(), value
    for by in (1, 4):
        for expected, found in zip(alone, results(np.roll(rows, by, 0)), strict=True):
            assert np.roll(expected, by, 0).tobytes() == found.tobytes(), "another place"


# Examples within clients; clients; and what `make test` leaves out.
LAYOUTS = [
    *((TRIALS[name], (3, 3), np.float32, ()) for name in TRIALS),
    *((TRIALS[name], (LANES,), np.float32, pytest.mark.long) for name in TRIALS),
    *(
        (TRIALS[name], (3, 3), np.float64, pytest.mark.slow)
        for name in sorted(TRIALS.keys() - {"convolutions"})
    ),
]


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        pytest.param(*case, marks=marks, id=f"{case[0].__name__} {case[1]} {case[2].__name__}")
        for *case, marks in LAYOUTS
    ],
)
def test_each_listed_operation_keeps_lanes_apart(function, shape, dtype):
    """TRUST 52: on the platform that the tests run on, a GPU where there is one."""
    with jax.enable_x64(dtype is np.float64):
        lane_by_lane(function, shape, dtype)


def equations(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in programs(list(eqn.params.values())):
            yield from equations(inner)


def of_one(function):
    return equations(jax.make_jaxpr(function)(jnp.ones((SIZE, SIZE))))


# Older versions of JAX make them of others.
NEWER = {"Frexp", "Ldexp", "Nonzero", "SearchSorted", "log2", "one_minus_square"}


def test_each_member_of_the_list_is_tried_and_nothing_else():
    """The list is what was tried, by name and by parameters."""
    made = [eqn for function in TRIALS.values() for eqn in of_one(function)]
    tried = {lanes.name_of(eqn) for eqn in made}
    assert tried <= lanes.LISTED
    assert lanes.LISTED - tried <= (NEWER if jax.__version_info__ < (0, 12) else set())
    assert not [str(eqn) for eqn in made if lanes.unlisted(eqn, "cpu")]


@functools.cache
def lowered(name, platform):
    traced = jax.jit(jax.vmap(TRIALS[name])).trace(jnp.ones((LANES, SIZE, SIZE)))
    return traced.lower(lowering_platforms=(platform,)).as_text()


# Threefry's rounds, which are no loop on TPUs, take as long to write as all others together.
ELSEWHERE = [
    pytest.param(*case, marks=pytest.mark.long if case == ("draws", "tpu") else ())
    for case in itertools.product(TRIALS, ["cuda", "rocm", "tpu"])
]


@pytest.mark.parametrize(("name", "platform"), ELSEWHERE)
def test_elsewhere_each_is_lowered_to_operations_of_a_program(name, platform):
    """Where it cannot be run: no call of anything else, and no loop that a CPU has not."""
    text, here = lowered(name, platform), lowered(name, "cpu")
    if name == "of places":
        # `empty` is memory as it was found, which the check of the lowered text refuses.
        text = text.replace("custom_call @AllocateBuffer", "")
    assert "custom_call" not in text
    if name != "draws":  # threefry's rounds
        assert len(re.findall("stablehlo.while", text)) == len(re.findall("stablehlo.while", here))
