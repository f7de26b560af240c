"""The unigram model, a baseline for language models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD
from jaxpfl.text.metrics.oov import check_token_rows
from jaxpfl.text.tokenisers.vocabulary import BOS, OOV, UNUSED


@dataclass(frozen=True)
class UnigramBaseline:
    """How well word frequencies alone predict other text than they were counted on.

    Attributes:
      perplexity: exp of the mean negative log-likelihood in nats.
      accuracy: share of targets equal to the most frequent training target that is not
        out-of-vocabulary, which is no prediction of a word.
    """

    perplexity: float
    accuracy: float
    count: int


def unigram_baseline(
    train_NxL: np.ndarray, evaluation_MxL: np.ndarray, *, vocab_size: int, words: bool = True
) -> UnigramBaseline:
    """Fits token frequencies on one token array and scores them on another.

    The targets are those of the language models: every token after the first of a row except
    padding, including end of sentence and out-of-vocabulary. Frequencies are add-one smoothed over
    the ids that can be targets; a tie for the most frequent goes to the lowest id. As with the
    models, out-of-vocabulary is never a correct prediction. The counts are exact, without
    differential privacy: neither they nor a model made from them may be released when the training
    text is private.

    Args:
      train_NxL, evaluation_MxL: int token ids, rows of bos, words, eos, padding.
      words: whether the ids are those of a `Vocabulary`, of which some are never targets, and one
        stands for no word. A `Tokeniser` has no such ids.
    """
    positive_int("vocab_size", vocab_size)
    counts_V = _target_counts("train", train_NxL, vocab_size)
    return scored_counts(counts_V, evaluation_MxL, words=words)


def scored_counts(
    counts: Sequence[int] | np.ndarray, evaluation_MxL: np.ndarray, *, words: bool = True
) -> UnigramBaseline:
    """As `unigram_baseline`, of `counts` by id, such as `Vocabulary.counts` of public text."""
    counts_V = np.asarray(counts, np.float64)
    possible_V = np.ones(len(counts_V), bool)
    if words:
        possible_V[[UNUSED, BOS]] = False
    targets_V = _target_counts("evaluation", evaluation_MxL, len(counts_V))
    held_out_V = np.where(possible_V, targets_V, 0)
    total = int(held_out_V.sum())
    if total == 0:
        raise InputError("evaluation tokens must hold at least one target, found none")
    smoothed_V = np.where(possible_V, counts_V + 1.0, 0.0)
    log_probability_V = np.log(np.where(possible_V, smoothed_V, 1.0) / smoothed_V.sum())
    loss = -float(held_out_V @ log_probability_V) / total
    if words:
        smoothed_V[OOV] = 0
    accuracy = float(held_out_V[np.argmax(smoothed_V)]) / total
    return UnigramBaseline(float(np.exp(loss)), accuracy, count=total)


def _target_counts(name: str, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id is a target: float64 [vocab_size]."""
    tokens = np.asarray(tokens)
    check_token_rows(f"{name} tokens", tokens)
    targets = tokens[:, 1:][tokens[:, 1:] != PAD]
    if targets.size and not (0 <= targets.min() and targets.max() < vocab_size):
        raise InputError(f"{name} tokens must lie in 0 .. {vocab_size - 1}, found one outside")
    return np.bincount(targets, minlength=vocab_size).astype(np.float64)
