"""The store of what a run made: each artifact is written whole, verified, and found again.

    FOLDER/NAME/record.json      numbers and texts, as JSON
    FOLDER/NAME/arrays.npz       arrays by name
    FOLDER/NAME/manifest.json    what it is, the run, what it was made from, the version of jaxpfl,
                                 the head of the ledger after it, size and SHA-256 of every file
                                 above, and the SHA-256 of all of that

An artifact is made under a temporary name, synced to the disk and renamed; it is deleted by
renaming it first. A crash at any instant therefore leaves whole artifacts, and leftovers whose
names begin with a dot; what was being made is made again. Every file is verified before it is
opened, also right after it was written: a resumed run goes on from the very same bytes.

`Checkpoints` are artifacts too; Orbax writes their arrays.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.privacy.ledger import Ledger

_TEMPORARY = ".tmp-"
_DELETED = ".deleted-"
_MANIFEST = "manifest.json"
RECORD = "record.json"
_ARRAYS = "arrays.npz"


class Artifact(NamedTuple):
    """What is stored.

    Attributes:
      record: numbers and texts, stored as JSON: a tuple is found again as a list, and a number
        that is not finite as None.
      arrays: numbers and texts, never objects; for a tree of arrays see `tree_arrays`.
    """

    record: Mapping[str, Any] = {}
    arrays: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an artifact is, besides its files.

    Attributes:
      what: its name, which is its folder's.
      run: the run that made it.
      made_from: what it was made from, as JSON; None where the run says it all.
      version: of jaxpfl.
      private: false for what a run that is not private made.
      ledger_head: of the ledger after its last charge; None where nothing was charged.
    """

    what: str
    run: str
    made_from: Any = None
    version: str = version("jaxpfl")
    private: bool = True
    ledger_head: str | None = None


