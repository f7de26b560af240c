"""Keys: where noise comes from, and what it must not come from."""

import ast
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.federated import RunSecret
from jaxpfl.privacy import keys, mechanisms
from tests.refusals import refusal


def words(key: jax.Array) -> list[int]:
    return np.asarray(jax.random.key_data(key)).tolist()


def test_a_seed_counts_beyond_its_32nd_bit():
    """TRUST 21: `jax.random.key` drops the top bits with x64 off; ours must not."""
    seeds = (7, 7 + 2**32, 7 + 2**64, 7 + 2**127)
    assert len({tuple(words(keys.training_root(seed))) for seed in seeds}) == 4
    assert words(keys.training_root(7)) == words(keys.training_root(7))
    for wrong in (-1, 1.0, True, "1", float("nan")):
        for use in (keys.training_root, RunSecret.reproducible):
            refusal(lambda use=use, wrong=wrong: use(wrong), "seed")


def test_the_noise_of_a_seed_is_not_what_its_training_draws_from():
    """TRUST 21: the config's seed does not give the noise, not even a reproducible one."""
    root, secret = keys.training_root(5), RunSecret.reproducible(5)
    found = [words(secret.key(purpose, "")) for purpose in ("train", "noise", "shared noise")]
    assert words(root) not in found
    assert words(root) != np.frombuffer(secret.words, np.uint32).tolist()


def test_each_purpose_has_keys_of_its_own():
    """TRUST 18, 21: a round's noise is no draw that its clients make, nor of its cohort."""
    secret = RunSecret(bytes(range(16)))
    purposes = ("train", "noise", "checksum", "shared noise", "cohort")
    assert len({secret.digest(purpose, "round 1") for purpose in purposes}) == 5
    assert len({tuple(words(secret.key(purpose, "round 1"))) for purpose in purposes}) == 5
    # No text is a part of a purpose.
    assert secret.digest("noise", "1") != secret.digest("nois", "e1")


@pytest.mark.parametrize("made", ["words_of", "seed"])
def test_what_follows_from_a_secret_has_128_bits_of_its_own(made):
    """TRUST 21: each bit is another function of the secret, and none of 32 bits gives them all."""
    derive = getattr(RunSecret(bytes(range(16))), made)
    found = [derive("purpose", str(number)) for number in range(2**18)]
    drawn = [each if made == "seed" else int.from_bytes(each.tobytes(), "big") for each in found]
    digits = np.array([[each >> place & 1 for place in range(128)] for each in drawn[:256]])
    assert np.linalg.matrix_rank(digits) == 128
    # Of so many numbers that follow from 32 bits, sixteen would be expected to occur twice.
    assert len(set(drawn)) == 2**18


def test_all_128_bits_count():
    """TRUST 21: every bit of the four words is in the key."""
    chosen = np.array([2**32 - 1, 0, 0xDEADBEEF, 2**31], np.uint32)
    drawn = float(jax.random.normal(keys.key_from_words(chosen)))
    for position in range(4):
        for bit in (0, 31):
            other = chosen.copy()
            other[position] ^= np.uint32(1 << bit)
            changed = keys.key_from_words(other)
            assert words(changed) == other.tolist()
            assert float(jax.random.normal(changed)) != drawn


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_other_implementations_are_refused_for_noise(implementation):
    """TRUST 20: typed keys, pinned to threefry4x32, also inside jit and after fold_in."""
    key = jax.random.key(0, impl=implementation)
    draw = partial(mechanisms.standard_normal, shape=(3,))
    for use in (draw, jax.jit(draw)):
        refusal(lambda use=use: use(key), "threefry4x32")
    for raw in (np.zeros(4, np.uint32), jnp.zeros(2, jnp.uint32), 0, None, [1, 2, 3, 4]):
        refusal(lambda raw=raw: draw(raw), "typed JAX key")


def test_an_unpinned_default_does_not_reach_the_noise():
    """TRUST 20: changing JAX's default implementation changes no root and no secret's key."""
    with jax.default_prng_impl("rbg"):
        root, key = keys.training_root(3), RunSecret.reproducible(3).key("noise", "")
    assert str(jax.random.key_impl(root)) == str(jax.random.key_impl(key)) == "threefry4x32"
    assert words(root) == words(keys.training_root(3))
    assert words(key) == words(RunSecret.reproducible(3).key("noise", ""))


def table_of_purposes() -> set[str]:
    """The first column of the first table at the head of `privacy.keys`."""
    head = (keys.__doc__ or "").split("The PUBLIC root")[0]
    cells = [line.split("|")[1].strip() for line in head.splitlines() if line.startswith("|")]
    return set(cells[2:])


def purposes_in(source: str) -> set[str]:
    """The purposes that something is drawn from a secret for."""
    methods = {"digest", "key", "seed", "words_of"}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        holder = ast.unparse(node.func.value).split(".")[-1]
        if node.func.attr in methods and holder.endswith("secret"):
            purpose = node.args[0]
            assert isinstance(purpose, ast.Constant), ast.unparse(node)
            found.add(str(purpose.value))
    return found


def test_the_table_lists_every_purpose_that_a_secret_is_used_for():
    package = Path(keys.__file__).parents[1]
    used = [purposes_in(path.read_text("utf-8")) for path in package.rglob("*.py")]
    assert table_of_purposes() == set().union(*used)
    assert purposes_in("x = self._secret.key('lunch', text)") == {"lunch"}
