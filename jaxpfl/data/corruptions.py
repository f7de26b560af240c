"""Simulated bugs in the clients' data, which a private method is then expected to reveal.

They are those of Augenstein et al. (2020): an app that inverts the pixels of whole devices (section
6), and a tokeniser that joins the first two words of a sentence (section 5); and clients who write
other texts than the public training data holds (task T6). The clients and their fingerprint do not
change, so that the corrupted population is charged to the same ledger.

For SIMULATION only. The experiment knows which clients or sentences are corrupted, but this must
not influence training or releases, because a modeller would not know it.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxpfl import checks
from jaxpfl.data.columns import WORD_SEPARATOR, text_array
from jaxpfl.data.draws import client_uniforms, example_uniforms
from jaxpfl.data.population import Population, one_per_example
from jaxpfl.errors import InputError


def invert_pixels(
    population: Population, probability: float, seed: int, among: np.ndarray | None = None
) -> Population:
    """Inverts ALL images of randomly chosen clients: 255 - x for uint8, 1 - x for floats.

    The choice follows from the seed and the client's id, and includes that of a lower probability.
    The column "image" holds [H, W, C], uint8 or floats in 0 .. 1. With `among`, bool [examples], of
    their images only those are inverted.
    """
    probability = checks.fraction("probability", probability)
    struck = client_uniforms("inverted pixels", seed, population.client_ids) < probability
    chosen = np.repeat(struck, population.sizes())
    chosen = chosen if among is None else chosen & one_per_example(population, "among", among)
    images = np.asarray(population.columns.get("image", ()))
    kind = images.dtype.kind
    if images.ndim != 4 or (kind != "f" and images.dtype != np.uint8):
        expected = "invert_pixels needs a column 'image' of uint8 or float images [H, W, C]"
        raise InputError(f"{expected}, found {population.column_types()}")
    # NaN passes: the contribution of a client with NaN is later set to zero.
    if kind == "f" and (np.any(images < 0) or np.any(images > 1)):
        raise InputError("column 'image' must hold float images in 0 .. 1, found other values")
    mixed = np.where(chosen[:, None, None, None], inverted(images), images)
    return population.with_columns({**population.columns, "image": mixed})


def inverted(images: np.ndarray) -> np.ndarray:
    """Returns the images with inverted pixels: 255 - x for uint8, 1 - x for floats in 0 .. 1."""
    return images.dtype.type(255 if images.dtype == np.uint8 else 1) - images


def concatenate_first_words(population: Population, probability: float, seed: int) -> Population:
    """Joins the first two words of randomly chosen sentences: ["i", "have"] becomes ["i have"].

    The choice follows from the seed, the client's id and the sentence's position among that
    client's examples. The column "words" holds sentences, the words of which are separated by
    `columns.WORD_SEPARATOR`; those of fewer than two words do not change.
    """
    probability = checks.fraction("probability", probability)
    ids, offsets = population.client_ids, population.offsets
    chosen = example_uniforms("concatenated words", seed, ids, offsets) < probability
    words = population.columns.get("words")
    if words is None or isinstance(words, np.ndarray):
        expected = "concatenate_first_words needs a text column 'words' of separated words"
        raise InputError(f"{expected}, found {population.column_types()}")
    # Called by name: Arrow creates these functions at import, so that type checkers miss them.
    once = pc.ReplaceSubstringOptions(WORD_SEPARATOR, " ", max_replacements=1)
    joined = pc.call_function("replace_substring", [words], once)
    mixed = pc.call_function("if_else", [pa.array(chosen), joined, words])
    return population.with_columns({**population.columns, "words": mixed})


def replace_texts(
    population: Population, texts: Sequence[str], probability: float, seed: int
) -> Population:
    """Replaces ALL texts of randomly chosen clients by texts drawn from `texts`, with repetition.

    The choice follows from the seed and the client's id, and includes that of a lower probability;
    the draws from these and the place of the text among the client's. A client keeps its number of
    texts. The column "text" is the only one of the result.
    """
    probability = checks.fraction("probability", probability)
    ids, offsets = population.client_ids, population.offsets
    struck = client_uniforms("replaced texts", seed, ids) < probability
    chosen = np.repeat(struck, population.sizes())
    draws = (example_uniforms("replaced texts", seed, ids, offsets) * len(texts)).astype(np.int64)
    planted = text_array(texts).take(pa.array(draws))
    mixed = pc.call_function("if_else", [pa.array(chosen), planted, population.column("text")])
    return population.with_columns({"text": mixed})
