"""How often words are out of the vocabulary, by their position in the sentence.

Figure 4 of Augenstein et al. 2020 shows the "percentage of samples generated from the word-LM that
are OOV by position in the sentence". Here the rate at position t is

    sentences whose word t is out of the vocabulary / sentences that have a word t

so that a sentence counts only up to its end. Divided by all sentences instead, the rate would fall
with the position because sentences end; `OOVRates` has the counts for both.

The rates of sentences that a private model generated are post-processing, and as public as the
model. Those of clients' own sentences are exact counts of private data: PRIVATE in a deployment,
they serve in a simulation to check the former. `oov_counts` is what a client counts where the
overall rate is a release (`algorithms.federated_metrics`).

Source: Augenstein et al. 2020, Section 5 and Appendix B, Figures 1 and 4, Table 6.
"""

from dataclasses import dataclass

import numpy as np

from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.text.tokenisers.vocabulary import BOS, EOS, OOV


@dataclass(frozen=True)
class OOVRates:
    """Numbers of `sentences` by position, int64: with an unknown word there, and with any word."""

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
        """Share of all words that are out of the vocabulary; NaN without words."""
        words = int(self.words_T.sum())
        return int(self.oov_T.sum()) / words if words else float("nan")


def check_token_rows(name: str, tokens: np.ndarray) -> None:
    """Refuses anything but a two-dimensional array of integers."""
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        form = f"shape {tokens.shape} of {tokens.dtype}"
        raise InputError(f"{name} must be a two-dimensional array of integers, found {form}")


def oov_rates(tokens_NxT: np.ndarray) -> OOVRates:
    """Counts the out-of-vocabulary words of sentences, such as `sample_tokens` draws.

    A row has the ids of a `Vocabulary` of one sentence: words, then the end of sentence if it is
    not cut, then padding; with or without a beginning of sentence before them.
    """
    tokens_NxT = np.asarray(tokens_NxT)
    check_token_rows("tokens", tokens_NxT)
    if tokens_NxT.size and np.all(tokens_NxT[:, 0] == BOS):
        tokens_NxT = tokens_NxT[:, 1:]
    return OOVRates(
        oov_T=np.count_nonzero(tokens_NxT == OOV, axis=0),
        words_T=np.count_nonzero(_is_word(tokens_NxT), axis=0),
        sentences=len(tokens_NxT),
    )


def oov_counts(tokens_NxT: np.ndarray) -> np.ndarray:
    """Unknown words and other words of each such sentence, float32 [sentences, 2]."""
    oov_N = np.count_nonzero(tokens_NxT == OOV, axis=1)
    words_N = np.count_nonzero(_is_word(tokens_NxT), axis=1)
    return np.stack([oov_N, words_N - oov_N], axis=1).astype(np.float32)


def _is_word(tokens_NxT: np.ndarray) -> np.ndarray:
    return (tokens_NxT != PAD) & (tokens_NxT != EOS) & (tokens_NxT != BOS)


def oov_rates_of(population: Population) -> OOVRates:
    """The exact rates of clients' sentences in the column "tokens" of `Vocabulary.encode`.

    PRIVATE: for simulations only. Words beyond the length of a row are not counted.
    """
    return oov_rates(np.asarray(population.column("tokens")))
