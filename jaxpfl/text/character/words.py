"""Words as sequences of bytes, which a character language model reads and draws.

The symbols are the 256 bytes, start of word (256) and end of word (257). No word contains the byte
NUL, since control characters separate words (`jaxpfl.text.tokenisers.vocabulary`), so models never
draw it. Rows are padded with `jaxpfl.models.PAD`.

A word of more than `max_bytes` bytes, a public cap, is cut after that many bytes, possibly inside a
character, and has no end of word: a model learns that such a word continues, and a cut word never
counts as complete.

A model may draw invalid UTF-8. `show` writes different sequences of bytes as different texts: a
valid character stands for itself and a backslash becomes two, but an invalid byte becomes \\xNN, as
does each byte of a control, format or line-separating character or of a space other than the plain
one. No word can control the terminal that shows it.

Source: Chen et al. 2019, "Federated Learning of Out-of-Vocabulary Words", and Augenstein et al.
2020, Section 5 and Appendix B.2.
"""

import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.models.recurrent import CIFGLanguageModel
from jaxpfl.text.generation.sentences import SpecialIds
from jaxpfl.text.tokenisers.base import clean
from jaxpfl.text.tokenisers.vocabulary import Vocabulary, word_lists

NUL, START, END = 0, 256, 257
SYMBOLS = 258
MAX_BYTES = 20

CHARACTER_IDS = SpecialIds(start=START, end=END, never=(NUL,))
"""For `jaxpfl.text.sample_tokens`."""

_SHOWN_AS_BYTES = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp", "Zs"))
_CONTROL = re.compile("[\0-\x1f\x7f]")


def char_lm(**settings: Any) -> CIFGLanguageModel:
    """The character model of Augenstein et al. 2020, Appendix B.2: 756,738 parameters.

    It is an untied `CIFGLanguageModel`, whose `settings` replace the paper's; 758,274 parameters
    with `peepholes`.
    """
    sizes: dict[str, Any] = {"embedding": 128, "hidden": 256, "projection": 128, "layers": 3}
    fixed: dict[str, Any] = {"vocab_size": SYMBOLS, "tied": False, "oov": None, "name": "char_lm"}
    return CIFGLanguageModel(**fixed, **(sizes | settings))


def encode_words(words: Iterable[str], max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Ids int32 [words, max_bytes + 2]: start, the bytes, end if the word is not cut, padding.

    A lone surrogate, which UTF-8 cannot encode, becomes U+FFFD.
    """
    positive_int("max_bytes", max_bytes)
    rows = clean(list(words))
    ids_NxL = np.full((len(rows), max_bytes + 2), PAD, np.int32)
    ids_NxL[:, 0] = START
    for row, word in enumerate(rows):
        if not word or _CONTROL.search(word):
            problem = "holds a control character" if word else "is empty"
            raise InputError(f"a word {problem}, expected characters, no control characters")
        encoded = word.encode()
        head = encoded[:max_bytes]
        ids_NxL[row, 1 : len(head) + 1] = np.frombuffer(head, np.uint8)
        if len(encoded) <= max_bytes:
            ids_NxL[row, len(head) + 1] = END
    return ids_NxL


def complete_word(ids: np.ndarray) -> bytes | None:
    """The bytes of one drawn sequence, which has no start, up to its end; None without an end."""
    ended = np.flatnonzero(ids == END)
    return ids[: ended[0]].astype(np.uint8).tobytes() if ended.size else None


def show(word: bytes) -> str:
    """A word as text, by the rules at the head of this file."""
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
    population: Population, vocabulary: Vocabulary, max_bytes: int = MAX_BYTES
) -> Population:
    """The same clients, whose examples are their words out of the vocabulary, in their order.

    The only column is "tokens", int32 [words, max_bytes + 2], see `encode_words`. Words are read
    from the column "words", else from "text"; one that occurs twice is two examples. Clients
    without such a word remain, without examples. The fingerprint is that of `population`, and
    therefore also the ledger.
    """
    index: dict[str, int] = {}
    order = []
    oov_after = np.zeros(population.num_examples + 1, np.int64)
    for example, words in enumerate(word_lists(population, vocabulary.split)):
        for word in words:
            if word not in vocabulary:
                order.append(index.setdefault(word, len(index)))
        oov_after[example + 1] = len(order)
    tokens_NxL = encode_words(index, max_bytes)[np.array(order, np.int64)]
    return population.with_examples({"tokens": tokens_NxL}, oov_after[population.offsets])


def log_prior(tokens_NxL: np.ndarray) -> tuple[float, ...]:
    """Log frequencies of the symbols as targets in PUBLIC rows of `encode_words`.

    They are add-one smoothed over all symbols, for `CIFGLanguageModel.output_bias_prior`.
    """
    targets = np.asarray(tokens_NxL)[:, 1:]
    counts = np.bincount(targets[targets != PAD], minlength=SYMBOLS)
    counts[[NUL, START]] = 0
    total = int(counts.sum()) + SYMBOLS
    return tuple(math.log((int(count) + 1) / total) for count in counts)
