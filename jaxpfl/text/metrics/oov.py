"""How often words are out of the vocabulary, by their position in the sentence.

Figure 4 of Augenstein et al. 2020 shows the "percentage of samples generated from the word-LM that
are OOV by position in the sentence". Here the rate at position t is

    sentences whose word t is out of the vocabulary / sentences that have a word t

so that a sentence that has ended counts nowhere: the end of a sentence is no word. Dividing by all
sentences instead would make the rate fall with the position because sentences end; both counts are
there to compute it.

The rates of sentences that a private model generated are post-processing, and public with it. Those
of clients' own sentences are exact counts of private data: PRIVATE in a deployment, where only the
former can be looked at; in a simulation they say what the former should show.

Source: Augenstein et al. 2020, Section 5 and Appendix B, Figures 1 and 4, Table 6.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, OOV

if TYPE_CHECKING:
    from jaxpfl.data.population import Population


@dataclass(frozen=True)
class OOVRates:
    """Counts of words, by position in the sentence.

    Attributes:
      oov_T: int64, sentences whose word at the position is out of the vocabulary.
      words_T: int64, sentences that have a word at the position.
      sentences: all sentences, those without words too.
    """

    oov_T: np.ndarray
    words_T: np.ndarray
    sentences: int

    @property
    def rate_T(self) -> np.ndarray:
        """Share of words out of the vocabulary, float64 [T]; NaN where no sentence has a word."""
        rates_T = np.full(len(self.words_T), np.nan)
        return np.divide(self.oov_T, self.words_T, out=rates_T, where=self.words_T > 0)

    @property
    def overall(self) -> float:
        """Share of all words; NaN where there is none."""
        words = int(self.words_T.sum())
        return int(self.oov_T.sum()) / words if words else float("nan")

    def standard_error_T(self) -> np.ndarray:
        """Of `rate_T` as estimates from sentences drawn independently; NaN like it."""
        rate_T = self.rate_T
        return np.sqrt(rate_T * (1 - rate_T) / np.maximum(self.words_T, 1))


def oov_rates(tokens_NxT: np.ndarray) -> OOVRates:
    """Counts the out-of-vocabulary words of sentences, such as `sample_tokens` draws.

    Args:
      tokens_NxT: int ids of a `Vocabulary`, one sentence a row: words, then the end of sentence if
        it is not cut, then padding; with or without a beginning of sentence before them.

    Raises:
      InputError: not a two-dimensional array of integers, or a row of another form.
    """
    tokens_NxT = np.asarray(tokens_NxT)
    if tokens_NxT.ndim != 2 or tokens_NxT.dtype.kind not in "iu":
        raise InputError(
            f"tokens must be a two-dimensional array of integers, found shape {tokens_NxT.shape} "
            f"of {tokens_NxT.dtype}"
        )
    if tokens_NxT.size and np.all(tokens_NxT[:, 0] == BOS):
        tokens_NxT = tokens_NxT[:, 1:]
    word_NxT = np.logical_and(tokens_NxT != PAD, tokens_NxT != EOS)
    misplaced = np.logical_or(
        np.any(tokens_NxT == BOS, axis=1),
        # A word after one place that holds none.
        np.any(np.diff(word_NxT.astype(np.int8), axis=1) > 0, axis=1),
    )
    if np.any(misplaced):
        raise InputError(
            f"row {int(np.argmax(misplaced))} must be words, end of sentence, padding, found "
            "another order"
        )
    return OOVRates(
        oov_T=np.count_nonzero(tokens_NxT == OOV, axis=0),
        words_T=np.count_nonzero(word_NxT, axis=0),
        sentences=len(tokens_NxT),
    )


def oov_rates_of(population: "Population") -> OOVRates:
    """The rates of clients' sentences, exactly. PRIVATE: a figure of simulations.

    Args:
      population: with "tokens" as of `Vocabulary.encode`; words beyond its length are not seen.
    """
    if "tokens" not in population.columns:
        found = ", ".join(sorted(population.columns)) or "none"
        raise InputError(f'population {population.name} needs a column "tokens", found {found}')
    return oov_rates(population.columns["tokens"])
