"""Next-token accuracy and perplexity of a language model, and its bits per byte.

A text is tokenised once. Every real token except a row's first is a target, predicted from those
before it; padding does not count. Models with different tokenisers can be compared by bits per byte
alone.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpfl.checks import positive_int
from jaxpfl.errors import InputError
from jaxpfl.models.base import Metrics, Model, Params, summarise
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.microbatches import dealt, filled, placed
from jaxpfl.text.tokenisers.base import pad


def evaluate(
    model: Model,
    params: Params,
    tokens_NxL: np.ndarray,
    *,
    batch_size: int = 16,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Next-token accuracy and perplexity of a decoder, over the real targets of all rows.

    Args:
      tokens_NxL: int32 ids, padded with -1 on the right.
      batch_size: rows on the accelerator at a time.
      mesh: the devices along its axis "data" share each batch, see `preference.optimisation.tune`.

    Returns:
      "accuracy" (top-1, 0 .. 1), "loss" (nats per target), "perplexity" (exp of the loss) and
      "count" of targets; NaN when there is none.
    """
    positive_int("batch_size", batch_size)
    if not len(tokens_NxL):
        raise InputError("tokens: there are no texts to evaluate on")
    params = placed(params, mesh)
    totals: dict[str, float] = {}
    for start in range(0, len(tokens_NxL), batch_size):
        chosen = np.arange(start, min(start + batch_size, len(tokens_NxL)))
        rows, real_B = filled(chosen, batch_size, mesh)
        tokens_BxL, real_B = dealt((tokens_NxL[rows], real_B), mesh)
        metrics = jax.device_get(_evaluated(model, params, tokens_BxL, real_B))
        # Summed in float64, because float32 cannot count beyond 16 million.
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in metrics.items()}
    return summarise(totals)  # pyright: ignore[reportArgumentType]


def bits_per_byte(writer: LanguageModel, texts: Sequence[str], *, batch_size: int = 16) -> float:
    """The bits that a model needs for a byte (UTF-8) of texts, each read after the start token.

    Without a start token a text is read after the end of another one. Its own end is no target.

    Raises:
      InputError: there is no byte, or a text has more tokens than the model has positions.
    """
    tokeniser, positions = writer.tokeniser, writer.model.config.positions
    first = tokeniser.end_of_text if tokeniser.start is None else tokeniser.start
    if first is None:
        raise InputError(f"the tokeniser {tokeniser.name} has neither a start nor an end token")
    rows = [np.array([first, *ids], np.int32) for ids in tokeniser.encode(texts)]
    longest, size = max(map(len, rows), default=0), sum(len(text.encode()) for text in texts)
    if longest > positions:
        raise InputError(f"a text must have at most {positions - 1} tokens, found {longest - 1}")
    if not size:
        raise InputError("texts: there is no byte to predict")
    rows_NxL = pad(rows, longest)
    settings: Any = {"batch_size": batch_size, "mesh": writer.mesh}
    metrics = evaluate(writer.model, writer.params, rows_NxL, **settings)
    return metrics["loss"] * metrics["count"] / math.log(2) / size


@partial(jax.jit, static_argnums=0)
def _evaluated(model: Model, params: Params, tokens_BxL: Any, real_B: Any) -> Metrics:
    return model.evaluate(params, {"tokens": tokens_BxL}, real_B)
