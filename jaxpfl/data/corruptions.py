"""The bugs that the papers plant in clients' data, to see whether a private method shows them.

Augenstein et al. (2020): section 6, an app that inverts the pixels of whole devices; section 5, a
tokenizer that concatenates the first two words of a sentence. Both leave clients and fingerprint
as they were: a corrupted population is charged to the same ledger.

For SIMULATION only. Which client or sentence is struck is a function of seed and client id, known
to the experiment and not to the modeller: nothing of it may reach what is trained or released.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl import checks
from jaxpfl.data.coins import client_uniforms, example_uniforms
from jaxpfl.data.columns import WORD_SEPARATOR, describe
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError


def inverted_clients(population: Population, probability: float, seed: int) -> np.ndarray:
    """Whose images `invert_pixels` inverts: bool [clients]. PRIVATE: the ground truth.

    A client's coin depends on the seed and its id alone, and whoever is struck at one probability
    is struck at every higher one.

    Raises:
      InputError: the probability is not in 0 .. 1, or the seed no whole number.
    """
    probability = checks.fraction("probability", probability)
    return client_uniforms("inverted pixels", seed, population) < probability


def invert_pixels(
    population: Population, probability: float, seed: int, column: str = "image"
) -> Population:
    """Inverts ALL images of each client whose coin falls: 255 - x for uint8, 1 - x for floats.

    Args:
      population: with images [H, W, C] in `column`, uint8 in 0 .. 255 or a float in 0 .. 1.
      probability: of a client being struck, 0 .. 1.
      seed: of the coins; see `inverted_clients`.

    Raises:
      InputError: a parameter is out of range, or the column is missing or holds no such images.
    """
    struck = np.repeat(inverted_clients(population, probability, seed), population.sizes())
    if column not in population.columns:
        raise InputError(
            f"invert_pixels needs a column {column!r}, found {', '.join(population.columns)}"
        )
    images = population.columns[column]
    is_array = isinstance(images, np.ndarray)
    if (
        not is_array
        or images.ndim != 4
        or not (images.dtype == np.uint8 or images.dtype.kind == "f")
    ):
        raise InputError(
            f"column {column!r} must hold uint8 or float images [H, W, C], found {describe(images)}"
        )
    # NaN passes: the engine zeroes the client that sends it.
    if images.dtype != np.uint8 and (np.any(images < 0) or np.any(images > 1)):
        raise InputError(f"column {column!r} must hold float images in 0 .. 1, found others")
    inverted = images.copy()
    white = images.dtype.type(255 if images.dtype == np.uint8 else 1)
    np.subtract(white, images, out=inverted, where=struck[:, None, None, None])
    return population.with_columns({**population.columns, column: inverted})


def concatenated_examples(population: Population, probability: float, seed: int) -> np.ndarray:
    """Which sentences `concatenate_first_words` strikes: bool [examples]. PRIVATE: the truth.

    An example's coin depends on the seed, its client's id and its place among that client's.
    Examples of fewer than two words are among those struck, and stay as they are.
    """
    probability = checks.fraction("probability", probability)
    return example_uniforms("concatenated words", seed, population) < probability


def concatenate_first_words(
    population: Population, probability: float, seed: int, column: str = "words"
) -> Population:
    """Makes one word, with a space in it, of the first two words of a share of the sentences.

    Args:
      population: `column` holds each sentence's words joined by `columns.WORD_SEPARATOR`.
      probability: of a sentence being struck, 0 .. 1.
      seed: of the coins; see `concatenated_examples`.

    Returns:
      The population with ["i", "have", "a"] turned into ["i have", "a"] where struck. A sentence
      of fewer than two words stays.

    Raises:
      InputError: a parameter is out of range, or there is no such column of text.
    """
    struck = concatenated_examples(population, probability, seed)
    words = population.columns.get(column)
    if words is None or isinstance(words, np.ndarray):
        raise InputError(
            f"concatenate_first_words needs a text column {column!r} of separated words, found "
            f"{', '.join(population.columns)}"
        )
    # Called by name: Arrow makes these functions at import, so a type checker knows none of them.
    once = pc.ReplaceSubstringOptions(WORD_SEPARATOR, " ", max_replacements=1)
    joined = pc.call_function("replace_substring", [words], once)
    mixed = pc.call_function("if_else", [pa.array(struck), joined, words])
    return population.with_columns({**population.columns, column: mixed})
