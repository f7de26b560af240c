"""Checkpoints: Orbax for the arrays, our own SHA-256 manifest, whole or absent.

A checkpoint is a folder `round_00000010/` with

    state/          the state's leaves, written by Orbax
    meta.json       round, run id, the ledger's head, path + shape + dtype of every leaf
    manifest.json   size and SHA-256 of every file above, and of this list itself

It is made under a temporary name, synced to the disk and renamed; it is deleted by renaming first.
So a crash at any instant leaves whole checkpoints and rubbish with a telling name, never a half
one under its final name. A restore hashes every file BEFORE Orbax opens any (Orbax reads flipped
bits without complaint).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError

_PREFIX = "round_"
_TEMPORARY = ".tmp-"
_DELETED = ".deleted-"


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read back: `state` on the host, `round` and `ledger_head` of it."""

    round: int
    state: Any
    ledger_head: str


class Checkpoints:
    """The checkpoints of one run, in one directory, for one process (the run's lock holder).

    Attributes:
      directory: the folder that holds them; made here, rubbish of a crash is removed here.
      run: run id; a checkpoint of another run is refused.
      private: false is written into every checkpoint of a run that is not private.
      keep: how many of the latest are kept.
    """

    def __init__(
        self, directory: str | Path, *, run: str, private: bool = True, keep: int = 2
    ) -> None:
        self.directory = Path(directory).absolute()
        self.run = run
        self.private = private
        self.keep = keep
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in self.directory.iterdir():
            if entry.name.startswith((_TEMPORARY, _DELETED)):
                shutil.rmtree(entry, ignore_errors=True)

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, in increasing order, whether intact or not."""
        found = []
        for entry in self.directory.iterdir():
            digits = entry.name.removeprefix(_PREFIX)
            if entry.name.startswith(_PREFIX) and digits.isdecimal():
                found.append(int(digits))
        return sorted(found)

    def save(self, round: int, state: Any, *, ledger_head: str) -> None:
        """Writes `state` (a pytree of arrays) as the checkpoint after `round` rounds.

        Raises:
          OSError: when the disk is full or read-only; earlier checkpoints are intact then.
        """
        leaves = _named_leaves(state)
        temporary = self.directory / f"{_TEMPORARY}{round:08d}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            _write_arrays(temporary / "state", leaves)
            meta = {
                "round": round,
                "run": self.run,
                "private": self.private,
                "ledger_head": ledger_head,
                "leaves": _schema(leaves),
            }
            (temporary / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
            (temporary / "manifest.json").write_text(_render(_listing(temporary)))
            files.fsync_tree(temporary)
            final = self._path(round)
            if final.exists():
                self._delete(final)
            os.rename(temporary, final)
            files.fsync_directory(self.directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in self.rounds()[: -self.keep]:
            self._delete(self._path(old))

    def restore(self, like: Any, *, warn: Callable[[str], None]) -> Restored | None:
        """Reads the latest intact checkpoint into the structure of `like`; None if there is none.

        Args:
          like: pytree of arrays or `jax.ShapeDtypeStruct` with the state's structure.
          warn: is told, for each damaged checkpoint, its name, its fault and what is tried next.

        Raises:
          CorruptFile: checkpoints exist and none is intact.
          InputError: the latest intact one belongs to another run or another model.
        """
        rounds = self.rounds()[::-1]
        faults = []
        for position, round in enumerate(rounds):
            try:
                meta, arrays = self._read(round)
            except CorruptFile as error:
                faults.append(str(error))
                if position + 1 < len(rounds):
                    following = self._path(rounds[position + 1])
                    warn(f"{error}; falling back to the previous checkpoint, {following}")
                continue
            return Restored(round, self._assemble(round, meta, arrays, like), meta["ledger_head"])
        if faults:
            raise CorruptFile("no intact checkpoint is left: " + "; ".join(faults))
        return None

    def _read(self, round: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        path = self._path(round)
        _verify(path)
        meta = files.read_json(path / "meta.json")
        if meta["run"] != self.run:
            raise InputError(
                f"{path}: belongs to run {meta['run']}, expected run {self.run}: the config, the "
                "code's plan or the noise key is not the one this run began with"
            )
        try:
            arrays = _read_arrays(path / "state", meta["leaves"])
        except Exception as error:
            # Hashes are right, so the fault is in how it was written: still not usable.
            kind = type(error).__name__
            raise CorruptFile(f"{path}: its arrays cannot be read ({kind})") from error
        return meta, arrays

    def _assemble(
        self, round: int, meta: dict[str, Any], arrays: dict[str, np.ndarray], like: Any
    ) -> Any:
        expected = _schema(_named_leaves(like))
        if meta["leaves"] != expected:
            different = sorted(
                name
                for name in meta["leaves"].keys() | expected.keys()
                if meta["leaves"].get(name) != expected.get(name)
            )
            name = different[0]
            raise InputError(
                f"{self._path(round)}: leaf {name!r} is {meta['leaves'].get(name)}, expected "
                f"{expected.get(name)} ({len(different)} leaves differ)"
            )
        structure = jax.tree_util.tree_structure(like)
        return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in expected])

    def _path(self, round: int) -> Path:
        return self.directory / f"{_PREFIX}{round:08d}"

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(f"{_DELETED}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        files.fsync_directory(self.directory)
        shutil.rmtree(doomed)


def _named_leaves(tree: Any) -> dict[str, Any]:
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len(leaves) != len(jax.tree_util.tree_leaves(tree)):
        raise InputError("two leaves of the state have one name: dictionary keys hold a '.'")
    return leaves


def _schema(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves.items()}


def _write_arrays(directory: Path, leaves: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    # Orbax refuses arrays without elements; their shape in meta.json is all there is to them.
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items() if leaf.size}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(directory, args=ocp.args.PyTreeSave(arrays))


def _read_arrays(directory: Path, schema: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    empty = {n: np.empty(shape, dtype) for n, (dtype, shape) in schema.items() if 0 in shape}
    like = {n: np.empty(shape, dtype) for n, (dtype, shape) in schema.items() if n not in empty}
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(
            directory, args=ocp.args.PyTreeRestore(item=like, restore_args=arguments)
        )
    return {**arrays, **empty}


def _listing(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": files.sha256_file(path),
        }
        for path in sorted(directory.rglob("*"))
        if path != directory / "manifest.json" and not path.is_dir()
    }


def _render(listing: dict[str, Any]) -> str:
    """The manifest's text: every byte of it follows from the list."""
    digest = hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": listing, "sha256": digest}, indent=1) + "\n"


def _verify(directory: Path) -> None:
    """Raises `CorruptFile`, naming the file, unless every file is the one that was written."""
    manifest = files.read_json(directory / "manifest.json")
    listing = manifest.get("files") if isinstance(manifest, dict) else None
    path = directory / "manifest.json"
    if not isinstance(listing, dict) or path.read_text(errors="replace") != _render(listing):
        raise CorruptFile(f"{path}: was altered: it fails its own SHA-256")
    found = _listing(directory)
    for name, expected in listing.items():
        if name not in found:
            raise CorruptFile(f"{directory / name}: is missing")
        if found[name]["bytes"] != expected["bytes"]:
            raise CorruptFile(
                f"{directory / name}: has {found[name]['bytes']} bytes, expected "
                f"{expected['bytes']}"
            )
        if found[name] != expected:
            raise CorruptFile(f"{directory / name}: was altered: it fails its SHA-256")
    extra = found.keys() - listing.keys()
    if extra:
        raise CorruptFile(f"{directory / min(extra)}: is not in the manifest")