class Artifacts:
    """The artifacts of one run, in one folder, for one process (the run's lock holder).

    Args:
      folder: made with the first artifact.
      run: identifies the run; an artifact of another run is refused.
      ledger: which the run charges, or None where it charges nothing. A ledger that has lost a
        charge made before an artifact was stored is refused.
      private: false is written into every artifact of a run that is not private.
    """

    def __init__(
        self, folder: Path, *, run: str, ledger: Ledger | None = None, private: bool = True
    ) -> None:
        self.folder = Path(folder)
        self.run = run
        self.ledger = ledger
        self.private = private

    def load_or_compute(
        self, name: str, compute: Callable[[], Artifact], made_from: Any = None
    ) -> Artifact:
        """The artifact that is stored under `name`; if there is none, computes and stores it.

        Args:
          made_from: what the artifact follows from besides the run, anything that JSON can hold
            (a digest of it, where it is large). One that was made from something else is refused.

        Raises:
          InputError: the stored artifact is of another run, or was made from something else.
          CorruptFile: a file is missing or was altered, or the ledger was cut off.
        """
        if not self._path(name).exists():
            self.save(name, compute(), made_from)
        found = self.find(name, made_from)
        assert found is not None
        return found

    def find(self, name: str, made_from: Any = None) -> Artifact | None:
        """As `load_or_compute`, but None where nothing is stored."""
        path = self._path(name)
        if not path.exists():
            return None
        check_manifest(path, verified(path), run=self.run, made_from=made_from, ledger=self.ledger)
        record = files.read_json(path / RECORD)
        try:
            with np.load(path / _ARRAYS, allow_pickle=False) as arrays:
                return Artifact(record, {key: arrays[key] for key in arrays.files})
        except (ValueError, zipfile.BadZipFile) as error:
            raise CorruptFile(
                f"{path / _ARRAYS}: is not an .npz file of numbers and texts"
            ) from error

    def save(self, name: str, artifact: Artifact, made_from: Any = None) -> None:
        """Stores an artifact, whole or not at all; one of the same name is replaced.

        Raises:
          OSError: the disk is full or read-only.
        """
        manifest = Manifest(
            what=self._path(name).name,
            run=self.run,
            made_from=made_from,
            private=self.private,
            ledger_head=None if self.ledger is None else self.ledger.head,
        )
        arrays = {key: np.asarray(value) for key, value in artifact.arrays.items()}
        temporary = begin(self._path(name))
        try:
            files.write_json(temporary / RECORD, dict(artifact.record))
            (temporary / _ARRAYS).write_bytes(files.npz(arrays))
            commit(temporary, self._path(name), manifest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def sha256(self, name: str) -> str:
        """Identifies the content of a stored artifact, whoever made it and when."""
        verified(self._path(name))
        return _digest(_listing(self._path(name)))

    def _path(self, name: str) -> Path:
        stem = name.replace(" ", "_")
        if not stem or stem.startswith(".") or "/" in stem:
            raise InputError(
                f"an artifact's name must be a file's name that begins with no dot, found {name!r}"
            )
        return self.folder / stem


def tree_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree by their names, such as "layer.kernel", on the host."""
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def tree_of(arrays: Mapping[str, Any], like: Any, where: str = "arrays") -> Any:
    """The pytree that `tree_arrays` took apart.

    Args:
      like: has the tree's structure; its leaves have shapes and dtypes.
      where: what the message calls the arrays, such as their file.

    Raises:
      InputError: a leaf is missing, is one too many, or has another shape or dtype.
    """
    leaves = named_leaves(like)
    require_same_leaves(schema(arrays), leaves, where)
    structure = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in leaves])


def require_same_leaves(found: Mapping[str, Any], like: Mapping[str, Any], where: str) -> None:
    """Refuses stored leaves, of which `found` is the `schema`, that are not those of `like`.

    Raises:
      InputError: names the first leaf that is missing, is one too many, or differs.
    """
    expected = schema(like)
    different = sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    if different:
        name = different[0]
        raise InputError(
            f"{where}: leaf {name!r} is {found.get(name)}, expected {expected.get(name)} "
            f"({len(different)} leaves differ)"
        )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their names.

    Raises:
      InputError: two leaves have one name.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    if len(leaves) != len(jax.tree_util.tree_leaves(tree)):
        raise InputError("two leaves of a tree have one name: a dictionary's key holds a '.'")
    return leaves


def schema(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dtype and shape of each leaf, as JSON."""
    return {name: [str(leaf.dtype), list(leaf.shape)] for name, leaf in leaves.items()}


def begin(path: Path) -> Path:
    """Makes the empty temporary folder in which the artifact `path` is to be written."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, path: Path, manifest: Manifest) -> None:
    """Gives the artifact in `temporary` its manifest and its name; it is whole from then on."""
    content = {**files.jsonable(dataclasses.asdict(manifest)), "files": _listing(temporary)}
    (temporary / _MANIFEST).write_text(_rendered(content), encoding="utf-8")
    files.fsync_tree(temporary)
    if path.exists():
        remove(path)
    os.rename(temporary, path)
    files.fsync_path(path.parent)


def remove(path: Path) -> None:
    """Deletes an artifact; a crash leaves it whole, or under a name that says it was deleted."""
    doomed = path.with_name(f"{_DELETED}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    files.fsync_path(path.parent)
    shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Deletes what a crash left in a folder of artifacts."""
    for entry in folder.iterdir():
        if entry.name.startswith((_TEMPORARY, _DELETED)):
            shutil.rmtree(entry, ignore_errors=True)


def verified(path: Path) -> Manifest:
    """The manifest of an artifact each of whose files is the one that was written.

    Raises:
      CorruptFile: a file is missing, altered, or not in the manifest, or the artifact is another
        one under this name; names the file.
    """
    place = path / _MANIFEST
    content = files.read_json(place)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise CorruptFile(f"{place}: is not the manifest of an artifact")
    content.pop("sha256", None)
    if place.read_text(encoding="utf-8", errors="replace") != _rendered(content):
        raise CorruptFile(f"{place}: was altered: it does not match its own SHA-256")
    expected, found = content.pop("files"), _listing(path)
    for name in expected:
        if name not in found:
            raise CorruptFile(f"{path / name}: is missing, but the manifest lists it")
        if found[name]["bytes"] != expected[name]["bytes"]:
            raise CorruptFile(
                f"{path / name}: has {found[name]['bytes']} bytes, expected "
                f"{expected[name]['bytes']}"
            )
        if found[name] != expected[name]:
            raise CorruptFile(f"{path / name}: was altered: it does not match its SHA-256")
    extra = found.keys() - expected.keys()
    if extra:
        raise CorruptFile(f"{path / min(extra)}: is not in the manifest {place}")
    try:
        manifest = Manifest(**content)
    except TypeError as error:
        raise CorruptFile(f"{place}: has other fields than a manifest of this version") from error
    if manifest.what != path.name:
        raise CorruptFile(f"{path}: is the artifact {manifest.what!r} under another name")
    return manifest


def check_manifest(
    path: Path, manifest: Manifest, *, run: str, made_from: Any = None, ledger: Ledger | None = None
) -> None:
    """Refuses an artifact that is not this run's, or whose charges its ledger has lost.

    Raises:
      InputError: it is of another run, or was made from something else.
      CorruptFile: the ledger does not contain the head that it had after the artifact was made.
    """
    if manifest.run != run:
        raise InputError(
            f"{path}: belongs to run {manifest.run}, expected run {run}: the config, the data or "
            "the secret is not the one that this run began with"
        )
    expected = files.jsonable(made_from)
    if manifest.made_from != expected:
        raise InputError(
            f"{path}: was made from {manifest.made_from!r}, expected {expected!r}; delete the "
            "folder, or choose another --out, to make it anew"
        )
    if ledger is not None and not ledger.contains(str(manifest.ledger_head)):
        raise CorruptFile(
            f"{ledger.path}: does not contain the line that it ended with when {path} was stored: "
            "the ledger was cut off or replaced"
        )


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below `folder` but the manifest."""
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": files.sha256_file(path),
        }
        for path in sorted(folder.rglob("*"))
        if path != folder / _MANIFEST and not path.is_dir()
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _rendered(content: Mapping[str, Any]) -> str:
    """The manifest's text: every byte of it follows from its content."""
    return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"
