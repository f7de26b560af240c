"""Words as sequences of bytes: what a character language model reads and draws.

Symbols: the 256 bytes of UTF-8, start of word (256) and end of word (257). The byte NUL is in no
word, since control characters separate words (`jaxpfl.text.tokenisers.vocabulary`): models never
draw it. Rows are padded with `jaxpfl.models.PAD`.

A word of more than `max_bytes` bytes, a public cap, is cut after as many bytes, be it inside a
character, and has no end of word: a model learns that such a word goes on, and a cut word counts as
complete nowhere. The rule is about bytes alone, so it gives the same on every platform.

A model may draw bytes that are no UTF-8. `show` writes every sequence of bytes as text, and no two
alike: a valid character stands for itself, except that a byte that is no UTF-8, and each byte of a
control, format or line-separating character or of a space other than the plain one, becomes \\xNN,
and a backslash becomes two. So a space in a word is a plain space, and no word can steer the
terminal that it is shown on.

Source: Chen et al. 2019, "Federated Learning of Out-of-Vocabulary Words", and Augenstein et al.
2020, Section 5 and Appendix B.2.
"""

import math
import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.models.cifg_lstm import CIFGLanguageModel
from jaxpfl.text.generation.sentences import SpecialIds
from jaxpfl.text.tokenisers.vocabulary import Vocabulary, word_lists

if TYPE_CHECKING:
    from jaxpfl.data.population import Population

NUL, START, END = 0, 256, 257
SYMBOLS = 258
MAX_BYTES = 20

CHARACTER_IDS = SpecialIds(start=START, end=END, never=(NUL,))
"""For `jaxpfl.text.sample_tokens`."""

_SHOWN_AS_BYTES = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp", "Zs"))
_CONTROL = re.compile("[\0-\x1f\x7f]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def char_lm(
    *,
    embedding: int = 128,
    hidden: int = 256,
    projection: int = 128,
    layers: int = 3,
    peepholes: bool = False,
    output_bias_prior: tuple[float, ...] | None = None,
) -> CIFGLanguageModel:
    """The character model of Augenstein et al. 2020, Appendix B.2: 756,738 parameters.

    A CIFG-LSTM of three layers of 256 hidden and 128 projected units, embedding 128, with an output
    matrix of its own; 758,274 parameters with `peepholes`. Arguments as of `CIFGLanguageModel`.
    """
    return CIFGLanguageModel(
        vocab_size=SYMBOLS,
        embedding=embedding,
        hidden=hidden,
        projection=projection,
        layers=layers,
        tied=False,
        peepholes=peepholes,
        output_bias_prior=output_bias_prior,
        name="char_lm",
    )


def encode_words(words: Iterable[str], max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Ids int32 [words, max_bytes + 2]: start, the bytes, end if the word is not cut, padding.

    A lone surrogate, which UTF-8 cannot hold, becomes U+FFFD, as in `text.tokenisers.vocabulary`.

    Raises:
      InputError: a word is empty or holds a control character, so it is no word.
    """
    positive_int("max_bytes", max_bytes)
    rows = list(words)
    ids_NxL = np.full((len(rows), max_bytes + 2), PAD, np.int32)
    ids_NxL[:, 0] = START
    for row, word in enumerate(rows):
        if not word or _CONTROL.search(word):
            found = "holds a control character" if word else "is empty"
            raise InputError(
                f"a word {found}, expected what lies between white space and control characters"
            )
        encoded = _SURROGATES.sub("\ufffd", word).encode()
        kept = encoded[:max_bytes]
        ids_NxL[row, 1 : len(kept) + 1] = np.frombuffer(kept, np.uint8)
        if len(encoded) <= max_bytes:
            ids_NxL[row, len(kept) + 1] = END
    return ids_NxL


def complete_word(ids: np.ndarray) -> bytes | None:
    """The bytes of one sequence drawn, without start, up to the end; None where it has no end."""
    ended = np.flatnonzero(ids == END)
    if not ended.size:
        return None
    return ids[: ended[0]].astype(np.uint8).tobytes()


def show(word: bytes) -> str:
    """A word as text, by the rules at the head of this file: different bytes look different."""
    shown = []
    for character in word.decode("utf-8", "surrogateescape"):
        if character == "\\":
            shown.append("\\\\")
        elif character != " " and unicodedata.ucd_3_2_0.category(character) in _SHOWN_AS_BYTES:
            encoded = character.encode("utf-8", "surrogateescape")
            shown.append("".join(f"\\x{byte:02x}" for byte in encoded))
        else:
            shown.append(character)
    return "".join(shown)


def oov_words(
    population: "Population", vocabulary: Vocabulary, max_bytes: int = MAX_BYTES
) -> "Population":
    """The same clients whose examples are their words out of the vocabulary, in their order.

    Words are those of the column "words", else of "text"; one that occurs twice is two examples.
    Clients without such a word stay, without examples. The fingerprint, and so the ledger, is that
    of `population`.

    Returns:
      A population with the column "tokens", int32 [words, max_bytes + 2], see `encode_words`.

    Raises:
      InputError: there is neither column, or a word holds a control character.
    """
    index: dict[str, int] = {}
    order = []
    oov_after = np.zeros(population.num_examples + 1, np.int64)
    for example, words in enumerate(word_lists(population)):
        for word in words:
            if word not in vocabulary:
                order.append(index.setdefault(word, len(index)))
        oov_after[example + 1] = len(order)
    tokens_NxL = encode_words(index, max_bytes)[np.array(order, np.int64)]
    return population.with_examples({"tokens": tokens_NxL}, oov_after[population.offsets])


def log_prior(tokens_NxL: np.ndarray) -> tuple[float, ...]:
    """Log frequencies of the symbols as targets in PUBLIC words, for `output_bias_prior`.

    Add-one smoothed over all symbols.

    Args:
      tokens_NxL: rows as of `encode_words`.
    """
    targets = np.asarray(tokens_NxL)[:, 1:]
    counts = np.bincount(targets[targets != PAD], minlength=SYMBOLS)
    counts[[NUL, START]] = 0
    total = int(counts.sum()) + SYMBOLS
    return tuple(math.log((int(count) + 1) / total) for count in counts)
