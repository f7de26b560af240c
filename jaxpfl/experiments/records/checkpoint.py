"""Checkpoints: artifacts that are written in the background; a run keeps the last two.

    round_00000010/record.json      dtype and shape of every leaf of the state
    round_00000010/arrays.npz       the bytes of each, under its place among the leaves
    round_00000010/manifest.json    as of any artifact, see `artifacts`

`save` returns once the state is copied to the host, and the run continues during the write. A
checkpoint gets its manifest and its name when all files are on the disk, so a crash never leaves an
incomplete one under that name. `restore` hashes every file before it opens any.

Nothing in a checkpoint tells when it was written, because that depends on how much the clients of
the round hold.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.records.artifacts import (
    ARRAYS,
    RECORD,
    Artifact,
    Manifest,
    check_manifest,
    remove,
    remove_leftovers,
    store,
    verified,
)
from jaxpfl.models.base import named_leaves, require_same_leaves, schema

_PREFIX = "round_"
_KEPT = 2
# Of a file that cannot be read at all, only these say that it is not the one that was written.
_GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class Restored(NamedTuple):
    """A checkpoint after `round` rounds; `ledger_head` is that of the ledger when it was saved."""

    round: int
    state: Any
    ledger_head: str | None


class Checkpoints:
    """The checkpoints of one run; only the process that holds the run's lock uses them.

    A context manager that exits once everything is on the disk. `rounds` and `restore` ignore a
    checkpoint that is still being written: call `wait` first.

    Args:
      directory: created if absent, and cleared of what a crash left.
      run: the run's id; a checkpoint of another run is refused.
      private: recorded in every checkpoint.
    """

    def __init__(self, directory: str | Path, *, run: str, private: bool = True) -> None:
        self.directory = Path(directory).absolute()
        self.run = run
        self.private = private
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.directory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def rounds(self) -> list[int]:
        """The rounds with a checkpoint, in increasing order; it may be damaged."""
        names = (entry.name for entry in self.directory.glob(f"{_PREFIX}*"))
        digits = (name.removeprefix(_PREFIX) for name in names)
        return sorted(int(each) for each in digits if each.isdecimal())

    def save(self, round: int, state: Any, *, ledger_head: str | None = None) -> None:
        """Starts to write `state`, a pytree of arrays, as the checkpoint after `round` rounds.

        Waits for the previous checkpoint first. The arrays may be donated when this returns.

        Raises:
          OSError: this or the previous checkpoint cannot be written; earlier ones stay intact.
          CorruptFile: so, because another process may hold the run directory by now.
        """
        self.wait()
        path, leaves = self._path(round), named_leaves(state)
        manifest = Manifest(path.name, self.run, private=self.private, ledger_head=ledger_head)
        # Copies, because the caller may donate or change the arrays during the write.
        copies = (np.array(leaf).reshape(-1).view(np.uint8) for leaf in leaves.values())
        arrays = {str(place): copy for place, copy in enumerate(copies)}
        artifact = Artifact({"leaves": schema(leaves)}, arrays)
        self._under_way = self._thread.submit(self._finish, path, artifact, manifest)

    def wait(self) -> None:
        """Blocks until the checkpoint that was started is on the disk; raises as `save`."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def restore(self, like: Any, *, warn: Callable[[str], None]) -> Restored | None:
        """Reads the latest intact checkpoint; None if there are no checkpoints.

        Args:
          like: a pytree of arrays with the state's structure and shardings.
          warn: called with a message for each damaged checkpoint that is skipped.

        Raises:
          CorruptFile: checkpoints exist, but none is intact.
          OSError, MemoryError, JaxRuntimeError: the machine cannot read or hold one now. An older
            one is no substitute: the rounds after it would be repeated, and perhaps charged again.
          InputError: the latest intact one belongs to another run or another model.
        """
        rounds = self.rounds()[::-1]
        faults = []
        for round, following in zip(rounds, [*rounds[1:], None], strict=False):
            try:
                return self._read(round, like)
            except CorruptFile as error:
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, _GONE):
                    raise error.__cause__ from None
                faults.append(str(error))
                if following is not None:
                    previous = self._path(following)
                    warn(f"{error}; falling back to the previous checkpoint, {previous}")
        if faults:
            raise CorruptFile("no checkpoint of the run is intact: " + "; ".join(faults))
        return None

    def close(self) -> None:
        """Waits for the last checkpoint; nothing can be saved afterwards."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the last checkpoint could not be written, either: {failed}")

    def _finish(self, path: Path, artifact: Artifact, manifest: Manifest) -> None:
        """Writes a checkpoint, in the background; on failure none of it is left."""
        store(path, artifact, manifest)
        for old in self.rounds()[:-_KEPT]:
            remove(self._path(old))
        files.without_times(self.directory)

    def _read(self, round: int, like: Any) -> Restored:
        path = self._path(round)
        manifest = verified(path)
        check_manifest(path, manifest, run=self.run)
        record = files.read_record(path / RECORD, {"leaves": dict})
        leaves = named_leaves(like)
        require_same_leaves(record["leaves"], leaves, str(path))
        held, found = files.read_npz(path / ARRAYS), []
        for place, leaf in enumerate(leaves.values()):
            content = held.get(str(place), np.zeros(0))
            if content.dtype != np.uint8 or content.nbytes != leaf.nbytes:
                raise CorruptFile(f"{path / ARRAYS}: does not hold the leaves of its record")
            array = content.view(leaf.dtype).reshape(leaf.shape)
            found.append(
                jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
            )
        structure = jax.tree_util.tree_structure(like)
        state = jax.tree_util.tree_unflatten(structure, found)
        return Restored(round, state, manifest.ledger_head)

    def _path(self, round: int) -> Path:
        return self.directory / f"{_PREFIX}{round:08d}"
