"""Checkpoints: artifacts whose arrays Orbax writes in the background; a run keeps the last two.

    round_00000010/state/           the leaves of the state, written by Orbax with their sharding,
                                    each under its place among the sorted names of all
    round_00000010/record.json      dtype and shape of every leaf
    round_00000010/manifest.json    as of any artifact, see `artifacts`

`save` returns once the state is copied to the host, and the run continues during the write. A
checkpoint gets its manifest and its name when all files are on the disk, so a crash never leaves an
incomplete one under that name. `restore` hashes every file BEFORE Orbax opens any, because Orbax
does not notice flipped bits.

Nothing in a checkpoint tells when it was written, because that depends on how much the clients of
the round hold. Orbax therefore writes no OCDBT, whose binary manifest has times, and what it notes
of the checkpoint as a whole is cut down to the kind of its content.
"""

import errno
import gc
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.records import artifacts
from jaxpfl.federated import mesh
from jaxpfl.models.base import named_leaves, require_same_leaves, schema

_PREFIX = "round_"
_KEPT = 2
# What a checkpoint takes besides its arrays: Orbax's metadata, our record, and whole pages.
_METADATA_BYTES = 2**18
_BYTES_PER_ARRAY = 2**14
_SECONDS_TO_END = 0.05
# The codes of TensorStore's ValueErrors that are no fault of the files, such as too many open ones.
_OF_THE_MACHINE = {
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN",
}  # fmt: skip
# Of a file that cannot be read at all, only these say that it is not the one that was written.
_GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
# What Orbax and TensorStore raise of damaged files. Their metadata may lack keys, be nested without
# end, or name arrays that are not there.
_DAMAGE = (ValueError, LookupError, AttributeError, TypeError, RecursionError, *_GONE)


