"""The noise's key and a release's name: HMAC-SHA-256 of the sum's bits, computed on the host.

    tag of block i   =  HMAC(secret, "block" | words i of each vector)
    digest           =  HMAC(secret, "sum" | shapes | numbers | tag 0 | tag 1 | ...)
    noise key, name  =  the first and the last 16 bytes of the digest

The secret is of one release alone. Blocks are of fixed coordinates, so that a sum has one digest on
any number of devices that divides `BLOCKS`. Each process computes the tags of its own devices.

Assumption: HMAC-SHA-256 is a pseudorandom function (Bellare 2006, "New proofs for NMAC and HMAC").
Consequence: let q different sums be bound under one secret, however they were chosen, and
put a random function in the place of HMAC, which changes the probability of any event by at most
the advantage against HMAC. Two of the sums differ in their shapes, their numbers or a block.

- Tags of different blocks are equal with probability 2^-256; of at most 64 q blocks two are with at
  most (64 q)^2 2^-257.
- Otherwise the messages of all q digests differ: shapes say where each part of a message ends. The
  digests are then independent and uniform, and so are keys and names, of 128 bits each.

So noise keys of different sums are as good as drawn independently, and none occurs twice but with
probability q^2 2^-129. Equal sums have equal keys.
"""

import hmac
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpfl import cores
from jaxpfl.federated.mesh import of_all_processes

BLOCKS = 64
_LONG = 2**18  # words, of which threads hash some at a time


@jax.jit
def bound_to_bits(
    secret_W: jax.Array, vectors: Sequence[jax.Array], numbers: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`noise_key_and_name` in a program that is traced, but not run, to follow its information."""
    words = jax.ShapeDtypeStruct((4,), np.uint32)
    return jax.pure_callback(noise_key_and_name, (words, words), secret_W, vectors, numbers)


def noise_key_and_name(
    secret_W: Any, vectors: Sequence[Any], numbers: Sequence[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words of the noise's key and of the release's name, uint32 [4] each.

    Args:
      secret_W: uint32 [8], of this release alone.
      vectors: of equal lengths [W], on the same devices, each of which has a share.
      numbers: scalars that every process has.
    """
    digest = sum_digest(np.asarray(secret_W, np.uint32).tobytes(), vectors, numbers)
    key, name = np.frombuffer(digest, np.uint32).reshape(2, 4)
    return key, name


def sum_digest(secret: bytes, vectors: Sequence[Any], numbers: Sequence[Any]) -> bytes:
    """Returns 32 bytes, a pseudorandom function of every bit; see `noise_key_and_name`."""
    tags = _tags(secret, vectors)
    if not vectors[0].is_fully_addressable:
        own = json.dumps({number: tag.hex() for number, tag in tags.items()})
        for text in of_all_processes(own):
            tags |= {int(number): bytes.fromhex(tag) for number, tag in json.loads(text).items()}
    parts = [*vectors, *numbers]
    shapes = ";".join(f"{part.dtype}{list(np.shape(part))}" for part in parts)
    # The text holds no NUL, so that it ends at the first one.
    message = hmac.new(secret, b"sum" + shapes.encode() + b"\0", "sha256")
    for number in numbers:
        message.update(np.asarray(number).tobytes())
    for _, tag in sorted(tags.items()):
        message.update(tag)
    return message.digest()


def _tags(secret: bytes, vectors: Sequence[jax.Array]) -> dict[int, bytes]:
    """The tags of the blocks that this process's devices hold, by their numbers."""
    (width,) = vectors[0].shape
    share = vectors[0].sharding.shard_shape((width,))[0]
    shares = width // share
    blocks = BLOCKS if width % BLOCKS == 0 and BLOCKS % shares == 0 else shares
    size = width // blocks
    begun = hmac.new(secret, b"block", "sha256")
    # `np.asarray` copies nothing from a CPU device.
    shards: list[Any] = [
        {shard.index[0].start or 0: np.asarray(shard.data) for shard in vector.addressable_shards}
        for vector in vectors
    ]

    def tag(number: int) -> bytes:
        place, message = number * size, begun.copy()
        first = place // share * share
        for words in shards:
            message.update(words[first][place - first : place - first + size])
        return message.digest()

    numbers = [n for n in range(blocks) if n * size // share * share in shards[0]]
    if width < _LONG:
        return {number: tag(number) for number in numbers}
    return dict(zip(numbers, cores.mapped(tag, numbers), strict=True))
