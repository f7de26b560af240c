"""The most probable words of a character language model, by exact joint probability.

The distribution is the one that words are drawn from: of each symbol given those before it, the
softmax of the model's logits over all symbols but NUL and start of word. A word
c_1 .. c_n of 1 <= n <= max_bytes bytes has the probability

    p(c_1) p(c_2 | c_1) .. p(c_n | c_1 .. c_n-1) p(end | c_1 .. c_n)

with its end; these sum to less than 1, for the empty word and words that go on after max_bytes
bytes are none. Candidates are found by Monte Carlo sampling, made distinct, and rescored exactly,
so a probability here is not a frequency and does not vary with the sample; which words are found
does.

Source: Augenstein et al. 2020, Equation 1, Section 5 and Appendix B.2.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Params
from jaxpfl.text.character.words import CHARACTER_IDS, MAX_BYTES, complete_word, show
from jaxpfl.text.generation.sentences import Recurrent, SpecialIds, request_keys, sample_tokens

_BATCH = 1024


@dataclass(frozen=True)
class ScoredWord:
    """A word of a character language model.

    Attributes:
      word: as `jaxpfl.text.character.words.show` writes it.
      raw: its bytes.
      log_probability: of the word with its end, in nats.
      draws: how often it was drawn.
    """

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
      words: by falling probability; ties by their bytes. Those excluded are not here, but in all
        that follows.
      drawn: sequences drawn.
      complete: those that were words: not empty, and ended within the cap.
      distinct: different words among them.
      covered: probability of all different words together; 1 - covered is that of all the others,
        of sequences that are no words among them.
    """

    words: tuple[ScoredWord, ...]
    drawn: int
    complete: int
    distinct: int
    covered: float

    def expected_missed(self, probability: float) -> float:
        """A bound on the expected number of words at least as probable that were never drawn.

        There are at most 1 / p of them, and each is missed with probability at most (1 - p)^drawn.

        Args:
          probability: p, in (0, 1], chosen before the words were drawn.
        """
        if not 0 < probability <= 1:
            raise InputError(f"probability must lie in (0, 1], found {probability}")
        if probability == 1:
            return 0.0
        return math.exp(self.drawn * math.log1p(-probability)) / probability


def top_words(
    model: Recurrent,
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

    Args:
      model: of 258 symbols, see `jaxpfl.text.character.words`.
      max_bytes: words of more bytes are none.
      excluding: words that are left out of `TopWords.words`, such as a `Vocabulary`: a model of
        words out of it gives some of those in it a share all the same, which is its error.
      progress: show a bar on stderr.

    A word of probability p is missed with probability (1 - p)^draws: 5e-5 for p = 1e-4 and 100,000
    draws. All of it is post-processing of `params`: it costs no privacy.
    """
    positive_int("number", number)
    positive_int("draws", draws)
    positive_int("max_bytes", max_bytes)
    tokens_NxT = sample_tokens(
        model,
        params,
        request_keys(key, draws),
        max_tokens=max_bytes + 1,
        ids=CHARACTER_IDS,
        progress=progress,
    )
    last_N = np.argmax(tokens_NxT == CHARACTER_IDS.end, axis=1)
    # The first place of an end: 0 for the empty word and where there is none.
    complete_CxT = tokens_NxT[last_N > 0]
    distinct_DxT, draws_D = np.unique(complete_CxT, axis=0, return_counts=True)
    log_D = log_probabilities(model, params, distinct_DxT)
    # `unique` sorts by bytes, with the end after all of them; a stable sort keeps that for ties.
    found = []
    for i in np.argsort(-log_D, kind="stable"):
        raw = complete_word(distinct_DxT[i]) or b""
        if raw.decode("utf-8", "surrogateescape") in excluding:
            continue
        found.append(ScoredWord(show(raw), raw, float(log_D[i]), int(draws_D[i])))
        if len(found) == number:
            break
    return TopWords(
        words=tuple(found),
        drawn=draws,
        complete=len(complete_CxT),
        distinct=len(distinct_DxT),
        covered=math.fsum(np.exp(log_D)),
    )


def log_probabilities(
    model: Recurrent, params: Params, tokens_NxT: np.ndarray, *, ids: SpecialIds = CHARACTER_IDS
) -> np.ndarray:
    """Log probability in nats of each sequence, float64 [N], as `sample_tokens` draws it.

    Log softmax in float32, and the sum over a sequence's symbols in float64. A symbol that is never
    drawn gives -inf.

    Args:
      tokens_NxT: rows as `sample_tokens` returns them; padding counts nothing.
    """
    tokens_NxT = np.asarray(tokens_NxT, np.int32)
    number = len(tokens_NxT)
    real_NxT = tokens_NxT != PAD
    if not np.all((0 <= tokens_NxT[real_NxT]) & (tokens_NxT[real_NxT] < model.vocab_size)):
        raise InputError(
            f"tokens must lie in 0 .. {model.vocab_size - 1}, the model's ids, found one outside"
        )
    banned_V = jnp.asarray(ids.banned(model.vocab_size))
    log_N = np.zeros(number, np.float64)
    for start in range(0, number, _BATCH):
        rows = np.minimum(np.arange(start, start + _BATCH), number - 1)
        # What is read in place of padding does not count.
        read_BxT = np.maximum(tokens_NxT[rows], 0)
        log_BxT = _score(model, ids.start, params, read_BxT, banned_V)
        kept = min(number - start, _BATCH)
        real_KxT = real_NxT[start : start + kept]
        scores_KxT = np.asarray(log_BxT, np.float64)[:kept]
        log_N[start : start + kept] = np.where(real_KxT, scores_KxT, 0.0).sum(axis=1)
    return log_N


@partial(jax.jit, static_argnums=(0, 1))
def _score(
    model: Recurrent, start: int, params: Params, tokens_BxT: Array, banned_V: Array
) -> Array:
    """Float32 [B, T]: log probability of each token given those before it."""
    batch = tokens_BxT.shape[0]

    def step(state: tuple[Array, object], next_B: Array) -> tuple[tuple[Array, object], Array]:
        token_B, carry = state
        logits_BxV, carry = model.step(params, token_B, carry)
        log_BxV = jax.nn.log_softmax(jnp.where(banned_V[None, :], -jnp.inf, logits_BxV))
        return (next_B, carry), jnp.take_along_axis(log_BxV, next_B[:, None], axis=1)[:, 0]

    begin = (jnp.full(batch, start, jnp.int32), model.initial_carry(batch))
    return lax.scan(step, begin, tokens_BxT.T)[1].T
