"""Sentence encoders: BERT and its kin (`models.encoder`), pooled over the tokens of a text.

A folder in the format of sentence-transformers (Reimers and Gurevych 2019) has the tokenizer, the
encoder, the pooling (the mean over a text's tokens, or its first token) and optionally the scaling
to unit length. Without modules.json the vector is the unscaled mean, as in that library.

Texts are sorted by length and padded to one of a few lengths; all batches of one padded length have
one shape. The vector of a text therefore does not depend on the other texts of its batch, and few
programs are compiled.
"""

import hashlib
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpfl import files
from jaxpfl.checks import one_of, positive_int
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.base import Params
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.checkpoints.model_files import read_object, require
from jaxpfl.models.checkpoints.tokenizer_files import (
    TOKENIZER,
    faults,
    read_tokenizer,
    with_tokenizer,
)
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.text.embed.base import as_texts
from jaxpfl.text.tokenisers.base import clean, pad

POOLINGS = ("mean", "cls")

# Dense where most sentences are, so that little is padding; sparse elsewhere, because each length
# that occurs is compiled.
_PADDED_LENGTHS = np.array(
    [*range(6, 16, 2), *range(16, 32, 4), 32, 40, 48, 64, 80, 96]
    + [*range(128, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]
)
# On a CPU a batch stays in a core's cache; an accelerator needs more work at a time.
_TOKENS_ON_CPU, _TOKENS_ELSEWHERE = 512, 16_384
_CHARACTERS = 65_536


class SentenceEncoder:
    """An embedder of texts by a published encoder.

    The vectors are those of sentence-transformers with the same folder, up to float32 rounding. A
    text is cut after 65,536 code points and then after `max_length` tokens; a lone surrogate
    becomes U+FFFD. The empty text has a vector like any other.

    Attributes:
      name: the model's name and a digest of its weights, tokenizer and settings.
      max_length: the number of tokens, including special ones, after which a text is cut.
      pooling: "mean" of a text's tokens, or "cls", its first one.
    """

    column = "text"

    def __init__(self, name: str | Path):
        """Reads the encoder of a local folder, "minilm", or a hub NAME or NAME@REVISION.

        Raises:
          InputError: the model is not found, a library is missing, or the folder asks for a variant
            that is not supported, or for more tokens than the model has.
          CorruptFile: a file is broken.
        """
        tokenizers = require("tokenizers", "text")
        folder = pretrained.resolve(name)
        base, self.pooling, self.normalise = _stages(folder)
        settings = read_object(base / "sentence_bert_config.json", optional=True)
        model, params = pretrained.load(base)
        if not isinstance(model, Encoder) or model.causal:
            raise InputError(f"{base / 'config.json'}: an encoder is needed, found a decoder")
        config, path = model.config, with_tokenizer(base) / TOKENIZER
        tokenizer = read_tokenizer(path)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if largest >= config.vocab_size:
            last = f"{largest}, but the model's vocab_size is {config.vocab_size}"
            raise InputError(f"{path} has token ids up to {last}")
        lower_case = bool(settings.get("do_lower_case"))
        if lower_case:
            lower = [tokenizers.normalizers.Lowercase()]
            before = [tokenizer.normalizer] if tokenizer.normalizer else []
            tokenizer.normalizer = tokenizers.normalizers.Sequence(lower + before)
        length: Any = settings.get("max_seq_length")
        if length is None:
            others = read_object(base / "tokenizer_config.json", optional=True)
            length = others.get("model_max_length")
        length = config.positions if length is None else length
        if type(length) in (int, float) and 0 < length < math.inf:
            # A number such as 1e30 stands for "no limit".
            length = min(int(length), config.positions)
        self.max_length = positive_int(f"{base}: max_length", length)
        with faults(f"{path} cannot cut texts to {self.max_length} tokens"):
            tokenizer.enable_truncation(self.max_length)
        identity = [
            *(files.sha256_file(file) for file in pretrained.weight_files(base)),
            files.sha256_file(path),
            *(asdict(config), self.max_length, self.pooling, self.normalise),
            lower_case,
        ]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        # The name is public, and the path of a folder may be private.
        self.name = f"{PurePosixPath(str(name)).name or folder.name} {digest[:12]}"
        self.dimension = config.hidden_size
        self._tokenizer, self._params = tokenizer, jax.device_put(params)
        vectors = partial(_vectors, model, pooling=self.pooling, normalise=self.normalise)
        self._run = jax.jit(vectors)

    def __deepcopy__(self, memo: Any) -> "SentenceEncoder":
        return self  # which no text changes, and which is compiled once

    def __call__(self, examples: Any) -> np.ndarray:
        texts = clean([text[:_CHARACTERS] for text in as_texts(examples)])
        vectors_NxD = np.empty((len(texts), self.dimension), np.float32)
        with faults(f"the tokenizer of {self.name} cannot encode a text", private=True):
            encodings = self._tokenizer.encode_batch_fast(texts)
        ids: list[Any] = [encoding.ids for encoding in encodings]
        lengths_N = np.fromiter(map(len, ids), np.int32, len(ids))
        possible = _padded_lengths(self.max_length)
        padded_length_N = possible[np.searchsorted(possible, lengths_N)]
        tokens = _TOKENS_ON_CPU if jax.default_backend() == "cpu" else _TOKENS_ELSEWHERE
        pending = []
        for padded_length in np.unique(padded_length_N)[::-1].tolist():
            rows = np.flatnonzero(padded_length_N == padded_length)
            batch = max(1, tokens // padded_length)
            for start in range(0, len(rows), batch):
                here = rows[start : start + batch]
                filled = [ids[row] for row in here] + [[]] * (batch - len(here))
                tokens_BxL = np.maximum(pad(filled, padded_length), 0)
                lengths_B = np.array(list(map(len, filled)), np.int32)
                pending.append((here, self._run(self._params, tokens_BxL, lengths_B)))
        for here, vectors_BxD in pending:
            vectors_NxD[here] = np.asarray(vectors_BxD)[: len(here)]
        return vectors_NxD


def _vectors(
    model: Encoder,
    params: Params,
    tokens_BxL: Array,
    lengths_B: Array,
    *,
    pooling: str,
    normalise: bool,
) -> Array:
    """Vectors float32 [B, d]; that of a row of length 0 is finite and arbitrary."""
    mask_BxL = jnp.arange(tokens_BxL.shape[1], dtype=jnp.int32)[None, :] < lengths_B[:, None]
    # By default an accelerator rounds products to fewer bits.
    with jax.default_matmul_precision("float32"):
        hidden_BxLxD = model.hidden(params, tokens_BxL, mask_BxL)
    if pooling == "cls":
        vectors_BxD = hidden_BxLxD[:, 0]
    else:
        total_BxD = jnp.sum(jnp.where(mask_BxL[:, :, None], hidden_BxLxD, 0.0), axis=1)
        vectors_BxD = total_BxD / jnp.maximum(lengths_B, 1).astype(jnp.float32)[:, None]
    if normalise:
        norm_Bx1 = jnp.linalg.norm(vectors_BxD, axis=1, keepdims=True)
        vectors_BxD = vectors_BxD / jnp.maximum(norm_Bx1, 1e-12)
    return vectors_BxD


def _padded_lengths(limit: int) -> np.ndarray:
    """The lengths that texts are padded to, in increasing order; the last is `limit`."""
    return np.append(_PADDED_LENGTHS[_PADDED_LENGTHS < limit], limit)


def _stages(folder: Path) -> tuple[Path, str, bool]:
    """The folder of the encoder, the pooling, and whether vectors are normalised."""
    path = folder / "modules.json"
    if not path.is_file():
        return folder, "mean", False
    modules = files.read_json(path)
    try:
        kinds = [str(module["type"]).split(".")[-1] for module in modules]
        places = [str(module["path"]) for module in modules]
    except (TypeError, KeyError) as error:
        raise CorruptFile(f"{path} is not a list of modules with type and path") from error
    for place in places:
        parts = PurePosixPath(place)
        if parts.is_absolute() or ".." in parts.parts or "\0" in place or len(place) > 255:
            raise InputError(f"{path}: path {place!r} leaves the folder, or is none")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        expected = "Transformer, Pooling and perhaps Normalize"
        raise InputError(f"{path}: the stages must be {expected}, found {', '.join(kinds)}")
    encoder, pooling = folder / places[0], folder / places[1] / "config.json"
    config = read_object(pooling, optional=True)
    mode = config.get("pooling_mode")
    if mode is None:
        names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        modes = [
            names.get(key, key)
            for key, value in config.items()
            if key.startswith("pooling_mode_") and value
        ]
        mode = "+".join(modes) or "mean"
    one_of(f"{pooling}: the pooling", mode, POOLINGS)
    return encoder, mode, len(kinds) == 3
