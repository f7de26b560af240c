"""Embeddings: vectors of examples, from which Frechet distances between corpora are computed."""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.text.embed.base import Embedder as Embedder
    from jaxpfl.text.embed.base import as_texts as as_texts
    from jaxpfl.text.embed.base import embed as embed
    from jaxpfl.text.embed.base import embedded as embedded
    from jaxpfl.text.embed.base import embeddings_of as embeddings_of
    from jaxpfl.text.embed.by_name import embedder as embedder

__getattr__, __dir__, __all__ = lazy.face(__name__)
