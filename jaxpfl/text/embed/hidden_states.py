"""What a decoder's layers hold of a text, as an embedding.

The vector of a text is the output of some layers, each averaged over the text's tokens. Before its
first token the text has the start token or, if the tokeniser has none, the end of the text before;
that token is not averaged. A chat template is not used.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl.models.decoder.layers import packed_on_cpu
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.embed.base import as_texts
from jaxpfl.text.generation.language_model import LanguageModel, prompt_ids
from jaxpfl.text.microbatches import placed
from jaxpfl.text.tokenisers.base import clean, pad

# A batch has so many tokens, padding among them.
_TOKENS_ON_CPU, _TOKENS_ELSEWHERE = 1_024, 32_768

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
        # Padded to a power of two, in batches of one shape, so that few programs are compiled.
        longest = len(self._first) + self._tokens
        padded_N = np.array([min(1 << (len(row) - 1).bit_length(), longest) for row in rows])
        most = _TOKENS_ON_CPU if jax.default_backend() == "cpu" else _TOKENS_ELSEWHERE
        for padded in np.unique(padded_N).tolist():
            here, size = np.flatnonzero(padded_N == padded), max(1, most // padded)
            for batch in np.split(here, range(size, len(here), size)):
                filled = [rows[i] for i in batch] + [self._first] * (size - len(batch))
                means_LxBxH = np.asarray(self._means(pad(filled, padded)))[self.layers]
                means_BxLxH = np.moveaxis(means_LxBxH, 0, 1)[: len(batch)]
                vectors_NxD[batch] = means_BxLxH.reshape(len(batch), self.dimension)
        return vectors_NxD
