"""Public words for a character model to start from: rare ones, and what a broken tokenizer makes.

A character model of a population's out-of-vocabulary words is trained on few clients where the
population is small, and differential privacy hides from it what a start on public text can teach
for free: spelling. What such words look like when a tokenizer is broken nobody knows before; so
the start is shown several faults alike,

    two words joined by a space     "i have"
    two words joined by nothing     "ihave"
    two words in the wrong order    "havei"
    two words joined by "_"         "i_have"

and the private data decide which of them stay probable. A start that has seen a fault makes it
easier to find: whoever reports what was found should report what the start itself finds, too.
"""

from typing import TYPE_CHECKING

import numpy as np

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.text.characters import MAX_BYTES, encode_words, oov_words
from jaxpfl.text.vocabulary import Vocabulary, word_lists

if TYPE_CHECKING:
    from jaxpfl.data.population import Population

FAULTS = ("space", "nothing", "order", "underscore")


def public_words(
    population: "Population",
    vocabulary: Vocabulary,
    *,
    seed: int,
    faulty: float = 0.4,
    max_bytes: int = MAX_BYTES,
) -> np.ndarray:
    """Words of PUBLIC text for a character model to start from: int32 [words, max_bytes + 2].

    All the text's words out of the vocabulary, as often as they occur, and after them so many
    faulty ones that they are a share `faulty` of all. A faulty word is made of two neighbours in a
    sentence, in half of the cases its first two, by one of `FAULTS`, all as probable.

    Args:
      population: public, with a column "words" or "text".
      faulty: in [0, 1).

    Raises:
      InputError: a setting is out of range, no word is out of the vocabulary, or no sentence has
        two words while faulty ones are asked for.
    """
    faulty = checks.fraction("faulty", faulty)
    if faulty >= 1:
        raise InputError(f"faulty must be less than 1, found {faulty}")
    rng = np.random.default_rng(checks.non_negative_int("seed", seed))
    rare_NxL = np.asarray(oov_words(population, vocabulary, max_bytes).columns["tokens"])
    if not len(rare_NxL):
        raise InputError(f"{population.name}: no word is out of the vocabulary, expected some")
    number = round(len(rare_NxL) * faulty / (1 - faulty))
    if not number:
        return rare_NxL
    sentences = [tuple(sentence) for sentence in word_lists(population)]
    sentences = [sentence for sentence in sentences if len(sentence) > 1]
    if not sentences:
        raise InputError(f"{population.name}: no sentence has two words, expected some")
    made = []
    for _ in range(number):
        sentence = sentences[int(rng.integers(len(sentences)))]
        place = 0 if rng.random() < 0.5 else int(rng.integers(len(sentence) - 1))
        fault = FAULTS[int(rng.integers(len(FAULTS)))]
        made.append(_faulty(sentence[place], sentence[place + 1], fault))
    return np.concatenate([rare_NxL, encode_words(made, max_bytes)])


def _faulty(first: str, second: str, fault: str) -> str:
    """The word that a tokenizer with this fault makes of two."""
    if fault == "order":
        return second + first
    return first + {"space": " ", "nothing": "", "underscore": "_"}[fault] + second
