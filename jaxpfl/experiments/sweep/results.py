"""Compares the points of a sweep that are there: values, means, the gap closed, and baselines.

sweep.json   every point, and every combination of values over its repetitions
table.csv    the latter
report.html, pictures/
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.experiments.records.cautions import OURS, of_points
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.config import CASE, SEED, Point, Sweep
from jaxpfl.experiments.sweep.directory import PointState
from jaxpfl.experiments.sweep.figures import NOT_PRIVATE, joined
from jaxpfl.experiments.sweep.page import Durations, write_sweep_page
from jaxpfl.privacy.simulated import SIMULATED

SIMULATION = (
    "SIMULATION: every point spent its own epsilon on the same clients, on a ledger of its own. "
    "What is published of several points costs the sum of them."
)
REPEATED = " So does a mean over repetitions: each of them is a point that spent its own epsilon."


@dataclass(frozen=True)
class SweepOutcome:
    """The result of a sweep in the directory `out`.

    Attributes:
      record: the content of `sweep.json`.
      durations: for each row the mean seconds of its runs and the clients a second, None where they
        are not known. PRIVATE: they depend on what the clients hold, and are for the terminal.
    """

    out: Path
    record: dict[str, Any]
    durations: Durations = field(repr=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each combination of values, see `summary`."""
        return self.record["rows"]

    @property
    def failed(self) -> dict[str, str]:
        """The points whose last attempt failed, and why."""
        return {each["point"]: each["error"] for each in self._in_state("failed")}

    @property
    def unfinished(self) -> list[str]:
        """The names of the points that are neither finished nor failed."""
        return [each["point"] for each in self._in_state("unfinished")]

    @property
    def scored_on(self) -> list[str]:
        """The data of the metric, finished point by finished point."""
        return [each["scored_on"] for each in self._in_state("finished")]

    def _in_state(self, state: str) -> list[dict[str, Any]]:
        return [each for each in self.record["points"] if each["state"] == state]


