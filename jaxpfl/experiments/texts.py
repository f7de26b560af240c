"""Text clients for a model that reads tokens: a public vocabulary, and sentences back."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.evaluate import DeclaredPublic
from jaxpfl.privacy.keys import training_root
from jaxpfl.text.sentences import generate_sentences
from jaxpfl.text.vocabulary import Vocabulary

PUBLIC_DOCSTRINGS = "docstrings:numpy,sklearn"
"""Public corpus of `jaxpfl.run` for text clients: installed wherever jaxpfl is."""

# Addresses the sentences among the training keys; rounds have the small numbers.
_SENTENCES = 2**32 - 2


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


def encode_with_public_vocabulary(
    clients: Population, evaluation: DeclaredPublic | None, size: int
) -> tuple[Population, DeclaredPublic, Vocabulary]:
    """Encodes text clients by `PUBLIC_DOCSTRINGS`; that corpus is the evaluation data by default.

    Returns:
      The clients and the evaluation data, both with "tokens", and the vocabulary.
    """
    public = open_population(PUBLIC_DOCSTRINGS)
    vocabulary = public_vocabulary(public, size)
    held_out = evaluation.population if evaluation is not None else public
    if "text" in held_out.columns:
        held_out = vocabulary.encode(held_out)
    return vocabulary.encode(clients), DeclaredPublic(held_out), vocabulary


def sentences_of(
    model: Any, vocabulary: Vocabulary, *, seed: int, number: int = 5, max_tokens: int = 20
) -> Callable[[Any, int], list[str]]:
    """Returns `(params, round) -> sentences` drawn from the model; no data but `params` enters."""

    def sentences(params: Any, round: int) -> list[str]:
        key = jax.random.fold_in(jax.random.fold_in(training_root(seed), _SENTENCES), round)
        return generate_sentences(model, params, vocabulary, key, number, max_tokens=max_tokens)

    return sentences
