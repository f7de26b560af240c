"""The hash that noise is bound to: no change of a sum goes unseen, on any number of devices."""

import hashlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpfl.federated import client_mesh
from jaxpfl.federated.release import sum_digest as module
from jaxpfl.federated.release.sum_digest import bound_to_bits, noise_key_and_name, sum_digest

SECRET = bytes(range(32))
WIDTH = 4 * module.BLOCKS
NUMBERS = (np.float32(2.5), np.float32(-1), np.int32(7))


def vectors(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-(2**31), 2**31, WIDTH).astype(np.int32) for _ in range(2)]


def digest(held, numbers=NUMBERS, devices: int = 1, secret: bytes = SECRET) -> bytes:
    mesh = client_mesh(devices)
    dealt = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return sum_digest(secret, jax.device_put(held, dealt), numbers)


def test_it_is_hmac_of_tags_of_blocks():
    """Against HMAC as RFC 2104 writes it, with the pads."""

    def by_hand(message: bytes) -> bytes:
        key = SECRET.ljust(64, b"\0")
        inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + message).digest()
        return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()

    first, second = vectors()
    blocks = (part.reshape(module.BLOCKS, -1) for part in (first, second))
    tags = (by_hand(b"block" + one.tobytes() + two.tobytes()) for one, two in zip(*blocks))  # noqa: B905
    shapes = f"int32[{WIDTH}];int32[{WIDTH}];float32[];float32[];int32[]".encode()
    numbers = b"".join(number.tobytes() for number in NUMBERS)
    expected = by_hand(b"sum" + shapes + b"\0" + numbers + b"".join(tags))
    assert digest(vectors()) == expected
    words = noise_key_and_name(np.frombuffer(SECRET, np.uint32), on_one(vectors()), NUMBERS)
    assert b"".join(part.tobytes() for part in words) == expected


def on_one(held):
    return [jax.device_put(part, jax.devices()[0]) for part in held]


def test_every_word_of_every_device_decides():
    """A flipped bit anywhere, two words swapped, the vectors swapped, other numbers or shapes."""
    start, seen = vectors(), {digest(vectors(), devices=2)}
    cases = 1
    for which in range(2):
        for place in (0, 1, WIDTH // 2 - 1, WIDTH // 2, WIDTH - 1):
            for bit in (0, 31):
                held = [part.copy() for part in start]
                held[which].view(np.uint32)[place] ^= np.uint32(1 << bit)
                seen.add(digest(held, devices=2))
                cases += 1
    for first, last in ((0, 1), (0, WIDTH // 2), (3, WIDTH - 1)):
        held = [part.copy() for part in start]
        held[0][[first, last]] = held[0][[last, first]]
        seen.add(digest(held, devices=2))
        cases += 1
    halves = [np.roll(part, WIDTH // 2) for part in start]
    floats = [part.view(np.float32) for part in start]
    for held in (start[::-1], halves, floats, [np.append(part, start[0][:64]) for part in start]):
        seen.add(digest(held, devices=2))
        cases += 1
    for numbers in (NUMBERS[:2], (*NUMBERS[:2], np.float32(7)), (NUMBERS[1], NUMBERS[0], 7)):
        seen.add(digest(start, tuple(map(np.asarray, numbers)), devices=2))
        cases += 1
    assert len(seen) == cases


def test_it_is_a_function_of_every_bit_of_the_secret():
    seen = set()
    for bit in range(8 * len(SECRET)):
        secret = bytearray(SECRET)
        secret[bit // 8] ^= 1 << bit % 8
        seen.add(digest(vectors(), secret=bytes(secret)))
    assert len(seen) == 8 * len(SECRET)
    assert digest(vectors()) not in seen


@pytest.mark.parametrize("width", [64, 192, 2**22])
def test_it_is_the_same_for_every_mesh(width):
    """TRUST 22: blocks are of fixed coordinates; long vectors are hashed by threads."""
    held = [np.arange(width, dtype=np.int32), np.arange(width, dtype=np.int32)[::-1].copy()]
    assert digest(held, devices=2) == digest(held)
    held[1][width - 1] += 1
    assert digest(held, devices=2) != digest([held[0], held[0]])


def test_what_is_traced_is_what_is_computed():
    secret = np.frombuffer(SECRET, np.uint32)
    held = on_one(vectors())
    numbers = [jax.numpy.asarray(number) for number in NUMBERS]
    traced = bound_to_bits(jax.numpy.asarray(secret), held, numbers)
    for found, wanted in zip(traced, noise_key_and_name(secret, held, numbers), strict=True):
        np.testing.assert_array_equal(found, wanted)
