"""The most probable words of a character language model, by exact joint probability.

Given the symbols before it, the distribution of a symbol is the softmax of the model's logits over
all symbols except NUL and start of word. A word c_1 .. c_n of 1 <= n <= max_bytes bytes has the
probability

    p(c_1) p(c_2 | c_1) .. p(c_n | c_1 .. c_n-1) p(end | c_1 .. c_n)

These sum to less than 1, because the empty word and longer words do not count. Candidates are found
by Monte Carlo sampling, made distinct and scored exactly: a probability here is not a frequency and
does not vary with the sample; only which words are found does.

Source: Augenstein et al. 2020, Equation 1, Section 5 and Appendix B.2.
"""

import math
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from jax import Array

from jaxpfl.checks import positive_int
from jaxpfl.models.base import Params
from jaxpfl.models.recurrent import CIFGLanguageModel
from jaxpfl.text.character.words import CHARACTER_IDS, END, MAX_BYTES, START, complete_word, show
from jaxpfl.text.generation.sentences import sample_tokens
from jaxpfl.text.metrics.prediction import log_probabilities


@dataclass(frozen=True)
class ScoredWord:
    """A word, as `words.show` writes it, and its log-probability with its end, in nats."""

    word: str
    raw: bytes
    log_probability: float
    draws: int

    @property
    def probability(self) -> float:
        return math.exp(self.log_probability)


@dataclass(frozen=True)
class TopWords:
    """The most probable words that were drawn.

    Attributes:
      words: by falling probability, ties by their bytes, without the excluded words.
      covered: the total probability of the different words that were drawn, excluded ones among
        them; 1 - covered is the probability of all other sequences.
    """

    words: tuple[ScoredWord, ...]
    covered: float


def top_words(
    model: CIFGLanguageModel,
    params: Params,
    key: Array,
    *,
    number: int = 20,
    draws: int = 100_000,
    max_bytes: int = MAX_BYTES,
    excluding: Container[str] = (),
    progress: bool = False,
) -> TopWords:
    """The `number` most probable words among `draws` drawn ones; fewer, if fewer were drawn.

    A word of probability p is missed with probability (1 - p)^draws: 5e-5 for p = 1e-4 and 100,000
    draws. This is post-processing of `params` and costs no privacy.

    Args:
      model: of 258 symbols, see `jaxpfl.text.character.words`.
      max_bytes: longer words do not count.
      excluding: words that are left out of `TopWords.words`, such as a `Vocabulary`, whose words
        get some probability even by a model of the words out of it.
    """
    positive_int("number", number)
    positive_int("draws", draws)
    positive_int("max_bytes", max_bytes)
    tokens_NxT = sample_tokens(
        model,
        params,
        key,
        np.arange(draws),
        max_tokens=max_bytes + 1,
        ids=CHARACTER_IDS,
        progress=progress,
    )
    # The place of the end is 0 for the empty word, and where there is no end.
    complete_CxT = tokens_NxT[np.argmax(tokens_NxT == END, axis=1) > 0]
    distinct_DxT, draws_D = np.unique(complete_CxT, axis=0, return_counts=True)
    never_V = CHARACTER_IDS.banned(model.vocab_size)
    log_D = log_probabilities(model, params, np.insert(distinct_DxT, 0, START, axis=1), never_V)
    # `unique` sorts by bytes, with the end after all of them; a stable sort keeps this order.
    scored = []
    for i in np.argsort(-log_D, kind="stable"):
        raw = complete_word(distinct_DxT[i]) or b""
        if raw.decode("utf-8", "surrogateescape") in excluding:
            continue
        scored.append(ScoredWord(show(raw), raw, float(log_D[i]), int(draws_D[i])))
        if len(scored) == number:
            break
    return TopWords(tuple(scored), covered=math.fsum(np.exp(log_D)))
