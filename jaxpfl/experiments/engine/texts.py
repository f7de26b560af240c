"""For models that read tokens: a public vocabulary, encoded clients, and sentences drawn."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.privacy.keys import SAMPLE_SENTENCES, training_root
from jaxpfl.text.generation.sentences import generate_sentences
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def public_vocabulary(source: str | Population, size: int) -> Vocabulary:
    """The vocabulary of exactly `size` ids from a public corpus.

    Raises:
      InputError: the corpus has fewer different words: the model would have ids without a word.
    """
    return exactly(Vocabulary.from_public(source, size), size)


def exactly(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """The same vocabulary, if it has `size` ids; see `public_vocabulary`."""
    if len(vocabulary) != size:
        raise InputError(
            f"the public corpus gives a vocabulary of {len(vocabulary)}, the model expects "
            f"vocab_size = {size}: name more public text or a smaller vocab_size"
        )
    return vocabulary


def encoded(clients: Population, vocabulary: Vocabulary) -> Population:
    """The clients with "tokens"; as they are where they have these, or no text."""
    if "tokens" in clients.columns or "text" not in clients.columns:
        return clients
    return vocabulary.encode(clients)


def sentences_of(
    model: Any, vocabulary: Vocabulary, *, seed: int, number: int = 5, max_tokens: int = 20
) -> Callable[[Any, int], list[str]]:
    """Returns `(params, round) -> sentences` drawn from the model; no data but `params` enters."""

    def sentences(params: Any, round: int) -> list[str]:
        key = jax.random.fold_in(jax.random.fold_in(training_root(seed), SAMPLE_SENTENCES), round)
        return generate_sentences(model, params, vocabulary, key, number, max_tokens=max_tokens)

    return sentences
