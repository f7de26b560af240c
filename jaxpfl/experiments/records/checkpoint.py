"""Checkpoints: artifacts that are written in the background; a run keeps the last two.

    round_00000010/state.bin        the leaves of the state, sorted by name, one after the other
    round_00000010/record.json      round, dtype and shape of every leaf
    round_00000010/manifest.json    as of any artifact, see `artifacts`

`save` returns once the state is copied to the host, and the run continues during the write. A
checkpoint gets its manifest and its name when all files are on the disk, so a crash never leaves an
incomplete one under that name. `restore` hashes every file before it reads a state.

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
    RECORD,
    Manifest,
    check_manifest,
    named_leaves,
    remove,
    remove_leftovers,
    require_same_leaves,
    schema,
    verified,
    writing,
)

_PREFIX = "round_"
_STATE = "state.bin"
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
        self.run, self.private = run, private
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.directory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, in ascending order."""
        names = (path.name for path in self.directory.glob(f"{_PREFIX}*"))
        digits = (name.removeprefix(_PREFIX) for name in names)
        return sorted(int(each) for each in digits if each.isdecimal())

    def save(self, round: int, state: Any, *, ledger_head: str | None = None) -> None:
        """Starts to write `state`, a pytree of arrays, as the checkpoint after `round` rounds.

        Waits for the previous checkpoint first. The arrays may be donated when this returns.

        Raises:
          OSError: the previous checkpoint could not be written; earlier ones stay intact.
          CorruptFile: so, because another process may hold the run directory by now.
        """
        self.wait()
        # Copies, because the caller may donate or change them during the write.
        leaves = {
            name: np.array(leaf) for name, leaf in jax.device_get(named_leaves(state)).items()
        }
        path = self._path(round)
        manifest = Manifest(path.name, self.run, private=self.private, ledger_head=ledger_head)
        self._under_way = self._thread.submit(self._write, path, manifest, round, leaves)

    def wait(self) -> None:
        """Blocks until the checkpoint that was started is on the disk; raises as `save` of it."""
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
        for position, round in enumerate(rounds):
            try:
                return self._read(round, like)
            except CorruptFile as error:
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, _GONE):
                    raise error.__cause__ from None
                faults.append(str(error))
                if position + 1 < len(rounds):
                    previous = self._path(rounds[position + 1])
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

    def _write(
        self, path: Path, manifest: Manifest, round: int, leaves: dict[str, np.ndarray]
    ) -> None:
        """Writes a checkpoint and deletes old ones; on failure none of it is left."""
        try:
            with writing(path, manifest) as folder:
                record = {"round": round, "leaves": schema(leaves)}
                (folder / RECORD).write_text(files.json_text(record))
                with (folder / _STATE).open("wb") as file:
                    for name in sorted(leaves):
                        file.write(_bytes_of(leaves[name]))
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        for old in self.rounds()[:-_KEPT]:
            remove(self._path(old))
        files.without_times(self.directory)

    def _read(self, round: int, like: Any) -> Restored:
        path = self._path(round)
        manifest = verified(path)
        check_manifest(path, manifest, run=self.run)
        record = files.read_record(path / RECORD, {"leaves": dict, "round": int})
        if record["round"] != round:
            raise CorruptFile(f"{path}: holds the checkpoint of round {record['round']}")
        leaves = named_leaves(like)
        require_same_leaves(record["leaves"], leaves, str(path))
        found, size = {}, sum(leaf.nbytes for leaf in leaves.values())
        if not (path / _STATE).is_file() or (path / _STATE).stat().st_size != size:
            raise CorruptFile(f"{path / _STATE}: must be a file of {size} bytes")
        with (path / _STATE).open("rb") as file:
            for name in sorted(leaves):
                values = np.empty(leaves[name].shape, leaves[name].dtype)
                file.readinto(_bytes_of(values))
                found[name] = _placed(values, leaves[name])
        structure = jax.tree_util.tree_structure(like)
        state = jax.tree_util.tree_unflatten(structure, (found[name] for name in leaves))
        return Restored(round, state, manifest.ledger_head)

    def _path(self, round: int) -> Path:
        return self.directory / f"{_PREFIX}{round:08d}"


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a new array, whatever its dtype."""
    return array.reshape(-1).view(np.uint8).data


def _placed(restored: np.ndarray, like: Any) -> Any:
    """With the sharding of `like`, if that is a JAX array."""
    return jax.device_put(restored, like.sharding) if isinstance(like, jax.Array) else restored
