"""The library sentence-transformers as an embedder, for models that are not implemented here."""

from typing import Any

import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.text.embed.base import as_texts


class SentenceTransformersEmbedder:
    """An embedder of texts that runs on PyTorch; the library must be installed.

    Code that comes with a model is never run, and weights are read from safetensors only. Equal
    names mean equal vectors only if a hub name includes its revision, NAME@REVISION.
    """

    column = "text"

    def __init__(self, name: str):
        """Loads a folder, "minilm", or a model NAME or NAME@REVISION of the Hugging Face hub.

        Raises:
          InputError: the library is not installed, or cannot load the model.
        """
        library = pretrained.require("sentence_transformers", "sentence-transformers")
        place, at, revision = name.partition("@")
        if name in pretrained.MINILM_NAMES:
            place, at = str(pretrained.resolve(name)), ""
        try:
            self._model = library.SentenceTransformer(
                place,
                revision=revision if at else None,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            )
        # The library passes on whatever its dependencies raise.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise InputError(
                f"sentence-transformers cannot load {name!r}: {type(error).__name__}: {lines[0]}"
            ) from error
        self.name = f"sentence-transformers:{name}"
        # Found by an example, because the method for it has another name in every version.
        self.dimension = int(self._encode([""]).shape[1])

    def __call__(self, examples: Any) -> np.ndarray:
        texts = as_texts(examples)
        return self._encode(texts) if texts else np.empty((0, self.dimension), np.float32)

    def _encode(self, texts: list[str]) -> np.ndarray:
        found = self._model.encode(texts, convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(found, np.float32)
