"""The store of a run's intermediate results: each is written atomically and verified when read.

    FOLDER/NAME/record.json      numbers and texts, as JSON
    FOLDER/NAME/arrays.npz       arrays by name
    FOLDER/NAME/manifest.json    the `Manifest`, size and SHA-256 of the files above, and the
                                 SHA-256 of all of that

An artifact is written under a temporary name, synced and renamed; before it is deleted, it is
renamed: a crash leaves complete artifacts, and leftovers whose names begin with a dot. All files
are verified before they are opened, even right after they were written, so that a resumed run
continues from the same bytes. Checkpoints are artifacts, too; Orbax writes their arrays.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.base import named_leaves, require_same_leaves, schema
from jaxpfl.privacy.ledger import Ledger

_TEMPORARY, _DELETED = ".tmp-", ".deleted-"
_MANIFEST, RECORD, _ARRAYS = "manifest.json", "record.json", "arrays.npz"


class Artifact(NamedTuple):
    """A record in JSON's types, and arrays of numbers and texts, never objects; see `tree_arrays`.

    A tuple in the record is read back as a list, and a non-finite number as None.
    """

    record: Mapping[str, Any] = {}
    arrays: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an artifact is, what it was `made_from` besides the run, and the ledger's head then."""

    what: str
    run: str
    made_from: Any = None
    version: str = version("jaxpfl")
    private: bool = True
    ledger_head: str | None = None


@dataclasses.dataclass(frozen=True)
class Artifacts:
    """The artifacts of one run, in one folder; only the process that holds the run's lock uses it.

    Artifacts of another run are refused, and a ledger that has lost a charge from before an
    artifact was stored.
    """

    folder: Path
    run: str
    ledger: Ledger | None = None
    private: bool = True

    def load_or_compute(
        self, name: str, compute: Callable[[], Artifact], made_from: Any = None
    ) -> Artifact:
        """Returns the artifact stored under `name`; if there is none, computes and stores it."""
        if not self._path(name).exists():
            self.save(name, compute(), made_from)
        return self._read(name, made_from)

    def find(self, name: str, made_from: Any = None) -> Artifact | None:
        """As `load_or_compute`, but returns None if nothing is stored."""
        return self._read(name, made_from) if self._path(name).exists() else None

    def _read(self, name: str, made_from: Any) -> Artifact:
        path = self._path(name)
        check_manifest(path, verified(path), run=self.run, made_from=made_from, ledger=self.ledger)
        return Artifact(files.read_record(path / RECORD), files.read_npz(path / _ARRAYS))

    def save(self, name: str, artifact: Artifact, made_from: Any = None) -> None:
        """Stores an artifact atomically; replaces one of the same name.

        Nothing is stored if the ledger, or a run directory that this process holds, was changed by
        others: `CorruptFile`.
        """
        path, head = self._path(name), None
        if self.ledger is not None:
            self.ledger.require_unchanged()
            head = self.ledger.head
        manifest = Manifest(path.name, self.run, made_from, private=self.private, ledger_head=head)
        arrays = {key: np.asarray(value) for key, value in artifact.arrays.items()}
        temporary = begin(path)
        try:
            (temporary / RECORD).write_text(files.json_text(artifact.record), encoding="utf-8")
            (temporary / _ARRAYS).write_bytes(files.npz(arrays))
            commit(temporary, path, manifest)
        except BaseException as error:
            discard(temporary)
            if isinstance(error, OSError):
                # A failed write does not name its file.
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise

    def sha256(self, name: str) -> str:
        """A digest of a stored artifact's files; does not depend on the run or the folder."""
        verified(self._path(name))
        return _digest(_listing(self._path(name)))

    def _path(self, name: str) -> Path:
        return self.folder / name.replace(" ", "_")


def tree_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a pytree by name, such as "layer.kernel", on the host."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def tree_of(arrays: Mapping[str, Any], like: Any, where: str = "arrays") -> Any:
    """Rebuilds a pytree from `tree_arrays`, of the structure, shapes and dtypes of `like`."""
    leaves = named_leaves(like)
    require_same_leaves(schema(arrays), leaves, where)
    structure = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in leaves])


