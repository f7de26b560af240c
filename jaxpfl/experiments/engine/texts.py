"""Sentences that a model of tokens generates during its rounds."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpfl.privacy.keys import SAMPLE_SENTENCES, training_root
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.sentences import generate_sentences
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def sentences_of(
    model: Any,
    words: Vocabulary | LanguageModel,
    *,
    seed: int,
    number: int = 5,
    max_tokens: int = 20,
) -> Callable[[Any, int], list[str]]:
    """Returns `(params, round) -> sentences`, which generates from the model and reads no data.

    A decoder has the tokeniser of the published model.
    """

    def sentences(params: Any, round: int) -> list[str]:
        key = jax.random.fold_in(jax.random.fold_in(training_root(seed), SAMPLE_SENTENCES), round)
        if isinstance(words, Vocabulary):
            return generate_sentences(model, params, words, key, number, max_tokens=max_tokens)
        decoding = Decoding(max_new_tokens=max_tokens)
        writer = words.replaced(model, params)
        return writer.write([""], key, decoding=decoding, responses=number).texts[0]

    return sentences
