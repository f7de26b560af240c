"""The noise of a BLT and of a tree: what its definition says, of any round, with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.privacy import correlated_noise
from jaxpfl.privacy.correlated_noise import BufferedStream, TreeStream, stream_of
from jaxpfl.privacy.keys import training_root
from jaxpfl.privacy.mechanisms import standard_normal
from jaxpfl.privacy.strategies import unit
from tests.plans import flat_plan
from tests.privacy.test_correlated_noise import draws_of, rounds_of
from tests.privacy.test_strategies import BLT, FIELDS, dense, furthest, tree
from tests.refusals import refusal

WIDTH = 12
STREAMS = {
    "blt": lambda seed=0, width=WIDTH: BufferedStream(BLT, 2.5, training_root(seed), width),
    "tree": lambda seed=0, width=WIDTH: TreeStream(2.5, training_root(seed), width),
}


def nodes_of(rounds: int) -> np.ndarray:
    """The draws of the nodes, as `tree` lists them, float64 [nodes, WIDTH]."""
    draw = jax.jit(lambda key: standard_normal(key, (WIDTH,)))
    found = []
    for level in range(rounds.bit_length()):
        for first in range(0, rounds - 2**level + 1, 2 ** (level + 1)):
            own = jax.random.fold_in(training_root(0), level)
            found.append(draw(jax.random.fold_in(own, (first + 2**level) >> level)))
    return np.asarray(found, np.float64)


def test_noise_of_a_blt_is_the_inverse_strategy_times_the_draws():
    """A dense inverse in float64, and the draws can be had back: nothing else is in it."""
    found = rounds_of(STREAMS["blt"](), range(1, 26))
    wanted = 2.5 * np.linalg.inv(dense(BLT, 25)) @ draws_of(25)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dense(BLT, 25) @ found / 2.5, draws_of(25), atol=1e-4)


def test_noise_of_a_tree_is_that_of_the_nodes_of_each_prefix():
    found = np.cumsum(rounds_of(STREAMS["tree"](), range(1, 26)), axis=0)
    # The nodes whose rounds add up to a prefix, one for each 1 in its binary form.
    prefixes = np.tril(np.ones((25, 25)))
    chosen = np.rint(np.linalg.lstsq(tree(25).T, prefixes.T, rcond=None)[0]).T
    np.testing.assert_array_equal(chosen @ tree(25), prefixes)
    np.testing.assert_allclose(found, 2.5 * chosen @ nodes_of(25), rtol=1e-5, atol=1e-5)
    assert len(np.unique(nodes_of(25))) == nodes_of(25).size


@pytest.mark.parametrize("noise", ["blt", "tree"])
def test_a_client_moves_what_the_stream_hides_as_far_as_is_charged(noise):
    """The strategy from the noise itself, in units of its independent draws."""
    rounds, separation = 9, 3
    plan = flat_plan(**FIELDS, rounds=rounds, separation=separation, noise=noise)
    found = rounds_of(stream_of(plan, training_root(0), WIDTH), range(1, rounds + 1))
    if noise == "blt":
        own = draws_of(rounds) @ np.linalg.pinv(found)
    else:
        # The prefix of all rounds has too few nodes to find the matrix; its scale can be found.
        scale = np.std(found[0]) / np.std(nodes_of(rounds)[0])
        own = tree(rounds) / scale
    own = np.where(np.abs(own) < 1e-6, 0, own)
    for epochs in (1, 2, 3):
        shown = own if noise == "tree" else own[: epochs * separation]
        moved = furthest(shown[:, : epochs * separation], epochs * separation, separation)
        assert moved <= np.sqrt(epochs) * (1 + 1e-4)
    if noise == "blt":
        assert moved == pytest.approx(np.sqrt(3), rel=1e-4)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_resumed_stream_gives_the_same_bits(kind):
    """From the start to any round at once, again, backwards: as round after round."""
    straight = rounds_of(STREAMS[kind](), range(1, 15))
    for rounds in ([14], [1, 5, 6, 14], [3, 3, 2, 14, 13, 1]):
        np.testing.assert_array_equal(
            rounds_of(STREAMS[kind](), rounds), straight[np.array(rounds) - 1]
        )
    assert not np.any(rounds_of(STREAMS[kind](1), range(1, 15)) == straight)


@pytest.mark.parametrize("kind", STREAMS)
def test_one_program_serves_all_rounds(kind):
    noises = STREAMS[kind]()
    compiled = correlated_noise._of_tree if kind == "tree" else correlated_noise._advance
    noises.noise(1)
    before = compiled._cache_size()
    for round in (2, 3, 7, 20, 4):
        noises.noise(round)
    assert compiled._cache_size() == before


@pytest.mark.parametrize("kind", STREAMS)
def test_what_has_no_stream_is_refused(kind):
    """TRUST 20."""
    refusal(lambda: STREAMS[kind](width=0), "width")
    refusal(lambda: STREAMS[kind]().noise(0), "round must")
    made = BufferedStream if kind == "blt" else TreeStream
    parts = (BLT,) if kind == "blt" else ()
    refusal(lambda: made(*parts, 1.0, jax.random.key(0), WIDTH), "threefry4x32")
    refusal(lambda: made(*parts, 1.0, jnp.zeros(4, jnp.uint32), WIDTH), "typed JAX key")


def test_the_stream_has_the_unit_that_is_charged():
    """Its first round's draw is alone, so that its deviation is u."""
    plan = flat_plan(**FIELDS, rounds=12, separation=3, noise="blt")
    first = np.asarray(stream_of(plan, training_root(0), 100_000).noise(1))
    assert first.std() == pytest.approx(unit(plan.noise.blt, 12, 3), rel=0.02)
