"""The embedders by the names that they have in config files and commands."""

from typing import Any

import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError, named, summary
from jaxpfl.lazy import require
from jaxpfl.text.embed.base import Embedder, as_texts

_NAMES = ("hashed", "minilm", "encoder", "sentence-transformers")
_EXPECTED = (
    "hashed, hashed:DIMENSION, minilm, encoder:FOLDER-OR-HUB-NAME or sentence-transformers:NAME"
)


def embedder(name: str) -> Embedder:
    """The embedder of a name.

    hashed, hashed:DIMENSION       hashed n-grams; needs no weights (`embed.hashed`)
    minilm                         all-MiniLM-L6-v2 (`embed.encoder`)
    encoder:FOLDER-OR-HUB-NAME     an encoder of BERT's kind and tokenizer (`embed.encoder`)
    sentence-transformers:NAME     through that library, if installed
    """
    if not isinstance(name, str):
        raise InputError(f"an embedder's name must be a string, found {type(name).__name__}")
    kind, colon, rest = name.partition(":")
    # Imported late, because each kind needs other libraries.
    if kind == "hashed" and (not colon or rest):
        from jaxpfl.text.embed.hashed import HashedNgrams

        dimension: Any = int(rest) if rest.isdecimal() and len(rest) < 10 else rest
        with named(f"embedder {name!r}"):
            return HashedNgrams(dimension) if colon else HashedNgrams()
    if name == "minilm" or (kind == "encoder" and rest):
        from jaxpfl.text.embed.encoder import SentenceEncoder

        return SentenceEncoder(rest or name)
    if kind == "sentence-transformers" and rest:
        return SentenceTransformersEmbedder(rest)
    hint = checks.nearest(kind, _NAMES)
    raise InputError(f"unknown embedder {name!r}{hint}: expected {_EXPECTED}")


class SentenceTransformersEmbedder:
    """The library sentence-transformers, for models that are not implemented here.

    It runs on PyTorch and must be installed.
    Code that comes with a model is never run, and weights are read from safetensors only. Equal
    names mean equal vectors only if a hub name includes its revision, NAME@REVISION.
    """

    column = "text"

    def __init__(self, name: str):
        """Loads a folder, "minilm", or a model NAME or NAME@REVISION of the Hugging Face hub."""
        from jaxpfl.models.checkpoints import hub

        library = require("sentence_transformers", "sentence-transformers")
        place, at, revision = name.partition("@")
        if name in hub.MINILM_NAMES:
            place, at = str(hub.resolve(name)), ""
        try:
            self._model = library.SentenceTransformer(
                place,
                revision=revision if at else None,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
        # The library passes on whatever its dependencies raise.
        except Exception as error:
            problem = f"sentence-transformers cannot load {name!r}: {summary(error)}"
            raise InputError(problem) from error
        self.name = f"sentence-transformers:{name}"
        # Measured with an example: the library's method for it was renamed several times.
        self.dimension = int(self._encode([""]).shape[1])

    def __call__(self, examples: Any) -> np.ndarray:
        texts = as_texts(examples)
        return self._encode(texts) if texts else np.empty((0, self.dimension), np.float32)

    def _encode(self, texts: list[str]) -> np.ndarray:
        vectors = self._model.encode(texts, convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)
