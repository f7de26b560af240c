"""Whether FreD's order predicts perplexity: the candidates' table and its rank correlations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

STAGES = ("before", "after")
"""Perplexity after prefinetuning and before the private rounds; and after both."""


def ranking(
    scores: Sequence[Mapping[str, Any]],
    before: Mapping[str, Mapping[str, float]],
    after: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The candidates by FreD, with their models' metrics on declared-public test clients.

    Args:
      scores: "candidate", "distance" and "corrected" of each, nearest first.
      before, after: by candidate, "loss", "perplexity" and "accuracy" of its model before and
        after the private rounds; of the winner alone where the losers were not carried through.

    Returns:
      "candidates": rank, candidate, distance, corrected, before, after, and "counterfactual",
        true of all but the winner; and
      "spearman": for "before" and "after" Spearman's rank correlation of FreD with the loss, which
        has the order of perplexity; None with fewer than three models, or ties throughout.
    """
    rows = [
        {
            "rank": rank,
            **score,
            "before": before.get(score["candidate"]),
            "after": after.get(score["candidate"]),
            "counterfactual": rank > 1,
        }
        for rank, score in enumerate(scores, start=1)
    ]
    correlations = {stage: _spearman(rows, stage) for stage in STAGES}
    return {"candidates": rows, "spearman": correlations}


def _spearman(rows: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    from scipy.stats import spearmanr

    pairs = [(row["distance"], row[stage]["loss"]) for row in rows if row[stage] is not None]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    distances, losses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    # A constant has no ranks to correlate.
    if len(pairs) < 3 or len(set(distances)) < 2 or len(set(losses)) < 2:
        return None
    return float(spearmanr(distances, losses)[0])  # pyright: ignore[reportArgumentType]
