"""Next-token accuracy and perplexity of a language model.

A text is tokenised once. Every real token except a row's first is a target, predicted from those
before it; padding does not count. Models with different tokenisers cannot be compared.

`popri_released_evaluation` repeats the evaluation of the code released with POPri (Hou et al.
2025), for comparison with that paper's tables only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import PAD, Metrics, Model, Params, summarise
from jaxpfl.progress import track
from jaxpfl.text.preference.log_probabilities import dealt, filled, placed
from jaxpfl.text.tokenisers.base import Tokeniser, check_fits, pad
from jaxpfl.text.tokenisers.fast import byte_characters


def evaluate(
    model: Model,
    params: Params,
    tokens_NxL: np.ndarray,
    *,
    batch_size: int = 16,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> dict[str, float]:
    """Next-token accuracy and perplexity of a decoder, over the real targets of all rows.

    Args:
      tokens_NxL: int32 ids, padded with -1 on the right.
      batch_size: rows on the accelerator at a time.
      mesh: the devices along its axis "data" share each batch, see `preference.optimisation.tune`.

    Returns:
      "accuracy" (top-1, 0 .. 1), "loss" (nats per target), "perplexity" (exp of the loss) and
      "count" of targets; NaN when there is none.

    Raises:
      InputError: tokens that are not int32 with two axes, or none at all.
    """
    positive_int("batch_size", batch_size)
    if tokens_NxL.ndim != 2 or tokens_NxL.dtype != np.int32:
        raise InputError(
            f"tokens must be int32 with two axes, found {tokens_NxL.dtype} {tokens_NxL.shape}"
        )
    if not len(tokens_NxL):
        raise InputError("tokens: there are no texts to evaluate on")
    params = placed(params, mesh)
    totals: dict[str, float] = {}
    for start in track(range(0, len(tokens_NxL), batch_size), "evaluating", progress=progress):
        chosen = np.arange(start, min(start + batch_size, len(tokens_NxL)))
        rows, real_B = filled(chosen, batch_size, mesh)
        tokens_BxL, real_B = dealt((tokens_NxL[rows], real_B), mesh)
        found = jax.device_get(_evaluated(model, params, tokens_BxL, real_B))
        # Summed in float64, because float32 cannot count beyond 16 million.
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in found.items()}
    return summarise(totals)  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnums=0)
def _evaluated(model: Model, params: Params, tokens_BxL: Any, real_B: Any) -> Metrics:
    return model.evaluate(params, {"tokens": tokens_BxL}, real_B)


INFLATED = (
    "POPri's released evaluation tokenises texts twice, so many targets are artefacts that are "
    "always the same. Inflated; not comparable with any other figure."
)


@dataclass(frozen=True)
class ReleasedEvaluation:
    """The result of POPri's released evaluation. INFLATED, and comparable with nothing else.

    Attributes:
      accuracy, loss, perplexity, count: as of `evaluate`, on texts that are tokenised twice.
      artefacts: share of the targets that the second tokenisation added.
      note: a warning that is stored together with the numbers.
    """

    accuracy: float
    loss: float
    perplexity: float
    count: float
    artefacts: float
    note: str = field(default=INFLATED, init=False)


def popri_released_evaluation(
    model: Model,
    params: Params,
    tokeniser: Tokeniser,
    texts: Sequence[str],
    *,
    length: int = 64,
    batch_size: int = 16,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> ReleasedEvaluation:
    """COMPATIBILITY MODE: the evaluation of POPri's released code. Its figures are inflated.

    That code tokenises a text, and gives the tokens, as GPT-2 spells them, to the tokeniser again
    as if they were words (`tokenised_twice`). "Ġthe" becomes three tokens, two of which spell the
    mark of a space. About half of all targets belong to that mark, which a model trained in the
    same way predicts almost always, and a row of 64 tokens contains half of a sample. Use
    `evaluate` for everything else.

    Args:
      tokeniser: a byte-level one, such as GPT-2's.
      length: tokens of a row; longer texts are cut.

    Raises:
      InputError: a tokeniser without end-of-text, or one that does not fit the model.
    """
    tokens_NxL, is_artefact_NxL = tokenised_twice(tokeniser, texts, length)
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None:
        check_fits(tokeniser, vocab_size)
    found = evaluate(model, params, tokens_NxL, batch_size=batch_size, mesh=mesh, progress=progress)
    targets = np.sum(tokens_NxL[:, 1:] != PAD)
    artefacts = float(np.sum(is_artefact_NxL[:, 1:]) / targets) if targets else float("nan")
    return ReleasedEvaluation(**found, artefacts=artefacts)


def tokenised_twice(
    tokeniser: Tokeniser, texts: Sequence[str], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of POPri's released code: int32 [N, length], and which tokens are artefacts.

    Each token of a text, and the end-of-text before and after it, is spelled in the characters that
    stand for bytes in a byte-level vocabulary, and tokenised again with a space in front. All but
    the last of the resulting tokens are artefacts: with GPT-2 and English prose three of five, most
    of them the mark of a space.
    """
    end = tokeniser.end_of_text
    if end is None:
        raise InputError(f"the tokeniser {tokeniser.name} must have an end-of-text, found none")
    characters = byte_characters()
    spelled = [
        " " + "".join(characters[value] for value in content) for content in tokeniser.token_bytes()
    ]
    # The end-of-text becomes a space and itself.
    again: dict[int, np.ndarray] = {
        end: np.append(tokeniser.encode([" "])[0], end).astype(np.int32)
    }
    first = tokeniser.encode(texts)
    used = sorted({int(token) for row in first for token in row} - {end})
    again |= dict(zip(used, tokeniser.encode([spelled[token] for token in used]), strict=True))
    rows, marks = [], []
    for row in first:
        groups = [again[int(token)] for token in (end, *row, end)]
        rows.append(np.concatenate(groups))
        marks.append(np.concatenate([np.arange(len(group)) < len(group) - 1 for group in groups]))
    is_artefact_NxL = pad([mark.astype(np.int32) for mark in marks], length) == 1
    return pad(rows, length), is_artefact_NxL
