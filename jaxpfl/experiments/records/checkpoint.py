"""Checkpoints: artifacts whose arrays Orbax writes in the background; a run keeps the last two.

    round_00000010/state/           the leaves of the state as arrays of Orbax, named by their place
                                    among the sorted names of all leaves
    round_00000010/record.json      dtype and shape of every leaf
    round_00000010/manifest.json    as of any artifact, see `artifacts`

`save` returns once the state is copied to the host, and the run continues during the write.
`restore` hashes every file BEFORE Orbax opens any, because Orbax does not notice flipped bits.

Nothing in a checkpoint tells when it was written, because that depends on how much the clients of
the round hold. So Orbax's handler writes arrays alone: its `Checkpointer`, and OCDBT, add times.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.records import artifacts
from jaxpfl.models.base import named_leaves, require_same_leaves, schema

_PREFIX = "round_"
_CHECKPOINTS = 2
# A checkpoint has metadata of Orbax, our record, and whole pages besides its arrays.
_METADATA_BYTES = 2**18
_BYTES_PER_ARRAY = 2**14
# The codes of TensorStore's ValueErrors that are no fault of the files, such as too many open ones.
_OF_THE_MACHINE = {
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN",
}  # fmt: skip
# Of all errors of reading a file, only these say that it is not the one that was written.
_GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
# Orbax and TensorStore raise these for damaged files, whose metadata may lack keys, be nested
# without end, or name arrays that are not there.
_DAMAGE = (ValueError, LookupError, AttributeError, TypeError, RecursionError, *_GONE)


class Restored(NamedTuple):
    """A checkpoint after `round` rounds; `ledger_head` is that of the ledger when it was saved."""

    round: int
    state: Any
    ledger_head: str | None


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run; only the process that holds the run's lock uses them.

    A context manager that exits once everything is on the disk. `rounds` and `restore` ignore a
    checkpoint that is still being written: call `wait` first. The directory is created if absent,
    and cleared of what a crash left. A checkpoint of another run is refused.
    """

    def __init__(self, directory: str | Path, *, run: str, private: bool = True) -> None:
        self.directory, self.run = files.user_path(directory).absolute(), run
        self.private = private
        self.directory.mkdir(parents=True, exist_ok=True)
        artifacts.remove_leftovers(self.directory)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def rounds(self) -> list[int]:
        """The rounds with a checkpoint, in increasing order; it may be damaged."""
        names = (entry.name for entry in self.directory.glob(f"{_PREFIX}*"))
        digits = (name.removeprefix(_PREFIX) for name in names)
        return sorted(int(number) for number in digits if number.isdecimal())

    def save(self, round: int, state: Any, *, ledger_head: str | None = None) -> None:
        """Starts to write `state`, a pytree of arrays, as the checkpoint after `round` rounds.

        Waits for the previous checkpoint first. The arrays may be donated when this returns. If
        this or the previous one cannot be written (`OSError`, or `CorruptFile` where another
        process may hold the run directory by now), earlier ones stay intact.
        """
        self.wait()
        leaves = {name: np.array(leaf) for name, leaf in named_leaves(state).items()}
        path = self._path(round)
        # Refused here, before Orbax logs a page of tracebacks.
        needed = sum(leaf.nbytes + _BYTES_PER_ARRAY for leaf in leaves.values()) + _METADATA_BYTES
        if shutil.disk_usage(path.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        about: Any = {"private": self.private, "ledger_head": ledger_head}
        manifest = artifacts.Manifest(path.name, self.run, **about)
        self._under_way = self._thread.submit(self._write, path, manifest, leaves)

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the last checkpoint could not be written, either: {failed}")
        finally:
            self._thread.shutdown()

    def _write(
        self, path: Path, manifest: artifacts.Manifest, leaves: dict[str, np.ndarray]
    ) -> None:
        """Writes a checkpoint, in the background; on failure none of it is left."""
        import orbax.checkpoint as ocp

        temporary = artifacts.begin(path)
        try:
            (temporary / artifacts.RECORD).write_text(files.json_text({"leaves": schema(leaves)}))
            # The leaves are copies already. Orbax warns if there is no handler of JAX arrays.
            registry = ocp.type_handlers.create_type_handler_registry(
                (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
                (jax.Array, ocp.type_handlers.ArrayHandler()),
            )
            options = {"use_ocdbt": False, "type_handler_registry": registry}
            handler: Any = ocp.PyTreeCheckpointHandler(**options)
            # Leaves that are not empty, in this thread.
            arrays = {place: leaves[name] for name, place in _places(leaves)}
            handler.save(temporary / "state", args=ocp.args.PyTreeSave(arrays))
            artifacts.commit(temporary, path, manifest)
        except BaseException as error:
            artifacts.discard(temporary)
            if not isinstance(error, ValueError) or isinstance(error, CorruptFile):
                raise
            # Orbax raises it when the disk is full, with all settings of its storage.
            if "No space left on device" in str(error):
                full = errno.ENOSPC
                raise OSError(full, os.strerror(full), str(path)) from error
            raise OSError(f"{path}: the checkpoint cannot be written: {error}") from error
        for old in self.rounds()[:-_CHECKPOINTS]:
            artifacts.remove(self._path(old))
        files.without_times(self.directory)

    def _read(self, round: int, like: Any) -> Restored:
        path = self._path(round)
        manifest = artifacts.verified(path)
        artifacts.check_manifest(path, manifest, run=self.run)
        record = files.read_record(path / artifacts.RECORD, {"leaves": dict})
        leaves = named_leaves(like)
        require_same_leaves(record["leaves"], leaves, str(path))
        arrays = {name: _read_array(path, place, leaves[name]) for name, place in _places(leaves)}
        structure = jax.tree_util.tree_structure(like)
        state = jax.tree_util.tree_unflatten(structure, ({**leaves, **arrays}[n] for n in leaves))
        return Restored(round, state, manifest.ledger_head)

    def _path(self, round: int) -> Path:
        return self.directory / f"{_PREFIX}{round:08d}"


def _read_array(path: Path, place: str, like: Any) -> Any:
    """Reads one array of a checkpoint whose files have the right hashes; it is placed as `like`.

    One after the other: Orbax leaves all other reads running when one fails. It compares the stored
    shape with the one of a JAX array before it allocates memory.
    """
    import orbax.checkpoint as ocp

    wanted = {place: like}
    if isinstance(like, jax.Array):
        wanted = {place: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)}
    options = ocp.checkpoint_utils.construct_restore_args(wanted)
    arguments = ocp.args.PyTreeRestore(wanted, options, partial_restore=True)
    handler: Any = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    try:
        restored = handler.restore(path / "state", args=arguments)
    except Exception as error:
        # Orbax wraps what TensorStore says of a part of an array in a plain `Exception`.
        cause = error.__cause__ if type(error) is Exception else error
        if not isinstance(cause, _DAMAGE):
            raise
        code = str(cause).partition(":")[0]
        if code in _OF_THE_MACHINE:
            raise OSError(f"{path}: its arrays cannot be read now ({code})") from error
        raise CorruptFile(f"{path}: its arrays cannot be read ({type(cause).__name__})") from cause
    return restored[place]


def _places(leaves: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The name of each leaf that is not empty, and how Orbax calls its array and its folder."""
    return ((name, str(place)) for place, name in enumerate(sorted(leaves)) if leaves[name].size)