class Restored(NamedTuple):
    """A checkpoint after `round` rounds; `ledger_head` is that of the ledger when it was saved."""

    round: int
    state: Any
    ledger_head: str | None


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run; only the process that holds the run's lock uses them.

    A context manager that exits once everything is on the disk. `rounds` and `restore` ignore a
    checkpoint that is still being written: call `wait` first.

    Args:
      directory: created if absent, and cleared of what a crash left.
      run: the run's id; a checkpoint of another run is refused.
    """

    def __init__(self, directory: str | Path, *, run: str, private: bool = True) -> None:
        import orbax.checkpoint as ocp

        self.directory = files.user_path(directory).absolute()
        self.run = run
        self.private = private
        self.directory.mkdir(parents=True, exist_ok=True)
        artifacts.remove_leftovers(self.directory)
        # Of several processes, each writes checkpoints of its own, if any.
        self._alone, own = not mesh.several(), jax.process_index()
        only: Any = {"primary_host": own, "active_processes": {own}}
        only["barrier_sync_key_prefix"] = f"jaxpfl{own}"
        options = ocp.options.MultiprocessingOptions(**({} if self._alone else only))
        logging.getLogger("absl").addFilter(_is_needed)
        self._arrays = ocp.StandardCheckpointer(multiprocessing_options=options, use_ocdbt=False)
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
        leaves = named_leaves(state)
        path = self._path(round)
        if self._alone:
            _require_room(path, leaves)
        manifest = artifacts.Manifest(
            path.name, self.run, private=self.private, ledger_head=ledger_head
        )
        temporary = artifacts.begin(path)
        try:
            (temporary / artifacts.RECORD).write_text(files.json_text({"leaves": schema(leaves)}))
            self._begin_arrays(temporary / "state", leaves)
        except BaseException:
            with suppress(Exception):
                self._arrays.wait_until_finished()
            artifacts.discard(temporary)
            raise
        self._under_way = self._thread.submit(self._finish, temporary, path, manifest)

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
            self._arrays.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the last checkpoint could not be written, either: {failed}")

    def _finish(self, temporary: Path, path: Path, manifest: artifacts.Manifest) -> None:
        """Completes a checkpoint, in the background; on failure none of it is left."""
        try:
            self._arrays.wait_until_finished()
            _cut_down(temporary / "state")
            artifacts.commit(temporary, path, manifest)
        except BaseException as error:
            artifacts.discard(temporary)
            if isinstance(error, ValueError) and not isinstance(error, CorruptFile):
                # Orbax raises it when the disk is full, with all settings of its storage.
                if "No space left on device" in str(error):
                    full = errno.ENOSPC
                    raise OSError(full, os.strerror(full), str(path)) from error
                raise OSError(f"{path}: the checkpoint cannot be written: {error}") from error
            raise
        for old in self.rounds()[:-_KEPT]:
            artifacts.remove(self._path(old))
        files.without_times(self.directory)

    def _begin_arrays(self, directory: Path, leaves: dict[str, Any]) -> None:
        """Starts to write the leaves; returns once they are copied to the host."""
        # Numpy arrays are copied, because the caller may change them during the write. Of several
        # processes, Orbax only takes arrays that all of them share.
        arrays = {place: leaves[name] for name, place in _places(leaves).items()}
        for place, leaf in arrays.items():
            if not (isinstance(leaf, jax.Array) and self._alone):
                arrays[place] = np.array(leaf)
        self._arrays.save(directory, arrays)

    def _read(self, round: int, like: Any) -> Restored:
        path = self._path(round)
        manifest = artifacts.verified(path)
        artifacts.check_manifest(path, manifest, run=self.run)
        record = files.read_record(path / artifacts.RECORD, {"leaves": dict})
        leaves = named_leaves(like)
        require_same_leaves(record["leaves"], leaves, str(path))
        places = _places(leaves)
        wanted = {place: self._wanted(leaves[name]) for name, place in places.items()}
        found = self._restored_arrays(path, wanted)
        arrays = {name: _placed(found[place], leaves[name]) for name, place in places.items()}
        structure = jax.tree_util.tree_structure(like)
        state = jax.tree_util.tree_unflatten(structure, ({**leaves, **arrays}[n] for n in leaves))
        return Restored(round, state, manifest.ledger_head)

    def _restored_arrays(self, path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a checkpoint whose files have the right hashes."""
        cause = None
        with _in_silence():
            try:
                return self._arrays.restore(path / "state", wanted)
            except Exception as error:
                # Orbax raises a plain `Exception` where the file of an array is missing.
                if type(error) is not Exception and not isinstance(error, _DAMAGE):
                    raise
                code = str(error).partition(":")[0]
                if code in _OF_THE_MACHINE:
                    raise OSError(f"{path}: its arrays cannot be read now ({code})") from error
                cause = error.with_traceback(None)
                cause.__cause__ = cause.__context__ = None
            # What else was being read ends in other threads, and is deleted here.
            time.sleep(_SECONDS_TO_END)
            gc.collect()
        raise CorruptFile(f"{path}: its arrays cannot be read ({type(cause).__name__})") from cause

    def _wanted(self, leaf: Any) -> Any:
        if not self._alone:
            return np.empty(leaf.shape, leaf.dtype)
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def _path(self, round: int) -> Path:
        return self.directory / f"{_PREFIX}{round:08d}"


@contextmanager
def _in_silence() -> Iterator[None]:
    """Drops what asyncio reports of exceptions that nobody has asked for."""
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    disabled, logger.disabled = logger.disabled, True
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        logger.disabled, sys.unraisablehook = disabled, hook


def _places(leaves: dict[str, Any]) -> dict[str, str]:
    """What Orbax calls each leaf that is not empty: a folder's name, which its own may not be."""
    return {name: str(at) for at, name in enumerate(sorted(leaves)) if leaves[name].size}


def _cut_down(state: Path) -> None:
    """Takes times, and the path of the run, out of what Orbax wrote with the arrays."""
    path = state / "_CHECKPOINT_METADATA"
    kept = {"item_handlers": json.loads(path.read_bytes())["item_handlers"]}
    timeless = {**kept, "init_timestamp_nsecs": 0, "commit_timestamp_nsecs": 0}
    path.write_text(json.dumps(timeless), encoding="utf-8")
    (state / "commit_success.txt").write_bytes(b"")


def _is_needed(record: logging.LogRecord) -> bool:
    """Drops the warning that there is no OCDBT to merge, with which Orbax ends each checkpoint."""
    return "merge of OCDBT" not in str(record.msg)


def _placed(restored: Any, like: Any) -> Any:
    return jax.device_put(restored, like.sharding) if isinstance(like, jax.Array) else restored


def _require_room(path: Path, leaves: dict[str, Any]) -> None:
    """Refuses what the disk has no room for, before Orbax logs a page of tracebacks."""
    needed = sum(leaf.nbytes + _BYTES_PER_ARRAY for leaf in leaves.values()) + _METADATA_BYTES
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
