"""The checksum that noise is bound to: no change of a sum goes unseen, and it is spread evenly."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.federated import client_mesh
from jaxpfl.federated.release import checksum as checksum_module
from jaxpfl.federated.release.checksum import WORDS, bound_to_bits, checksum

SECRETS = np.array([1, 0xDEADBEEF, 0, 2**32 - 1], np.uint32)
LANES = checksum_module._LANES
Sum = Callable[[dict[str, np.ndarray]], np.ndarray]


def tree(seed: int = 0) -> dict[str, np.ndarray]:
    """Leaves of several blocks, of less than one, and of one number."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.normal(size=(3, LANES)).astype(np.float32)[:, : LANES - 100],
        "small": rng.normal(size=(4, 3)).astype(np.float32),
        "like small": rng.integers(-(2**31), 2**31, (4, 3)).astype(np.int32),
        "one": np.float32(0.25).reshape(()),
    }


def on(devices: int, secrets: np.ndarray = SECRETS) -> Sum:
    mesh = client_mesh(devices)

    @jax.jit
    def found(secrets_W, held):
        return checksum(secrets_W, held, mesh)

    everywhere = NamedSharding(mesh, PartitionSpec())
    return lambda held: np.asarray(found(*jax.device_put((secrets, held), everywhere)))


def flipped(leaf: np.ndarray, place: int, bit: int) -> np.ndarray:
    words = np.ravel(leaf).view(np.uint32).copy()
    words[place] ^= np.uint32(1 << bit)
    return words.view(leaf.dtype).reshape(leaf.shape)


def rearranged(leaf: np.ndarray, first: int, second: int) -> np.ndarray:
    values = np.ravel(leaf).copy()
    values[[first, second]] = values[[second, first]]
    return values.reshape(leaf.shape)


def changes() -> dict[str, list[dict[str, np.ndarray]]]:
    """Trees that differ from `tree()` a little, by the kind of change."""
    start, rng = tree(), np.random.default_rng(1)
    large = start["large"]
    zeros = {**start, "large": np.zeros_like(large)}
    moved = []
    for place in (0, 1, LANES, 2 * LANES, large.size - 1):
        alone = np.zeros(large.size, np.float32)
        alone[place] = 1.5
        moved.append({**zeros, "large": alone.reshape(large.shape)})
    drawn = rng.choice(np.arange(LANES + 1, large.size - 1), 40, replace=False)
    places = [0, LANES - 1, LANES, large.size - 1, *drawn]
    pairs = [(0, 1), (0, LANES), (5, 5 + 2 * LANES), (LANES - 1, LANES), (7, large.size - 1)]
    return {
        "a bit": [
            {**start, "large": flipped(large, place, bit)}
            for place in places
            for bit in (0, 31, int(rng.integers(1, 31)))
        ]
        + [
            {**start, name: flipped(start[name], place, bit)}
            for name, place in (("small", 0), ("small", 11), ("like small", 6), ("one", 0))
            for bit in range(32)
        ],
        "two values": [{**start, "large": rearranged(large, *pair)} for pair in pairs]
        + [{**start, "small": rearranged(start["small"], 0, 11)}],
        "two leaves": [
            {
                **start,
                "small": start["like small"].view(np.float32),
                "like small": start["small"].view(np.int32),
            }
        ],
        "a place": moved,
    }


def unseen(found: Sum) -> set[str]:
    """The kinds of change that a checksum does not see, each in every one of its words."""
    missed = set()
    for kind, trees in changes().items():
        words = np.stack([found(held) for held in [tree(), *trees]])
        if any(len(np.unique(column)) < len(words) for column in words.T):
            missed.add(kind)
    return missed


def test_every_small_change_of_a_sum_changes_every_word():
    """One flipped bit anywhere, two values or leaves swapped, a value moved."""
    assert unseen(on(1)) == set()


def test_added_zeros_and_leaves_dealt_otherwise_change_it():
    """Nothing that fills up a block stands for a number."""
    found, values = on(2), np.arange(1, 7, dtype=np.float32)
    zero = np.zeros(1, np.float32)
    several = [
        [values],
        [values, zero],
        [zero, values],
        [np.append(values, zero)],
        [np.append(zero, values)],
        [values[:3], values[3:]],
        [values[:2], values[2:]],
        [values, values[:0]],
        [values[:0], values],
    ]
    assert len({found(held).tobytes() for held in several}) == len(several)


@pytest.mark.parametrize("size", [1, 5, LANES, LANES + 1, 3 * LANES - 7])
def test_it_is_the_same_for_every_mesh(size):
    """TRUST 22: devices share the work; fewer blocks than devices, and unequal shares."""
    held = {"x": np.random.default_rng(size).normal(size=size).astype(np.float32)}
    np.testing.assert_array_equal(on(2)(held), on(1)(held))
    assert np.any(on(2)({"x": held["x"] + np.float32(1)}) != on(1)(held))


def test_it_is_a_function_of_every_bit_of_the_secrets():
    found = {on(1)(tree()).tobytes()}
    for word in range(WORDS):
        for bit in (0, 31):
            secrets = SECRETS.copy()
            secrets[word] ^= np.uint32(1 << bit)
            found.add(on(1, secrets)(tree()).tobytes())
    assert len(found) == 1 + 2 * WORDS


def near_vectors(kind: str) -> np.ndarray:
    """100,000 vectors that are all but equal, float32 [n, 3]."""
    steps = np.arange(100_000)
    base = np.tile(np.float32([1.0, -2.0, 0.5]), (len(steps), 1))
    if kind == "last bits":
        words = base.view(np.uint32)
        words[:, 1] += steps.astype(np.uint32)
        return words.view(np.float32)
    base[:, 0], base[:, 1] = steps, -steps  # of one sum
    return base


@pytest.mark.parametrize("kind", ["last bits", "of one sum"])
def test_near_sums_are_spread_as_if_drawn(kind):
    vectors_NxD, mesh = near_vectors(kind), client_mesh(1)
    words_NxW = np.asarray(
        jax.jit(jax.vmap(lambda x_D: checksum(jnp.asarray(SECRETS), x_D, mesh)))(vectors_NxD)
    )
    assert len(np.unique(words_NxW, axis=0)) == len(vectors_NxD)
    # Of so many draws of 32 bits 1.2 are expected to meet another.
    for column_N in words_NxW.T:
        assert len(vectors_NxD) - len(np.unique(column_N)) < 12
    bits = np.unpackbits(words_NxW.view(np.uint8), axis=1).astype(np.float64)
    deviation = 0.5 / len(bits) ** 0.5
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * deviation
    # No bit follows another.
    correlation = np.corrcoef(bits.T) - np.eye(bits.shape[1])
    assert np.abs(correlation).max() < 6 / len(bits) ** 0.5


def test_the_key_is_a_function_of_key_secrets_and_bits():
    mesh = client_mesh(1)
    first, second = (jax.random.key(seed, impl="threefry4x32") for seed in (0, 1))

    @jax.jit
    def bound(key, secrets, held):
        return jax.random.key_data(bound_to_bits(key, secrets, held, mesh))

    other = {**tree(), "one": np.float32(-0.25).reshape(())}
    cases = [
        (first, SECRETS, tree()),
        (second, SECRETS, tree()),
        (first, SECRETS[::-1].copy(), tree()),
        (first, SECRETS, other),
    ]
    found = [np.asarray(bound(*case)).tobytes() for case in cases]
    assert len(set(found)) == len(cases)
    assert np.asarray(bound(*cases[0])).tobytes() == found[0]
