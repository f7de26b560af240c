"""For models that read tokens: a public vocabulary, encoded clients, and generated sentences."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.privacy.keys import SAMPLE_SENTENCES, training_root
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.sentences import generate_sentences
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def exactly(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Returns the vocabulary, or raises `InputError` if it has fewer than `size` ids.

    A model of that vocabulary size would have ids without a word.
    """
    if len(vocabulary) != size:
        raise InputError(
            f"the public corpus has a vocabulary of {len(vocabulary)} words, the model expects "
            f"vocab_size = {size}: give more public text or a smaller vocab_size"
        )
    return vocabulary


def encoded(clients: Population, vocabulary: Vocabulary) -> Population:
    """Returns the clients with a column "tokens", or unchanged if they have it or no text."""
    if "tokens" in clients.columns or "text" not in clients.columns:
        return clients
    return vocabulary.encode(clients)


def sentences_of(
    model: Any, vocabulary: Vocabulary, *, seed: int, number: int = 5, max_tokens: int = 20
) -> Callable[[Any, int], list[str]]:
    """Returns `(params, round) -> sentences`, which generates from the model and reads no data."""

    def sentences(params: Any, round: int) -> list[str]:
        key = jax.random.fold_in(jax.random.fold_in(training_root(seed), SAMPLE_SENTENCES), round)
        return generate_sentences(model, params, vocabulary, key, number, max_tokens=max_tokens)

    return sentences


def written_by(
    published: LanguageModel, model: Any, *, seed: int, number: int, max_tokens: int
) -> Callable[[Any, int], list[str]]:
    """As `sentences_of`, for a decoder `model` with the tokeniser of `published`."""

    def sentences(params: Any, round: int) -> list[str]:
        key = jax.random.fold_in(jax.random.fold_in(training_root(seed), SAMPLE_SENTENCES), round)
        writer = published.replaced(model, params)
        (texts,) = writer.write(
            [""], key, decoding=Decoding(max_new_tokens=max_tokens), responses=number
        )
        return texts

    return sentences