def begin(path: Path) -> Path:
    """Creates the empty temporary folder in which the artifact `path` is written."""
    files.require_locks()
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def discard(temporary: Path) -> None:
    """Deletes what failed to become an artifact, unless another run may have begun it by now."""
    with suppress(CorruptFile):
        files.require_locks()
        shutil.rmtree(temporary, ignore_errors=True)


def commit(temporary: Path, path: Path, manifest: Manifest) -> None:
    """Completes the artifact in `temporary`: writes its manifest and renames it to `path`."""
    content = {**files.jsonable(dataclasses.asdict(manifest)), "files": _listing(temporary)}
    (temporary / _MANIFEST).write_text(_rendered(content), encoding="utf-8")
    files.without_times(temporary)
    files.fsync_tree(temporary)
    files.require_locks()
    if path.exists():
        remove(path)
    os.rename(temporary, path)
    files.without_times(path.parent)
    files.fsync_path(path.parent)


def remove(path: Path) -> None:
    """Deletes an artifact; a crash leaves it complete, or renamed as deleted."""
    files.require_locks()
    doomed = path.with_name(f"{_DELETED}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    files.fsync_path(path.parent)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Deletes the incomplete artifacts that a crash left in a folder."""
    files.require_locks()
    for entry in (*folder.glob(f"{_TEMPORARY}*"), *folder.glob(f"{_DELETED}*")):
        shutil.rmtree(entry, ignore_errors=True)


def verified(path: Path) -> Manifest:
    """Returns the manifest of an artifact; `CorruptFile` unless all its files are as it says."""
    place = path / _MANIFEST
    content = files.read_record(place, {"files": dict})
    content.pop("sha256", None)
    if place.read_text(encoding="utf-8", errors="replace") != _rendered(content):
        raise CorruptFile(f"{place}: was altered: it does not match its own SHA-256")
    fields = dataclasses.fields(Manifest)
    kinds = {field.name: field.type for field in fields if field.type is not Any}
    listed, present = files.record_of(content, str(place), kinds).pop("files"), _listing(path)
    for name in sorted(listed.keys() | present.keys()):
        actual, expected = present.get(name, "no file"), listed.get(name, "no file")
        if actual != expected:
            raise CorruptFile(f"{path / name}: was altered: found {actual}, expected {expected}")
    try:
        manifest = Manifest(**content)
    except TypeError as error:
        raise CorruptFile(f"{place}: has other fields than a manifest of this version") from error
    if manifest.what != path.name:
        raise CorruptFile(f"{path}: was renamed: it holds the artifact {manifest.what!r}")
    return manifest


def check_manifest(
    path: Path, manifest: Manifest, *, run: str, made_from: Any = None, ledger: Ledger | None = None
) -> None:
    """Refuses an artifact of another run or other inputs, or whose charges the ledger has lost."""
    if manifest.run != run:
        why = "the config, the data or the secret has changed since that run began"
        raise InputError(f"{path}: belongs to run {manifest.run}, expected run {run}: {why}")
    expected = files.jsonable(made_from)
    if manifest.made_from != expected:
        how = f"expected {expected!r}; to make it again, delete the folder or choose another --out"
        raise InputError(f"{path}: was made from {manifest.made_from!r}, {how}")
    if ledger is not None and not ledger.contains(str(manifest.ledger_head)):
        lost = f"does not contain the line that it ended with when {path} was stored"
        raise CorruptFile(f"{ledger.path}: {lost}: the ledger was cut off or replaced")


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    listing = {}
    for path in sorted(folder.rglob("*")):
        if path != folder / _MANIFEST and not path.is_dir():
            about = {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
            listing[path.relative_to(folder).as_posix()] = about
    return listing


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _rendered(content: Mapping[str, Any]) -> str:
    """The manifest's text; its content determines every byte."""
    return files.json_text({**content, "sha256": _digest(content)})
