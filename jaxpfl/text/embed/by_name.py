"""The embedders by the names that they have in config files and commands."""

import difflib

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.text.embed.base import Embedder

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

    Raises:
      InputError: there is no such embedder, or a file or library that it needs is missing.
    """
    if not isinstance(name, str):
        raise InputError(f"an embedder's name must be a string, found {type(name).__name__}")
    kind, colon, rest = name.partition(":")
    # Imported late, because each kind needs other libraries.
    if kind == "hashed" and (not colon or rest):
        from jaxpfl.text.embed.hashed import HashedNgrams

        if not colon:
            return HashedNgrams()
        try:
            dimension = int(rest)
        except ValueError:
            raise InputError(f"embedder {name!r}: the dimension must be a whole number") from None
        return HashedNgrams(checks.positive_int(f"embedder {name!r}: dimension", dimension))
    if name == "minilm" or (kind == "encoder" and rest):
        from jaxpfl.text.embed.encoder import SentenceEncoder

        return SentenceEncoder(rest or name)
    if kind == "sentence-transformers" and rest:
        from jaxpfl.text.embed.sentence_transformers import SentenceTransformersEmbedder

        return SentenceTransformersEmbedder(rest)
    near = difflib.get_close_matches(kind, _NAMES, 1, 0.5)
    hint = f" (did you mean {near[0]!r}?)" if near and near[0] != kind else ""
    raise InputError(f"unknown embedder {name!r}{hint}: expected {_EXPECTED}")
