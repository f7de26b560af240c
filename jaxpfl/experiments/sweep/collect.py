"""Compares the points of a sweep that are there: files, table, figure and page.

sweep.json   every point, and every combination of values over its repetitions
table.csv    the latter
report.html, pictures/
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records.cautions import of_points
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.experiments.sweep.directory import PointState
from jaxpfl.experiments.sweep.page import write_sweep_page
from jaxpfl.experiments.sweep.summary import (
    baselines,
    compared_with,
    mark_of,
    scored_on,
    summary,
    value_of,
)

SIMULATION = (
    "SIMULATION: every point spent its own epsilon on the same clients, on a ledger of its own. "
    "What is published of several points costs the sum of them."
)
REPEATED = " So does a mean over repetitions: each of them is a point that spent its own epsilon."


@dataclass(frozen=True)
class SweepOutcome:
    """The result of a sweep in the directory `out`.

    Attributes:
      rows: one for each combination of values, over all its repetitions: the values, "mean",
        "deviation" (the sample's standard deviation; None for a single run), "runs", the finished
        ones of its "points", and in a sweep with a gap "gap" and "gap_deviation" in per cent, which
        are None where there is no gap. The mean is None without runs, and where the metric of a run
        is not finite.
      failed: the points whose last attempt failed, and why.
      unfinished: the names of those that are neither finished nor failed.
      cautions: warnings such as that all points end worse than word frequencies.
      scored_on: the data of the metric, finished point by finished point.
      baselines: the rows of `summary.baselines`.
      note: what the points cost together.
      durations: for each row the mean seconds of its runs and the clients a second, None where they
        are not known. PRIVATE: they depend on what the clients hold, and are for the terminal.
    """

    out: Path
    rows: list[dict[str, Any]]
    failed: dict[str, str]
    unfinished: list[str]
    cautions: list[str]
    scored_on: list[str]
    baselines: list[dict[str, Any]]
    note: str
    durations: list[tuple[float | None, float | None]] = field(repr=False)


def collect(sweep: Sweep, directory: Path) -> SweepOutcome:
    """Writes the table and the page of the points that are finished, and returns the outcome.

    Raises:
      InputError: the result of a point lacks the metric.
    """
    with folders.sweep_lock(directory):
        states = [folders.state_of(directory / folders.POINTS / p.name) for p in sweep.points]
        record = _record(sweep, states)
        _write(directory, sweep, record)
    by_state: dict[str, list[str]] = {"failed": [], "unfinished": [], "finished": []}
    for point, state in zip(sweep.points, states, strict=True):
        by_state[state.state].append(point.name)
    errors = {point.name: state.error for point, state in zip(sweep.points, states, strict=True)}
    return SweepOutcome(
        directory,
        record["rows"],
        {name: errors[name] for name in by_state["failed"]},
        by_state["unfinished"],
        record["cautions"],
        [point["scored_on"] for point in record["points"] if point["state"] == "finished"],
        record["baselines"],
        record["note"],
        [_durations(sweep, row, states) for row in record["rows"]],
    )


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
    results = [state.result for state in states if state.result is not None]
    return {
        "note": SIMULATION + (REPEATED if any(row["points"] > 1 for row in rows) else ""),
        "metric": sweep.metric,
        "x": sweep.x,
        "line": sweep.line,
        **({"gap": dict(zip(("from", "to"), sweep.gap, strict=True))} if sweep.gap else {}),
        "rows": rows,
        "points": points,
        "baselines": baselines([point.get("compared_with", []) for point in points]),
        "cautions": of_points(results),
    }


def _point(point: Point, state: PointState, metric: str) -> dict[str, Any]:
    known: dict[str, Any] = {"point": point.name, **point.values, "state": state.state}
    if state.result is None:
        return {**known, "error": state.error} if state.error else known
    result = state.result
    return {
        **known,
        "value": value_of(result, metric),
        "scored_on": scored_on(result, metric),
        "private": not mark_of(result),
        "mark": mark_of(result),
        "privacy": result.get("privacy"),
        "compared_with": compared_with(result, state.simulation, metric),
        **{name: result[name] for name in ("cost", "texts") if name in result},
    }


def _durations(
    sweep: Sweep, row: Mapping[str, Any], states: list[PointState]
) -> tuple[float | None, float | None]:
    """The mean seconds of a row's finished runs, and the planned clients a second."""
    seconds, asked = [], []
    for point, state in zip(sweep.points, states, strict=True):
        same = all(row[name] == each for name, each in point.values.items() if name != sweep.over)
        if same and state.result is not None:
            seconds.append(state.seconds)
            training = getattr(point.config, "training", None)
            # A record with an empty plan is of a run in which clients send nothing.
            if training is None or state.result.get("plan", True) is None:
                asked.append(None)
            else:
                asked.append(training.rounds * training.clients_per_round)
    if not seconds or None in seconds:
        return None, None
    total = sum(seconds)
    speed = None if None in asked or not total else sum(asked) / total
    return total / len(seconds), speed


def _write(directory: Path, sweep: Sweep, record: dict[str, Any]) -> None:
    files.write_json(directory / "sweep.json", record)
    rows, buffer = record["rows"], io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_atomically(directory / "table.csv", buffer.getvalue())
    write_sweep_page(directory, sweep, record)
    files.without_times(directory)
