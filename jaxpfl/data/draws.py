"""Random numbers of clients and examples that do not depend on which other clients take part.

A draw is a function of its purpose, a seed, the client's id and, for an example, the position of
the example among its client's. It is never a function of an index into the population. Therefore
neighbouring populations differ in the draws of one client alone, and a simulation can be repeated
on a part of the clients.

The draws come from SHA-256 and splitmix64 (Steele, Lea and Flood, OOPSLA 2014, figure 16). They are
for simulation only: whoever knows seed and id can compute them, so that no privacy guarantee may
depend on them.
"""

import hashlib

import numpy as np
import pyarrow as pa

from jaxpfl import checks


def generator_of(text: str) -> np.random.Generator:
    """Returns a generator whose draws follow from a text, which names their purpose, alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


def client_uniforms(purpose: str, seed: int, client_ids: pa.Array) -> np.ndarray:
    """Returns a number in [0, 1) for each client, float64 [clients].

    Draws for different purposes or seeds (whole numbers >= 0) are independent.
    """
    return _to_unit(_client_words(purpose, seed, client_ids))


def example_uniforms(
    purpose: str, seed: int, client_ids: pa.Array, offsets: np.ndarray
) -> np.ndarray:
    """Returns a number in [0, 1) for each example, float64 [examples]; see `client_uniforms`.

    Appending an example to a client does not change the draws of its other examples.
    """
    state = np.repeat(_client_words(purpose, seed, client_ids), np.diff(offsets))
    place = place_in_client(offsets).astype(np.uint64)
    with np.errstate(over="ignore"):
        word = state + np.uint64(0x9E3779B97F4A7C15) * (place + np.uint64(1))
        # The finaliser of splitmix64, a bijection of uint64.
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return _to_unit(word ^ (word >> np.uint64(31)))


def place_in_client(offsets: np.ndarray) -> np.ndarray:
    """Returns the position, from 0, of each example among its client's, int64 [examples]."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def _client_words(purpose: str, seed: int, client_ids: pa.Array) -> np.ndarray:
    """64 random bits for each client, uint64 [clients]."""
    start = f"{purpose} {checks.non_negative_int('seed', seed)} "
    addresses = (f"{start}{id_}".encode() for id_ in client_ids.to_pylist())
    words = [hashlib.sha256(address).digest()[:8] for address in addresses]
    return np.frombuffer(b"".join(words), ">u8").astype(np.uint64)


def _to_unit(word: np.ndarray) -> np.ndarray:
    """The upper 53 bits of uint64 as float64 in [0, 1)."""
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
