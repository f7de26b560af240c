"""What each client keeps between rounds, on the disk: a file for each round. PRIVATE.

    00000007.DIGEST    the clients that took part in round 7, int64 [n], then the state of each

A client's state is in the latest file that has it. No file is ever changed, so that a run which
goes on from an earlier round finds the states of that round: later files are deleted. DIGEST is a
hash of this file and of the digest before it. As a part of a release's identity it makes sure that
a round which is repeated with other states is another release, which is charged.

In memory are two numbers for each client, and the states of a bucket. On the disk is what was
written since the last call of `forget`, and before it what is still some client's latest, with the
clients that shared its round.
"""

import hashlib
import itertools
import math
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError

PyTree = Any
_INDEX = np.dtype(np.int64)


class ClientStates:
    """The states of a query's clients.

    Attributes:
      digest: of all states.
      round: the last one whose states are here.

    Args:
      directory: made if absent; None = a temporary one.
      clients: their number.
      like: a pytree of shapes of one client's state.
      round: the round to go on after; what was kept of later ones is deleted.

    Raises:
      CorruptFile: the states of `round` are not here, or a file is damaged.
    """

    def __init__(self, directory: Path | None, clients: int, like: PyTree, round: int = 0) -> None:
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._leaves]
        self._bytes = sum(sizes)
        self._parts = list(itertools.pairwise([0, *itertools.accumulate(sizes)]))
        self._directory = directory or Path(tempfile.mkdtemp(prefix="jaxpfl-"))
        if directory is None:
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        files.private_directory(self._directory)
        self._unsynced: list[Path] = []
        self._latest, self._place = np.zeros((2, clients), np.int32)
        self._files: dict[int, tuple[Path, np.ndarray]] = {}
        described = f"{self._structure} {self._leaves}"
        self.digest, self.round = hashlib.sha256(described.encode()).hexdigest(), 0
        for path in sorted(self._directory.glob("[0-9]*.*")):
            number = int(path.stem)
            if number > round:
                path.unlink()
                continue
            count, rest = divmod(path.stat().st_size, _INDEX.itemsize + self._bytes)
            held = np.fromfile(path, _INDEX, count)
            if rest or not np.isin(held, np.arange(clients)).all():
                raise CorruptFile(f"{path}: the clients' states in it are damaged")
            self._index(number, path, held)
        if self.round != round:
            raise CorruptFile(
                f"{self._directory}: the clients' states after round {round} are not here, the "
                f"last are of round {self.round}: the run cannot go on without them"
            )

    def rows(self, clients: np.ndarray) -> tuple[PyTree, np.ndarray]:
        """States [clients, ...], and which of the clients have none yet; -1 is no client."""
        rows = np.zeros((len(clients), self._bytes), np.uint8)
        latest = np.where(clients < 0, 0, self._latest[clients])
        for round in np.unique(latest[latest > 0]).tolist():
            path, written = self._files[round]
            with path.open("rb") as file:
                for slot in np.flatnonzero(latest == round).tolist():
                    place = int(self._place[clients[slot]])
                    file.seek(written.nbytes + place * rows.shape[1])
                    file.readinto(rows[slot].data)
        leaves = [
            np.ascontiguousarray(rows[:, low:high]).view(dtype).reshape(len(clients), *shape)
            for (low, high), (shape, dtype) in zip(self._parts, self._leaves, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves), latest == 0

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
        clients = clients.astype(_INDEX)
        rows = np.zeros((len(clients), self._bytes), np.uint8)
        for leaf, (low, high) in zip(jax.tree.leaves(states), self._parts, strict=True):
            values = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            rows[:, low:high] = values.reshape(len(clients), high - low)
        content = clients.tobytes() + rows.tobytes()
        digest = hashlib.sha256(self.digest.encode() + content).hexdigest()
        path = self._directory / f"{round:08d}.{digest}"
        path.write_bytes(content)
        self._unsynced.append(path)
        self._index(round, path, clients)

    def sync(self) -> None:
        """Returns once everything is on the disk."""
        for path in self._unsynced:
            files.fsync_path(path)
        files.fsync_path(self._directory)
        self._unsynced.clear()

    def forget(self, round: int) -> None:
        """Deletes what is needed no more by a run that goes on from this round or a later one."""
        latest = np.zeros_like(self._latest)
        for number, (_, clients) in self._files.items():
            if number <= round:
                latest[clients] = number
        for number in self._files.keys() - set(np.unique(latest).tolist()):
            if number < round:
                self._files.pop(number)[0].unlink()

    def _index(self, round: int, path: Path, clients: np.ndarray) -> None:
        self._files[round] = path, clients
        self._latest[clients], self._place[clients] = round, np.arange(len(clients))
        self.round, self.digest = round, path.suffix[1:]
