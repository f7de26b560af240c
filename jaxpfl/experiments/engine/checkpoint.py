"""Checkpoints: artifacts whose arrays Orbax writes, in the background, the latest few of a run.

    round_00000010/state/           the state's leaves, written by Orbax, sharded ones as they are
    round_00000010/record.json      round, dtype and shape of every leaf
    round_00000010/manifest.json    as of any artifact, see `artifacts`

`save` returns when the state is copied to the host; the run goes on while it is written. The
checkpoint gets its manifest and its name when everything is on the disk, so a crash at any instant
leaves whole checkpoints alone. A restore hashes every file BEFORE Orbax opens any (Orbax reads
flipped bits without complaint).
"""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.engine.artifacts import (
    RECORD,
    Manifest,
    begin,
    check_manifest,
    commit,
    named_leaves,
    remove,
    remove_leftovers,
    require_same_leaves,
    schema,
    verified,
)

_PREFIX = "round_"
_KEPT = 2


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back.

    Attributes:
      round: rounds done when it was saved.
      state: its arrays lie where those of `like` lie.
      ledger_head: the head of the run's ledger when it was saved; None where there was no ledger.
    """

    round: int
    state: Any
    ledger_head: str | None


class Checkpoints:
    """The checkpoints of one run, in one directory, for one process (the run's lock holder).

    A context manager; it ends when everything is on the disk. `rounds` and `restore` see what is
    on the disk: call `wait` first to see what was just saved.

    Attributes:
      directory: the folder that holds them; made here, leftovers of a crash are removed here.
      run: run id; a checkpoint of another run is refused.
      private: false is written into every checkpoint of a run that is not private.
    """

    def __init__(self, directory: str | Path, *, run: str, private: bool = True) -> None:
        import orbax.checkpoint as ocp

        self.directory = Path(directory).absolute()
        self.run = run
        self.private = private
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.directory)
        self._arrays = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, in increasing order, whether intact or not."""
        found = []
        for entry in self.directory.iterdir():
            digits = entry.name.removeprefix(_PREFIX)
            if entry.name.startswith(_PREFIX) and digits.isdecimal():
                found.append(int(digits))
        return sorted(found)

    def save(self, round: int, state: Any, *, ledger_head: str | None = None) -> None:
        """Begins to write `state` (a pytree of arrays) as the checkpoint after `round` rounds.

        Waits for the checkpoint before. The arrays may be donated when this returns.

        Raises:
          OSError: this checkpoint or the one before cannot be written, as where the disk is full;
            those before are intact then.
        """
        self.wait()
        leaves = named_leaves(state)
        path = self._path(round)
        manifest = Manifest(path.name, self.run, private=self.private, ledger_head=ledger_head)
        temporary = begin(path)
        try:
            record = {"round": round, "leaves": schema(leaves)}
            (temporary / RECORD).write_text(files.json_text(record))
            self._begin_arrays(temporary / "state", leaves)
        except BaseException:
            with suppress(Exception):
                self._arrays.wait_until_finished()
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._under_way = self._thread.submit(self._finish, temporary, path, manifest)

    def wait(self) -> None:
        """Returns when the checkpoint that was begun is on the disk.

        Raises:
          OSError: it cannot be written; those before are intact.
        """
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def restore(self, like: Any, *, warn: Callable[[str], None]) -> Restored | None:
        """Reads the latest intact checkpoint into the structure of `like`; None if there is none.

        Args:
          like: pytree of arrays with the state's structure. A JAX array is restored with the
            sharding of the one in `like`, anything else as a numpy array.
          warn: is told, for each damaged checkpoint, its name, its fault and what is tried next.

        Raises:
          CorruptFile: checkpoints exist and none is intact.
          InputError: the latest intact one belongs to another run or another model.
        """
        rounds = self.rounds()[::-1]
        faults = []
        for position, round in enumerate(rounds):
            try:
                return self._read(round, like)
            except CorruptFile as error:
                faults.append(str(error))
                if position + 1 < len(rounds):
                    following = self._path(rounds[position + 1])
                    warn(f"{error}; falling back to the previous checkpoint, {following}")
        if faults:
            raise CorruptFile("no checkpoint of the run is intact: " + "; ".join(faults))
        return None

    def close(self) -> None:
        """Waits for what was begun; nothing can be saved after it."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._arrays.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the checkpoint that was being written is lost, too: {failed}")

    def _finish(self, temporary: Path, path: Path, manifest: Manifest) -> None:
        """In the background: whatever happens, `path` is a whole checkpoint or is not there."""
        try:
            self._arrays.wait_until_finished()
            commit(temporary, path, manifest)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, ValueError):
                # Orbax's, where the disk is full.
                raise OSError(f"{path}: the checkpoint cannot be written: {error}") from error
            raise
        for old in self.rounds()[:-_KEPT]:
            remove(self._path(old))

    def _begin_arrays(self, directory: Path, leaves: dict[str, Any]) -> None:
        """Returns when the leaves are copied to the host."""
        # Orbax refuses arrays without elements; their shape in the record is all there is to them.
        # The caller may change a numpy array while it is written.
        arrays = {
            name: leaf if isinstance(leaf, jax.Array) else np.array(leaf)
            for name, leaf in leaves.items()
            if leaf.size
        }
        self._arrays.save(directory, arrays)

    def _read(self, round: int, like: Any) -> Restored:
        path = self._path(round)
        manifest = verified(path)
        check_manifest(path, manifest, run=self.run)
        leaves = named_leaves(like)
        require_same_leaves(files.read_json(path / RECORD)["leaves"], leaves, str(path))
        try:
            arrays = self._read_arrays(path / "state", leaves)
        except Exception as error:
            # Hashes are right, so the fault is in how it was written: still not usable.
            kind = type(error).__name__
            raise CorruptFile(f"{path}: its arrays cannot be read ({kind})") from error
        structure = jax.tree_util.tree_structure(like)
        state = jax.tree_util.tree_unflatten(structure, [arrays[name] for name in leaves])
        return Restored(round, state, manifest.ledger_head)

    def _read_arrays(self, directory: Path, like: dict[str, Any]) -> dict[str, Any]:
        wanted = {
            name: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=leaf.sharding if isinstance(leaf, jax.Array) else None,
            )
            for name, leaf in like.items()
            if leaf.size
        }
        empty = {name: leaf for name, leaf in like.items() if not leaf.size}
        return {**self._arrays.restore(directory, wanted), **empty}

    def _path(self, round: int) -> Path:
        return self.directory / f"{_PREFIX}{round:08d}"
