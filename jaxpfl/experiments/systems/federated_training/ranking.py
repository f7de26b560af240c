"""Whether FreD's order predicts perplexity: the candidates' table and its rank correlations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.records.numbers import number

Scores = Mapping[str, float]


def ranking(
    scores: Sequence[Mapping[str, Any]], stages: Mapping[str, Mapping[str, Scores]]
) -> dict[str, Any]:
    """The candidates by FreD, with their models' metrics on declared-public test clients.

    Args:
      scores: the `Score.row` of each candidate, nearest first.
      stages: "before" and "after" the private rounds, or one of them: the "loss", "perplexity" and
        "accuracy" of each candidate's model. After the rounds, those of the candidates that FreD
        did not choose are a simulation.

    Returns:
      "candidates": the rank, the score's entries, and the metrics or None for each stage.
      "spearman": for each stage, Spearman's rank correlation of the corrected FreD with the loss,
        which has the order of perplexity; None with fewer than three models, or if one of the two
        is constant.
    """
    rows = [
        {
            "rank": rank,
            **score,
            **{stage: models.get(score["candidate"]) for stage, models in stages.items()},
        }
        for rank, score in enumerate(scores, start=1)
    ]
    return {"candidates": rows, "spearman": {stage: _spearman(rows, stage) for stage in stages}}


def _spearman(rows: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    from scipy.stats import spearmanr

    pairs = [(row["corrected"], row[stage]["loss"]) for row in rows if row[stage] is not None]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    distances, losses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    # A constant has no ranks to correlate.
    if len(pairs) < 3 or len(set(distances)) < 2 or len(set(losses)) < 2:
        return None
    return float(spearmanr(distances, losses)[0])  # pyright: ignore[reportArgumentType]


def correlations(fred: Mapping[str, Any], metric: str) -> str:
    """Whether FreD's order is that of the models, in a sentence; "" where nothing is known."""
    found = [
        f"{value:.2f} {stage} the private rounds"
        for stage, value in fred["spearman"].items()
        if value is not None
    ]
    number = f"{len(fred['candidates'])} candidates; 1 = the same order"
    start = f"Spearman's rank correlation of FreD with {metric}: "
    return f"{start}{', '.join(found)} ({number})." if found else ""


def score_text(scores: Scores | None, metric: str) -> str:
    """A model's loss or perplexity in a table; "" without a model."""
    return number(scores[metric]) if scores else ""
