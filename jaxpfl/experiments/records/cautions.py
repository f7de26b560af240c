"""Sentences that warn the reader of a result: worse than a baseline, a rising loss, mostly noise.

They follow from the public files of a run alone, and so from what its statement covers.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

OURS = "this run"
"""The row of the run itself in a table of models."""


def worse_than(table: Sequence[Mapping[str, Any]], metric: str) -> dict[str, tuple[float, float]]:
    """The models that the run ends worse than: name -> (the run's score, the model's score).

    A score that is missing or not finite is worse than any other.
    """
    ours = next((row for row in table if row["model"] == OURS), None)
    if ours is None:
        return {}
    own = _number(ours.get(metric))
    others = {row["model"]: _number(row.get(metric)) for row in table if row is not ours}
    return {name: (own, other) for name, other in others.items() if own > other}


def of_table(table: Sequence[Mapping[str, Any]], metric: str, tested_on: str) -> list[str]:
    """A warning if the run ends worse than another model of the table, see `worse_than`."""
    if not (worse := worse_than(table, metric)):
        return []
    own = next(iter(worse.values()))[0]
    others = " and ".join(f"{name} ({number(other)})" for name, (_, other) in worse.items())
    return [f"The run ends worse than {others}: {metric} {number(own)} on {tested_on}."]


def of_rounds(records: Sequence[Mapping[str, Any]], evaluated_on: str) -> list[str]:
    """Warnings of a loss that rose, of a chosen round, and of updates of noise that teach little.

    Noise that is longer than the clip norm does not prevent learning, because it points nowhere in
    particular: it is mentioned only where the loss did not fall by 5 %, or rose by as much after
    its best. `records` are the lines of `metrics.jsonl` up to the round whose model is the result.
    """
    warnings = []
    scored = [(record["round"], record.get("evaluation") or {}) for record in records]
    losses = [(round, _number(scores["loss"])) for round, scores in scored if "loss" in scores]
    if len(losses) > 1 and losses[-1][1] > losses[0][1]:
        (first, before), (last, after) = losses[0], losses[-1]
        warnings.append(
            f"The loss on {evaluated_on} rose from {number(before)} at round {first} to "
            f"{number(after)} at round {last}: try a lower learning rate, or a smaller clip norm."
        )
    if losses and records[-1].get("kept"):
        kept = f"Round {losses[-1][0]} was kept for its results"
        warnings.append(f"{kept}: scores on {evaluated_on} flatter it.")
    values = [loss for _, loss in losses]
    learned = bool(values) and values[-1] < min(0.95 * values[0], 1.05 * min(values))
    # A mean of clipped updates is no longer than the clip norm, so what exceeds it is noise.
    clipped = [r for r in records if "update_norm" in r and r.get("clip_norm")]
    long = sum(_number(record["update_norm"]) > record["clip_norm"] for record in clipped)
    if long * 2 > len(clipped) and not learned:
        rounds = f"In {long} of {len(clipped)} rounds"
        warnings.append(
            f"{rounds} the noisy mean update is longer than the clip norm, which the mean of "
            "clipped updates never is: it is mostly noise. More clients per round, fewer "
            "parameters or a larger epsilon help."
        )
    return warnings


def of_points(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings of the points of a sweep, by their `result.json`, that end worse than a baseline."""
    counts = Counter()
    for result in results:
        metric = "perplexity" if result.get("language") else "loss"
        # The metric is named, because the sweep's own table may be of another, and say otherwise.
        worse = worse_than(result.get("table") or (), metric)
        counts.update(f"{len(results)} points end worse than {name} in {metric}." for name in worse)
    shown = {len(results): "All"}
    return [f"{shown.get(number, number)} of {text}" for text, number in counts.items()]


def _number(value: Any) -> float:
    """A score; NaN, and None, which JSON has for numbers that are not finite, are the worst."""
    return math.inf if value is None or math.isnan(value) else float(value)


def number(value: float | None) -> str:
    """Four digits; "not finite" for NaN, infinities, and None, which stands for them in JSON."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share as a percentage; "" for a share of nothing."""
    return "" if share is None else f"{100 * share:.2f} %"


def score(metric: str, value: float | None) -> str:
    """The value of a metric: an accuracy as a percentage, any other as a number."""
    return percent(value) if metric == "accuracy" else number(value)


def in_words(text: str) -> str:
    """The text, with the number of packages where a source of docstrings lists more than three."""
    listed = r"\bdocstrings:(\w+(?:,\w+){3,})"
    return re.sub(listed, lambda m: f"docstrings of {m[1].count(',') + 1} packages", text)


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation of a sample.

    Without a mean where a value is not finite, or None, as JSON has it; without a deviation where
    there are fewer than two values.
    """
    sample = [value for value in values if value is not None and math.isfinite(value)]
    if not sample or len(sample) < len(values):
        return None, None
    return statistics.fmean(sample), statistics.stdev(sample) if len(sample) > 1 else None
