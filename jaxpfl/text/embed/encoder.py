"""Embedders of texts by networks: sentence encoders, and what a decoder's layers hold.

SENTENCE ENCODERS are BERT and its kin (`models.encoder`), pooled over the tokens of a text.

A folder in the format of sentence-transformers (Reimers and Gurevych 2019) has the tokenizer, the
encoder, the pooling (the mean over a text's tokens, or its first token) and optionally the scaling
to unit length. Without modules.json the vector is the unscaled mean, as in that library.

Texts are sorted by length and padded to one of a few lengths; all batches of one padded length have
one shape. The vector of a text therefore does not depend on the other texts of its batch, and few
programs are compiled.

HIDDEN STATES are the output of some of a decoder's layers, each averaged over the text's tokens.
Before its first token the text has the start token or, if the tokeniser has none, the end of the
text before; that token is not averaged. A chat template is not used.
"""

import hashlib
import json
import math
from collections.abc import Sequence
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
from jaxpfl.models.base import PAD, Params
from jaxpfl.models.checkpoints import pretrained, tokenizer_files
from jaxpfl.models.checkpoints.model_files import read_object, require
from jaxpfl.models.checkpoints.tokenizer_files import TOKENIZER, faults
from jaxpfl.models.decoder.layers import packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.network import Encoder
from jaxpfl.text.embed.base import as_texts
from jaxpfl.text.generation.language_model import LanguageModel, prompt_ids
from jaxpfl.text.microbatches import placed
from jaxpfl.text.tokenisers.base import clean, padded_batches

POOLINGS = ("mean", "cls")

# Dense where most sentences are, so that little is padding; sparse elsewhere, because each length
# that occurs is compiled.
_PADDED_LENGTHS = np.array(
    [*range(6, 16, 2), *range(16, 32, 4), 32, 40, 48, 64, 80, 96]
    + [*range(128, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]
)
# On a CPU a batch stays in a core's cache; an accelerator needs more work at a time.
_TOKENS_ON_CPU, _TOKENS_ELSEWHERE = 512, 16_384
_STATES_ON_CPU, _STATES_ELSEWHERE = 1_024, 32_768
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
        config, path = model.config, tokenizer_files.with_tokenizer(base) / TOKENIZER
        tokenizer = tokenizer_files.read_tokenizer(path)
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
        most = _TOKENS_ON_CPU if jax.default_backend() == "cpu" else _TOKENS_ELSEWHERE
        pending = []
        for here, tokens_BxL in padded_batches(ids, _PADDED_LENGTHS, self.max_length, most):
            lengths_B = np.sum(tokens_BxL != PAD, axis=1, dtype=np.int32)
            vectors_BxD = self._run(self._params, np.maximum(tokens_BxL, 0), lengths_B)
            pending.append((here, vectors_BxD))
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


_layer_means = jax.jit(Decoder.layer_means, static_argnums=0)


class HiddenStates:
    """An embedder of texts by the layers of a language model.

    Attributes:
      name: a digest of the parameters, the layers and the number of tokens.
      layers: their numbers, from 0.
      dimension: of the layers' outputs, one after the other.
    """

    column = "text"

    def __init__(self, writer: LanguageModel, layers: Sequence[int], tokens: int):
        """Reads at most `tokens` tokens of a text."""
        params = placed(writer.params, writer.mesh)
        digest = writer.replaced(writer.model, params).digest()
        self.name = f"hidden states of {digest[:12]} {[*layers]} {tokens}"
        self.dimension = len(layers) * writer.model.config.hidden_size
        self.layers, self._tokens, self._tokeniser = [*layers], tokens, writer.tokeniser
        (self._first,) = prompt_ids(writer.tokeniser.without_chat(), [""])
        self._means = partial(_layer_means, writer.model, packed_on_cpu(params))

    def __call__(self, examples: Any) -> np.ndarray:
        texts = clean(as_texts(examples))
        # An empty text is read as one of the first token.
        heads = (row[: self._tokens] for row in self._tokeniser.encode(texts))
        rows = [np.concatenate([self._first, head if len(head) else self._first]) for head in heads]
        vectors_NxD = np.empty((len(rows), self.dimension), np.float32)
        # Powers of two, so that few programs are compiled.
        powers, longest = 1 << np.arange(31), len(self._first) + self._tokens
        most = _STATES_ON_CPU if jax.default_backend() == "cpu" else _STATES_ELSEWHERE
        for batch, tokens_BxL in padded_batches(rows, powers, longest, most):
            means_LxBxH = np.asarray(self._means(tokens_BxL))[self.layers, : len(batch)]
            means_BxLxH = np.moveaxis(means_LxBxH, 0, 1)
            vectors_NxD[batch] = means_BxLxH.reshape(len(batch), self.dimension)
        return vectors_NxD