def collect(sweep: Sweep, directory: Path) -> SweepOutcome:
    """Writes the table and the page of the points that are finished, and returns the outcome.

    Raises:
      InputError: the result of a point lacks the metric.
    """
    with folders.sweep_lock(directory):
        states = [folders.state_of(folders.of_point(directory, p)) for p in sweep.points]
        record = _record(sweep, states)
        files.write_json(directory / "sweep.json", record)
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, fieldnames=list(record["rows"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(record["rows"])
        files.write_atomically(directory / "table.csv", buffer.getvalue())
        write_sweep_page(directory, sweep, record)
        files.without_times(directory)
    groups = _repetitions(sweep).values()
    return SweepOutcome(directory, record, [_durations(sweep, group, states) for group in groups])


def _record(sweep: Sweep, states: list[PointState]) -> dict[str, Any]:
    """The content of `sweep.json`."""
    points = [
        _point(point, state, sweep.metric)
        for point, state in zip(sweep.points, states, strict=True)
    ]
    # A finished point whose metric is not finite has the value None.
    values = [
        (math.nan if point["value"] is None else point["value"]) if "value" in point else None
        for point in points
    ]
    rows = summary(sweep, values, [point.get("mark", "") for point in points])
    return {
        "note": SIMULATION + (REPEATED if any(row["points"] > 1 for row in rows) else ""),
        "metric": sweep.metric,
        "x": sweep.x,
        **({"gap": dict(zip(("from", "to"), sweep.gap, strict=True))} if sweep.gap else {}),
        "rows": rows,
        "points": points,
        "baselines": baselines([point.get("compared_with", []) for point in points]),
        "cautions": of_points([state.result for state in states if state.result is not None]),
    }


def _point(point: Point, state: PointState, metric: str) -> dict[str, Any]:
    known: dict[str, Any] = {"point": point.name, **point.values, "state": state.state}
    if state.result is None:
        return {**known, "error": state.error} if state.error else known
    result, mark = state.result, mark_of(state.result)
    return {
        **known,
        "value": value_of(result, metric),
        "scored_on": scored_on(result, metric),
        "private": not mark,
        "mark": mark,
        "privacy": result.get("privacy"),
        "compared_with": compared_with(result, metric),
        **{name: result[name] for name in ("cost", "texts") if name in result},
    }


def _durations(
    sweep: Sweep, group: Sequence[int], states: list[PointState]
) -> tuple[float | None, float | None]:
    """The mean seconds of the finished runs of a row, and the planned clients a second."""
    done = [index for index in group if states[index].result is not None]
    seconds = [states[index].seconds for index in done]
    known = [each for each in seconds if each is not None]
    if not known or len(known) < len(seconds):
        return None, None
    clients = 0
    for index in done:
        training = getattr(sweep.points[index].config, "training", None)
        result = states[index].result or {}
        # A record with an empty plan is of a run in which clients send nothing.
        if training is None or result.get("one_look") or result.get("plan", True) is None:
            return sum(known) / len(known), None
        clients += training.rounds * training.clients_per_round
    return sum(known) / len(known), clients / sum(known) if sum(known) else None


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
    evaluated = metric in (result["metrics"].get("evaluation") or {})
    return result.get("evaluated_on" if evaluated else "tested_on") or ""


def mark_of(result: Mapping[str, Any]) -> str:
    """What stands with a point's numbers; "" where it states that it is private."""
    stamp = result.get("stamp") or ""
    if stamp.startswith(SIMULATED):
        return SIMULATED
    return NOT_PRIVATE if stamp or not result.get("private", False) else ""


def compared_with(result: Mapping[str, Any], metric: str) -> list[dict[str, Any]]:
    """What a point is compared with: "model", "value", "scored_on" and "mark".

    The value is that of the metric, None where that is not finite. These are the rows of its
    result's table, such as the untrained model and word frequencies, with the run's own score on
    the same data. Empty where no row has the metric.
    """
    return [
        {
            "model": row["model"],
            "value": None if row[metric] is None else float(row[metric]),
            "scored_on": str(result.get("tested_on") or ""),
            "mark": mark_of(result) if row["model"] == OURS else "",
        }
        for row in result.get("table") or ()
        if metric in row
    ]


def baselines(points: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows that `compared_with` found of each point, as means over the points that have them.

    Adds "points", the number of these. The runs' own rows are there too, as "this run": their
    scores on the same data, which need not be the data of the sweep's metric.
    """
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in (row for rows in points for row in rows):
        found.setdefault((row["model"], row["scored_on"]), []).append(row)
    return [
        {
            "model": model,
            "scored_on": name,
            "value": _mean_and_deviation([row["value"] for row in rows])[0],
            "mark": joined(row["mark"] for row in rows),
            "points": len(rows),
        }
        for (model, name), rows in found.items()
    ]


def summary(
    sweep: Sweep, values: Sequence[float | None], marks: Sequence[str]
) -> list[dict[str, Any]]:
    """One row for each combination of values, over its repetitions.

    A row has the values, "mean", "deviation" (the sample's standard deviation; None for a single
    run), "runs", the finished ones of its "points", "private" and "mark", and in a sweep with a gap
    "gap" and "gap_deviation" in per cent, which are None where there is no gap.

    Args:
      values: the metric of each point; None for a point that did not finish, and NaN where the
        metric is not finite. Of such a row there is no mean: that of the other runs would hide it.
      marks: of each point, see `mark_of`; of those that did not finish it does not count.
    """
    closed = gap_closed(sweep, values) if sweep.gap is not None else None
    rows = []
    for found in _repetitions(sweep).values():
        done = [index for index in found if values[index] is not None]
        mean, deviation = _mean_and_deviation([values[index] for index in done])
        row = {name: sweep.points[found[0]].values[name] for name in sweep.fields}
        row |= {"mean": mean, "deviation": deviation, "runs": len(done), "points": len(found)}
        if closed is not None:
            row["gap"], row["gap_deviation"] = _mean_and_deviation([closed[i] for i in found])
        mark = joined(marks[index] for index in done)
        rows.append({**row, "private": not mark, "mark": mark})
    return rows


def _repetitions(sweep: Sweep, without: str = SEED) -> dict[str, list[int]]:
    """The numbers of the points that differ in one field alone, by all their other values."""
    found: dict[str, list[int]] = {}
    for index, point in enumerate(sweep.points):
        others = {name: each for name, each in point.values.items() if name != without}
        found.setdefault(repr(others), []).append(index)
    return found


def gap_closed(sweep: Sweep, values: Sequence[float | None]) -> list[float | None]:
    """How much of the gap each point closes, in per cent: `from` closes 0 and `to` closes 100.

    None where one of the three runs did not finish, both cases have the same metric at the point's
    other values, or a value is not finite.
    """
    assert sweep.gap is not None
    closed: list[float | None] = [None] * len(values)
    for group in _repetitions(sweep, CASE).values():
        known: dict[str, float] = {}
        for index in group:
            value = values[index]
            known[sweep.points[index].values[CASE]] = math.nan if value is None else value
        start, end = (known[case] for case in sweep.gap)
        for index in group:
            point = known[sweep.points[index].values[CASE]]
            found = 100 * ((point - start) / (end - start)) if end != start else math.nan
            closed[index] = found if math.isfinite(found) else None
    return closed


def _mean_and_deviation(found: Iterable[Any]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation of a sample.

    None where there are too few values, or one of them is None or not finite.
    """
    values = list(found)
    if not values or not all(value is not None and math.isfinite(value) for value in values):
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance)
