"""The clients' states between rounds, in files. PRIVATE.

    rows                 record p: the last round of the client at place p, and its state after it
    00000007.DIGEST      round 7: whose states these are, 32 bytes; its clients' places, int64 [n],
                         and their records BEFORE it

A client's place is the rank of its name, a keyed hash of its id, among those of all. So a state is
found by its client's id, whatever the order of the clients, and a hash of all names, with which
each round's file begins, tells the states of other clients, which are refused.

A round's file is on the disk before its records change. A run that goes on from an earlier round
takes the later ones back by these files, the last one first. DIGEST is a hash of the new records,
and of the digest before. It is a part of the identity of the next release, so that a round that is
repeated with other states is another release, which is charged. Clients that were never asked take
no room on the disk.
"""

import hashlib
import hmac
import itertools
import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError

PyTree = Any
_PLACE, _ROUND = np.dtype(np.int64), np.dtype(np.int64)


class ClientStates:
    """The states of a query's clients.

    Attributes:
      digest: a hash of all states.
      round: the last one whose states are here.
      record_bytes: the size of one client's record.

    Args:
      states_at: a folder, made if absent (None = a temporary one); the round to go on after, later
        ones are taken back; and the key of the clients' names, which hides their ids.
      ids: the clients' ids, all different; the methods name clients by their indices in it.
      like: a pytree of shapes of one client's state.

    Raises:
      InputError: the folder holds the states of other clients.
      CorruptFile: the states after the round are not here, or a file is damaged.
    """

    def __init__(
        self, states_at: tuple[Path | None, int, bytes], ids: Sequence[str], like: PyTree
    ) -> None:
        directory, round, key = states_at
        names = [hmac.digest(key, client.encode(), "sha256") for client in ids]
        order = sorted(range(len(names)), key=names.__getitem__)
        self._places = np.empty(len(names), _PLACE)
        self._places[order] = np.arange(len(names))
        self._whose = hashlib.sha256(b"".join(names[index] for index in order)).digest()
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._leaves]
        edges = [_ROUND.itemsize, *itertools.accumulate(sizes, initial=_ROUND.itemsize)][1:]
        self._parts, self.record_bytes = list(itertools.pairwise(edges)), edges[-1]
        self._directory = directory or Path(tempfile.mkdtemp(prefix="jaxpfl-"))
        if directory is None:
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        path = files.private_directory(self._directory) / "rows"
        path.touch()
        self._file = path.open("r+b")
        if directory is None:
            path.unlink()  # It goes with the process, even if that is killed.
        weakref.finalize(self, self._file.close)
        described = f"{self._structure} {self._leaves} {self._whose.hex()}"
        self.digest, self.round = hashlib.sha256(described.encode()).hexdigest(), 0
        before = sorted(self._directory.glob("[0-9]*.*"))
        while before and int(before[-1].stem) > round:
            self._take_back(last := before.pop())
            last.unlink()
        if before:
            self._read(before[-1])
            self.digest, self.round = before[-1].suffix[1:], int(before[-1].stem)
        if self.round != round:
            raise CorruptFile(
                f"{self._directory}: the clients' states after round {round} are not here, the "
                f"last are of round {self.round}: the run cannot go on without them"
            )

    def rows(self, clients: np.ndarray) -> tuple[PyTree, np.ndarray]:
        """States [clients, ...], and which of the clients have none yet; -1 is no client."""
        records = self.records(clients)
        leaves = [
            np.ascontiguousarray(records[:, low:high]).view(dtype).reshape(len(clients), *shape)
            for (low, high), (shape, dtype) in zip(self._parts, self._leaves, strict=True)
        ]
        rounds = np.ascontiguousarray(records[:, : _ROUND.itemsize]).view(_ROUND)[:, 0]
        return jax.tree.unflatten(self._structure, leaves), rounds == 0

    def before(self, round: int) -> str:
        """The digest of the states that a round begins with, which must come after the last one."""
        if round <= self.round:
            raise InputError(
                f"clients keep a state between rounds, so that round {round} cannot be asked after "
                f"round {self.round}"
            )
        return self.digest

    def write(self, round: int, clients: np.ndarray, states: PyTree) -> None:
        """Keeps states [clients, ...] as those after a round in which these clients took part."""
        places = self._places[clients]
        records = np.zeros((len(clients), self.record_bytes), np.uint8)
        records[:, : _ROUND.itemsize] = np.array([round], _ROUND).view(np.uint8)
        for leaf, (low, high) in zip(jax.tree.leaves(states), self._parts, strict=True):
            values = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            records[:, low:high] = values.reshape(len(clients), high - low)
        digest = hashlib.sha256(self.digest.encode())
        for part in (places, records):
            digest.update(part.data)
        self.round, self.digest = round, digest.hexdigest()
        before = self._whose + places.tobytes() + self.records(clients).tobytes()
        files.write_atomically(self._directory / f"{round:08d}.{self.digest}", before, mode=0o600)
        self.put(clients, records)

    def sync(self) -> None:
        """Returns once everything is on the disk."""
        files.sync(self._file)

    def forget(self, round: int) -> None:
        """Deletes what only a run that goes on from an earlier round than this needs."""
        for path in self._directory.glob("[0-9]*.*"):
            if int(path.stem) < round:
                path.unlink()

    def records(self, clients: np.ndarray) -> np.ndarray:
        """Records uint8 [clients, bytes]; zeros for a client that was never asked, and for -1."""
        records = np.zeros((len(clients), self.record_bytes), np.uint8)
        for record, client in zip(records, clients.tolist(), strict=True):
            if client >= 0:
                self._file.seek(int(self._places[client]) * self.record_bytes)
                self._file.readinto(record.data)
        return records

    def put(self, clients: np.ndarray, records: np.ndarray) -> None:
        """Writes records as `records` returns them, without a way back."""
        self._put(self._places[clients], records)

    def _put(self, places: np.ndarray, records: np.ndarray) -> None:
        for record, place in zip(records, places.tolist(), strict=True):
            self._file.seek(place * self.record_bytes)
            self._file.write(record.data)
        self._file.flush()

    def _take_back(self, path: Path) -> None:
        content = self._read(path)
        count, rest = divmod(len(content), _PLACE.itemsize + self.record_bytes)
        places = np.frombuffer(content, _PLACE, count)
        if rest or not np.isin(places, self._places).all():
            raise CorruptFile(f"{path}: the clients' states in it are damaged")
        self._put(places, np.frombuffer(content, np.uint8, offset=places.nbytes).reshape(count, -1))
        self.sync()

    def _read(self, path: Path) -> bytes:
        """A round's file, which must be of these clients, without saying so."""
        content = path.read_bytes()
        size = len(self._whose)
        if content[:size] != self._whose:
            raise InputError(
                f"{path}: the states in it are those of other clients, or of another run: go on "
                "with all clients with which the run began, and no others"
            )
        return content[size:]
