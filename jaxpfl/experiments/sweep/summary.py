"""What the results of a sweep's points come to: values, means, the gap closed, and baselines."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.experiments.records.cautions import OURS, WITHOUT_PRIVACY
from jaxpfl.experiments.sweep.config import CASE, Point, Sweep
from jaxpfl.privacy.simulated import SIMULATED

NOT_PRIVATE = "NOT PRIVATE"


def value_of(result: Mapping[str, Any], metric: str) -> float | None:
    """The value of a metric in a point's "metrics", which include those of an evaluation.

    None where the value is not finite, as after training that diverged; JSON has null for it.

    Raises:
      InputError: there is no such metric; the message lists those that exist.
    """
    known: dict[str, float | None] = {}

    def add(mapping: Mapping[str, Any]) -> None:
        for name, value in mapping.items():
            if isinstance(value, Mapping):
                add(value)
            elif value is None:
                known[name] = None
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                known[name] = float(value) if math.isfinite(value) else None

    add(result.get("metrics", {}))
    if metric not in known:
        raise InputError(
            f"metric must be a number in the points' results, one of {', '.join(sorted(known))}, "
            f"found {metric!r}"
        )
    return known[metric]


def scored_on(result: Mapping[str, Any], metric: str) -> str:
    """Names the data that a point's metric was measured on; "" where it is none of data."""
    if metric in ("epsilon", "round", "clip_norm", "update_norm"):
        return ""
    if metric in (result["metrics"].get("evaluation") or {}):
        return result.get("evaluated_on") or ""
    return result.get("tested_on") or ""


def mark_of(result: Mapping[str, Any]) -> str:
    """What stands beside a point's numbers; "" where it states that it is private."""
    stamp = result.get("stamp") or ""
    if stamp.startswith(SIMULATED):
        return SIMULATED
    return NOT_PRIVATE if stamp or not result.get("private", False) else ""


def compared_with(
    result: Mapping[str, Any], simulation: Mapping[str, Any] | None, metric: str
) -> list[dict[str, Any]]:
    """What a point is compared with: "model", "value", "scored_on", "private" and "mark".

    The value is that of the metric, None where that is not finite. These are the rows of its
    result's table, such as the untrained model and word frequencies, with the run's own score on
    the same data; and the same run without privacy, where it was carried out. Empty where no row
    has the metric.

    Args:
      simulation: the content of the point's `simulation.json`, if there is one.
    """
    rows = [
        (row["model"], row, result.get("tested_on"), mark_of(result) * (row["model"] == OURS))
        for row in result.get("table") or ()
    ]
    rows += [
        (WITHOUT_PRIVACY, row, (simulation or {}).get("tested_on"), NOT_PRIVATE)
        for row in (simulation or {}).get("table") or ()
        if row["model"] == WITHOUT_PRIVACY
    ]
    return [
        {
            "model": model,
            "value": None if row[metric] is None else float(row[metric]),
            "scored_on": str(tested_on or ""),
            "private": not mark,
            "mark": mark,
        }
        for model, row, tested_on, mark in rows
        if metric in row
    ]


def baselines(points: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows that `compared_with` found of each point, as means over the points that have them.

    Adds "points", the number of these. The runs' own rows are there too, as "this run": their
    scores on the same data, which need not be the data of the sweep's metric.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for rows in points:
        for row in rows:
            found.setdefault((row["model"], row["scored_on"]), []).append(row)
    return [
        {
            "model": model,
            "scored_on": name,
            "value": _mean_and_deviation([row["value"] for row in rows])[0],
            "private": all(row["private"] for row in rows),
            "mark": joined(row["mark"] for row in rows),
            "points": len(rows),
        }
        for (model, name), rows in found.items()
    ]


def summary(
    sweep: Sweep, values: Sequence[float | None], marks: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of `SweepOutcome`: one for each combination of values, over its repetitions.

    Args:
      values: the metric of each point; None for a point that did not finish, and NaN where the
        metric is not finite. Of such a row there is no mean: that of the other runs would hide it.
      marks: of each point, see `mark_of`; of those that did not finish it does not count.
    """
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for index, point in enumerate(sweep.points):
        kept = {name: each for name, each in point.values.items() if name != sweep.over}
        groups.setdefault(repr(kept), (kept, []))[1].append(index)
    closed = gap_closed(sweep, values) if sweep.gap is not None else None
    rows = []
    for kept, found in groups.values():
        done = [index for index in found if values[index] is not None]
        mean, deviation = _mean_and_deviation([values[index] for index in done])
        row = {**kept, "mean": mean, "deviation": deviation, "runs": len(done)}
        row["points"] = len(found)
        if closed is not None:
            gaps = [gap for index in found if (gap := closed[index]) is not None]
            whole = len(gaps) == len(found)
            row["gap"], row["gap_deviation"] = _mean_and_deviation(gaps if whole else [])
        mark = joined(marks[index] for index in done)
        rows.append({**row, "private": not mark, "mark": mark})
    return rows


def joined(marks: Iterable[str]) -> str:
    """All marks of several points, each once."""
    return " and ".join(dict.fromkeys(mark for mark in marks if mark))


def gap_closed(sweep: Sweep, values: Sequence[float | None]) -> list[float | None]:
    """How much of the gap each point closes, in per cent: `from` closes 0 and `to` closes 100.

    None where one of the three runs did not finish, both cases have the same metric at the point's
    other values, or a value is not finite.
    """
    assert sweep.gap is not None

    def others(point: Point) -> str:
        return repr({name: each for name, each in point.values.items() if name != CASE})

    ends: dict[str, dict[str, float]] = {}
    for point, value in zip(sweep.points, values, strict=True):
        known = math.nan if value is None else value
        ends.setdefault(others(point), {})[point.values[CASE]] = known
    closed: list[float | None] = []
    for point in sweep.points:
        known = ends[others(point)]
        start, end = (known[case] for case in sweep.gap)
        width = end - start
        found = 100 * ((known[point.values[CASE]] - start) / width) if width else math.nan
        closed.append(found if math.isfinite(found) else None)
    return closed


def _mean_and_deviation(found: Sequence[Any]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation of a sample.

    None where there are too few values, or one of them is None or not finite.
    """
    if not found or not all(value is not None and math.isfinite(value) for value in found):
        return None, None
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return mean, math.sqrt(variance)
