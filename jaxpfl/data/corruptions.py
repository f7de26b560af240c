"""Simulated bugs in the clients' data, which a private method is then expected to reveal.

They are those of Augenstein et al. (2020): an app that inverts the pixels of whole devices (section
6), and a tokeniser that joins the first two words of a sentence (section 5). The clients and their
fingerprint do not change, so that the corrupted population is charged to the same ledger.

For SIMULATION only. The experiment knows which clients or sentences are corrupted, but this must
not influence training or releases, because a modeller would not know it.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl import checks
from jaxpfl.data.columns import WORD_SEPARATOR, describe
from jaxpfl.data.draws import client_uniforms, example_uniforms
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError


def inverted_clients(population: Population, probability: float, seed: int) -> np.ndarray:
    """Returns which clients' images `invert_pixels` inverts, bool [clients]; PRIVATE ground truth.

    It follows from the seed and the client's id. A client that is corrupted at one probability is
    corrupted at every higher one.

    Raises:
      InputError: the probability is not in 0 .. 1, or the seed is not a whole number.
    """
    probability = checks.fraction("probability", probability)
    return client_uniforms("inverted pixels", seed, population.client_ids) < probability


def invert_pixels(population: Population, probability: float, seed: int) -> Population:
    """Inverts ALL images of randomly chosen clients: 255 - x for uint8, 1 - x for floats.

    Args:
      population: clients whose column "image" holds images [H, W, C], uint8 or floats in 0 .. 1.
      probability, seed: of the choice; see `inverted_clients`.

    Raises:
      InputError: a parameter is out of range, the column is missing, or it holds no such images.
    """
    chosen = np.repeat(inverted_clients(population, probability, seed), population.sizes())
    images = population.columns.get("image")
    if images is None:
        raise InputError(
            "invert_pixels needs a column 'image' of images, found the columns "
            f"{', '.join(population.columns)}"
        )
    kind = images.dtype.kind if isinstance(images, np.ndarray) and images.ndim == 4 else None
    if kind != "f" and not (kind and images.dtype == np.uint8):
        raise InputError(
            f"column 'image' must hold uint8 or float images [H, W, C], found {describe(images)}"
        )
    # NaN passes: the contribution of a client with NaN is later set to zero.
    if kind == "f" and (np.any(images < 0) or np.any(images > 1)):
        raise InputError("column 'image' must hold float images in 0 .. 1, found other values")
    inverted = images.copy()
    white = images.dtype.type(1 if kind == "f" else 255)
    np.subtract(white, images, out=inverted, where=chosen[:, None, None, None])
    return population.with_columns({**population.columns, "image": inverted})


def concatenated_examples(population: Population, probability: float, seed: int) -> np.ndarray:
    """Returns which sentences `concatenate_first_words` chooses, bool [examples]; PRIVATE.

    It follows from the seed, the client's id and the sentence's position among that client's
    examples. Sentences of fewer than two words may be chosen, but do not change.
    """
    probability = checks.fraction("probability", probability)
    ids, offsets = population.client_ids, population.offsets
    return example_uniforms("concatenated words", seed, ids, offsets) < probability


def concatenate_first_words(population: Population, probability: float, seed: int) -> Population:
    """Joins the first two words of randomly chosen sentences: ["i", "have"] becomes ["i have"].

    Args:
      population: clients whose column "words" holds sentences, the words of which are separated by
        `columns.WORD_SEPARATOR`.
      probability, seed: of the choice; see `concatenated_examples`.

    Raises:
      InputError: a parameter is out of range, or there is no such column of text.
    """
    chosen = concatenated_examples(population, probability, seed)
    words = population.columns.get("words")
    if words is None or isinstance(words, np.ndarray):
        raise InputError(
            "concatenate_first_words needs a text column 'words' of separated words, found the "
            f"columns {', '.join(population.columns)}"
        )
    # Called by name: Arrow creates these functions at import, so that type checkers miss them.
    once = pc.ReplaceSubstringOptions(WORD_SEPARATOR, " ", max_replacements=1)
    joined = pc.call_function("replace_substring", [words], once)
    mixed = pc.call_function("if_else", [pa.array(chosen), joined, words])
    return population.with_columns({**population.columns, "words": mixed})
