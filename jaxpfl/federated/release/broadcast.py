"""The broadcast of a query, in arrays that nobody else holds, and its digest.

A release's identity holds a digest of the broadcast, so that another broadcast is another release.
The digest must be of the bits that the program reads. An array of the caller proves nothing: NumPy
arrays can be changed in place, and `jax.device_put` of one can share its memory. Therefore every
leaf is copied, and both the digest and the program read the copy.
"""

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl import cores
from jaxpfl.federated.mesh import PyTree, put

_COMPARED = 1 << 22  # bytes at a time, so that a large leaf needs no large mask
_HASHED = 1 << 18  # bytes, of which each core hashes some at a time


class OwnBroadcast:
    """Copies of one query's broadcast, of which a round only copies and places what has changed.

    Args:
      like: a tree of arrays or shapes like the broadcast.
      places: a tree of `NamedSharding` like it.

    Attributes:
      shapes: of the leaves.
      changed: which leaves are not yet `placed`.
    """

    def __init__(self, like: PyTree, places: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(like)
        self.shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._places = jax.tree.leaves(places)
        number = len(self._places)
        # Weak, because a model that is no longer used takes no memory.
        self._given: list[Any] = [lambda: None] * number
        self._copies: list[Any] = [None] * number
        self._keys: list[Any] = [None] * number  # implementations, of leaves that are keys
        self._digests = [""] * number
        self._placed: list[Any] = [None] * number
        self.changed = [True] * number

    def read(self, broadcast: PyTree) -> str:
        """Copies the leaves, and returns the SHA-256 (hex) of structure, dtypes, shapes and bits.

        The bits of a leaf count by the SHA-256 of each quarter of a megabyte.

        A leaf that is the same object as in the round before is compared with its copy, and not
        hashed again if all bits agree: a frozen model is hashed once.
        """
        for place, leaf in enumerate(jax.tree.leaves(broadcast)):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            bits = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
            if leaf is self._given[place]() and _same_bits(bits, self._copies[place]):
                continue
            self._given[place] = weakref.ref(leaf)
            self._keys[place] = jax.random.key_impl(leaf) if is_key else None
            copy = np.array(bits, order="C")
            content = hashlib.sha256(f"{leaf.dtype} {copy.shape} ".encode())
            whole = _bytes_of(copy)
            parts = [whole[start : start + _HASHED] for start in range(0, len(whole), _HASHED)]
            for part in cores.mapped(_sha256, parts):
                content.update(part)
            digest = content.hexdigest()
            if digest != self._digests[place]:
                self._digests[place], self._copies[place] = digest, copy
                self.changed[place] = True
        described = f"{self._structure} {' '.join(self._digests)}"
        return hashlib.sha256(described.encode()).hexdigest()

    def changes(self) -> list[np.ndarray]:
        """The copies of the leaves that changed, for another process's `receive`."""
        return [copy for copy, new in zip(self._copies, self.changed, strict=True) if new]

    def receive(self, changed: Sequence[bool], copies: Sequence[np.ndarray]) -> None:
        """Takes over what `changes` returned in the process that read the broadcast."""
        received = iter(copies)
        for place, new in enumerate(changed):
            if new:
                self._copies[place], self.changed[place] = next(received), True

    def placed(self) -> PyTree:
        """The copies on the devices that compute, where `places` says."""
        for place, sharding in enumerate(self._places):
            if self.changed[place]:
                array, key = put(self._copies[place], sharding), self._keys[place]
                array = array if key is None else jax.random.wrap_key_data(array, impl=key)
                self._placed[place], self.changed[place] = array, False
        return jax.tree.unflatten(self._structure, self._placed)


def _sha256(part: Any) -> bytes:
    return hashlib.sha256(part).digest()


def _bytes_of(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _same_bits(array: np.ndarray, copy: np.ndarray) -> bool:
    first, second = _bytes_of(array), _bytes_of(copy)
    return all(
        np.array_equal(first[start : start + _COMPARED], second[start : start + _COMPARED])
        for start in range(0, len(first), _COMPARED)
    )
