"""Keys: where noise comes from, and what it must not come from."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.privacy import keys, mechanisms


def words(key: jax.Array) -> list[int]:
    return keys.key_to_words(key)


def test_the_noise_root_is_all_of_128_bits_of_the_systems_entropy(monkeypatch):
    """TRUST 21: os.urandom, every bit of it."""
    asked = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return bytes(range(0xF0, 0xF0 + count))

    monkeypatch.setattr("os.urandom", entropy)
    root = keys.noise_root()
    assert asked == [16]
    assert np.asarray(words(root), np.uint32).tobytes() == bytes(range(0xF0, 0x100))


def test_two_noise_roots_differ_in_every_word():
    """TRUST 21: no default seed."""
    first, second = words(keys.noise_root()), words(keys.noise_root())
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("root", [keys.training_root, keys.noise_root])
def test_a_seed_counts_beyond_its_32nd_bit(root):
    """TRUST 21: `jax.random.key` drops the top bits with x64 off; ours must not."""
    found = {tuple(words(root(seed))) for seed in (7, 7 + 2**32, 7 + 2**64, 7 + 2**200)}
    assert len(found) == 4
    assert words(root(7)) == words(root(7))


def test_training_and_reproducible_noise_roots_of_one_seed_differ():
    """TRUST 21: the config's seed does not give the noise."""
    assert words(keys.training_root(5)) != words(keys.noise_root(reproducible_seed=5))


@pytest.mark.parametrize("seed", [-1, 1.0, True, "1", float("nan")])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(InputError, match="seed"):
        keys.training_root(seed)
    with pytest.raises(InputError, match="seed"):
        keys.noise_root(reproducible_seed=seed)


def test_all_128_bits_survive_a_file():
    """TRUST 21: through JSON and back, the same key."""
    chosen = [2**32 - 1, 0, 0xDEADBEEF, 2**31]
    key = keys.key_from_words(json.loads(json.dumps(chosen)))
    assert words(key) == chosen
    for position in range(4):
        for bit in (0, 31):
            other = list(chosen)
            other[position] ^= 1 << bit
            changed = keys.key_from_words(other)
            assert words(changed) == other
            assert float(jax.random.normal(changed)) != float(
                jax.random.normal(keys.key_from_words(chosen))
            )


@pytest.mark.parametrize("bad", [[], [1, 2], [1, 2, 3, 2**32], [1, 2, 3, -1], [1, 2, 3, True]])
def test_words_that_are_no_key_are_refused(bad):
    with pytest.raises(InputError, match="four whole numbers"):
        keys.key_from_words(bad)


def test_raw_integer_keys_are_refused_for_noise():
    """TRUST 20: typed keys only."""
    for raw in (np.zeros(4, np.uint32), jnp.zeros(2, jnp.uint32), 0, None, [1, 2, 3, 4]):
        with pytest.raises(InputError, match="typed JAX key"):
            mechanisms.gaussian_noise_like(raw, jnp.zeros(3), 1.0)  # type: ignore


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_other_implementations_are_refused_for_noise(implementation):
    """TRUST 20: pinned to threefry4x32, also inside jit and after fold_in."""
    key = jax.random.key(0, impl=implementation)
    with pytest.raises(InputError, match="threefry4x32"):
        mechanisms.gaussian_noise_like(key, jnp.zeros(3), 1.0)
    with pytest.raises(InputError, match="threefry4x32"):
        jax.jit(lambda k: mechanisms.gaussian_noise_like(k, jnp.zeros(3), 1.0))(key)
    with pytest.raises(InputError, match="threefry4x32"):
        keys.round_keys(keys.training_root(0), key, 1)


def test_an_unpinned_default_does_not_reach_the_noise():
    """TRUST 20: changing JAX's default implementation changes no root."""
    with jax.default_prng_impl("rbg"):
        root = keys.noise_root(reproducible_seed=3)
        training = keys.training_root(3)
    assert str(jax.random.key_impl(root)) == "threefry4x32"
    assert words(root) == words(keys.noise_root(reproducible_seed=3))
    assert words(training) == words(keys.training_root(3))


def test_every_round_and_purpose_has_its_own_key():
    """TRUST 22: and a round's keys can be made again alone."""
    training, noise = keys.training_root(0), keys.noise_root(reproducible_seed=0)
    rounds = (0, 1, 2, 1000, 2**31, 2**32 - 2)
    made = [keys.round_keys(training, noise, round) for round in rounds]
    found = {tuple(words(key)) for pair in made for key in pair[:2]}
    shared = keys.term_keys(noise, np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [2**31, 0, 0]]))
    found |= {tuple(words(key)) for key in shared}
    assert len(found) == 2 * len(rounds) + 4
    again = keys.round_keys(training, noise, 1000)
    assert words(again.train) == words(made[3].train)
    assert words(again.noise) == words(made[3].noise)


@pytest.mark.parametrize("round", [-1, 0.5, True, float("nan")])
def test_a_round_that_is_no_whole_number_is_refused(round):
    with pytest.raises(InputError, match="round"):
        keys.round_keys(keys.training_root(0), keys.noise_root(), round)


def test_a_round_beyond_32_bits_is_refused():
    """TRUST 22: it would wrap around to the keys of an earlier round."""
    with pytest.raises((InputError, OverflowError)):
        keys.round_keys(keys.training_root(0), keys.noise_root(), 2**32)
    # Kept for draws that rounds share.
    with pytest.raises(InputError, match="below 2"):
        keys.round_keys(keys.training_root(0), keys.noise_root(), 2**32 - 1)


def test_noise_is_float32_for_narrow_leaves():
    """TRUST 19: only the leaf's shape is read."""
    tree = {"a": jnp.zeros(8, jnp.bfloat16), "b": jnp.zeros((2, 3), jnp.int8)}
    noise = mechanisms.gaussian_noise_like(keys.noise_root(reproducible_seed=1), tree, 1.0)
    assert {leaf.dtype for leaf in jax.tree.leaves(noise)} == {jnp.dtype("float32")}
    assert {name: leaf.shape for name, leaf in noise.items()} == {"a": (8,), "b": (2, 3)}


def test_the_key_of_a_query_depends_on_every_bit_of_root_and_identity():
    identity = bytes(range(16))
    roots = [keys.noise_root(0), keys.noise_root(1)]
    found = {tuple(words(keys.bound_to(root, identity))) for root in roots}
    for byte in range(16):
        for bit in (1, 128):
            changed = bytearray(identity)
            changed[byte] ^= bit
            found.add(tuple(words(keys.bound_to(roots[0], bytes(changed)))))
    assert len(found) == 34
    assert tuple(words(keys.bound_to(roots[0], identity + b"more"))) in found
    with pytest.raises(InputError, match="at least 16 bytes, found 15"):
        keys.bound_to(roots[0], identity[:15])
    with pytest.raises(InputError, match="typed JAX key"):
        keys.bound_to(jnp.zeros(2, jnp.uint32), identity)
