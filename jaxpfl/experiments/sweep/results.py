"""Compares the points of a sweep that are there: values, means, and the way between two cases.

sweep.json             every point, and every combination of values over its repetitions
table.csv              the latter
report.html, plots/
private/costs.csv      a row for each finished point; times depend on what sampled clients hold
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import mean_and_deviation, of_points
from jaxpfl.experiments.report.page import joined
from jaxpfl.experiments.sweep.config import CASE, OF, SEED, Point, Sweep
from jaxpfl.experiments.sweep.directory import LOCK, PointFolder, PointState
from jaxpfl.experiments.sweep.page import NOT_PRIVATE, write_sweep_page
from jaxpfl.privacy import accounting, events
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Charge, Ledger

SIMULATION = (
    "SIMULATION: every point spent its own epsilon on the same clients, on a ledger of its own. "
    "What is published of several points costs the sum of them."
)
_BYTES = 4  # of a coordinate, float32
REPEATED = " So does a mean over repetitions: each of them is a point that spent its own epsilon."


@dataclass(frozen=True)
class SweepOutcome:
    """The result of a sweep in the directory `out`; `record` is the content of `sweep.json`.

    It has a row of `rows` for each combination of values, see `summary`, the points whose last
    attempt `failed`, and why, and those that are `unfinished`: neither finished nor failed.
    """

    out: Path
    record: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.record["rows"]

    @property
    def failed(self) -> dict[str, str]:
        return {p["point"]: p["error"] for p in self.record["points"] if p["state"] == "failed"}

    @property
    def unfinished(self) -> list[str]:
        return [p["point"] for p in self.record["points"] if p["state"] == "unfinished"]


def collect(sweep: Sweep, out: Path) -> SweepOutcome:
    """Writes the table and the page of the points that are finished, and returns the outcome."""
    with files.lock(out / LOCK, wait=True):
        folders = [PointFolder.of(point, out) for point in sweep.points]
        states = [folder.state() for folder in folders]
        points, costs = [], []
        for point, folder, state in zip(sweep.points, folders, states, strict=True):
            points.append(point_of(point, state, sweep.metric))
            if state.state == "finished":
                public = planned_cost(folder.path)
                points[-1] |= public
                costs.append({"point": point.name, **public, **time_taken(folder.path)})
        if costs:
            private = files.private_directory(out / "private")
            _write_csv(private / "costs.csv", costs, mode=0o600)
        rows, shared = rows_of(sweep, points), spent_on(sweep)
        note = SIMULATION + (REPEATED if any(row["points"] > 1 for row in rows) else "")
        if shared:
            note = f"All releases on the ledger together cost {shared[-1]['statement']}"
        cautions = of_points([state.result for state in states if state.result is not None])
        record = {"note": note, "ledger": shared, "metric": sweep.metric, "rows": rows}
        record |= {"points": points, "cautions": cautions}
        if sweep.gap:
            start, end = sweep.gap
            # The rows of each case have the other values in the same order.
            means = ([row["mean"] for row in rows if row[CASE] == case] for case in sweep.gap)
            pairs = [pair for pair in zip(*means, strict=True) if None not in pair]
            sign = 1 if higher_is_better(sweep.metric) else -1
            if not all(sign * (last - first) > 0 for first, last in pairs):
                without = f"{end} is not ahead of {start} in {sweep.metric}"
                cautions.append(f"{without}: the way between them means nothing.")
            gaps = [(row[CASE], row["gap"]) for row in rows if row["gap"] is not None]
            if behind := ", ".join(dict.fromkeys(case for case, gap in gaps if gap < 0)):
                cautions.append(f"Behind {start} in {sweep.metric}: {behind}.")
            if ahead := ", ".join(dict.fromkeys(case for case, gap in gaps if gap > 100)):
                where = f"Ahead of {end} in {sweep.metric}"
                cautions.append(f"{where}: {ahead}. {end} is no ceiling.")
        files.write_json(out / "sweep.json", record)
        _write_csv(out / "table.csv", rows)
        write_sweep_page(out, sweep, record)
        files.without_times(out)
    return SweepOutcome(out, record)


def _write_csv(path: Path, rows: Sequence[dict[str, Any]], *, mode: int = 0o644) -> None:
    """Writes rows of the same names as a table, whole or not at all."""
    writer = csv.DictWriter(buffer := io.StringIO(), list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_atomically(path, buffer.getvalue(), mode=mode)


def point_of(point: Point, state: PointState, metric: str) -> dict[str, Any]:
    """What a table says of a point: its values, its state and, if it is finished, its score."""
    about: dict[str, Any] = {"point": point.name, **point.values, "state": state.state}
    if state.result is None:
        return {**about, "error": state.error} if state.error else about
    result, value = state.result, value_of(state.result, metric)
    # The mark stands beside its numbers; "" where the result states that it is private.
    mark = mark_of(result.get("stamp") or ("" if result.get("private") else NOT_PRIVATE))
    # The data that the metric was measured on; "" where it is none of data.
    scored_on = ""
    if metric not in ("epsilon", "round", "clip_norm", "update_norm", "fred", "fred_corrected"):
        evaluated = metric in (result["metrics"].get("evaluation") or {})
        scored_on = result.get("evaluated_on" if evaluated else "tested_on") or ""
    privacy = {"private": not mark, "mark": mark, "privacy": result.get("privacy")}
    return {**about, "value": value, "scored_on": scored_on, **privacy}


def value_of(result: Mapping[str, Any], metric: str) -> float | dict[str, float | None] | None:
    """The value of a metric in a point's "metrics", which include those of an evaluation.

    None where the value is not finite, as after training that diverged; JSON has null for it. Of
    several corpora or models it has several, by name.
    """
    metrics = result.get("metrics", {})
    scores = {**metrics, **(metrics.get("evaluation") or {}), "evaluation": ""}
    kinds = (int, float, dict, type(None))
    values = {name: _finite(value) for name, value in scores.items() if type(value) in kinds}
    if metric not in values:
        numbers = f"a number in the points' results, one of {', '.join(sorted(values))}"
        raise InputError(f"metric must be {numbers}, found {metric!r}")
    return values[metric]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {of: _finite(one) for of, one in value.items()}
    return None if value is None or not math.isfinite(value) else float(value)


def rows_of(sweep: Sweep, points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The `summary`; of a metric with several values, one for each, with the entry `OF`."""
    values = [point["value"] for point in points if isinstance(point.get("value"), dict)]
    if not values:
        return summary(sweep, points)
    rows = []
    for name in dict.fromkeys(name for value in values for name in value):
        own = []
        for point in points:
            value = point.get("value")
            one = value.get(name) if isinstance(value, dict) else None
            own.append({**point, "value": one} if "value" in point else point)
        # 99% and 0.01 are numbers, on an axis.
        digits = name.removesuffix("%")
        of = json.loads(digits) if re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", digits) else name
        rows += [{OF: of, **row} for row in summary(sweep, own)]
    return rows


def spent_on(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for each run on the ledger of all points, and last for all together.

    A row has an epsilon by each accountant that supports the releases, and the "statement".
    """
    if sweep.ledger is None or not sweep.ledger.exists():
        return []
    ledger, rows, runs = Ledger.read(sweep.ledger), [], dict[str, list[Charge]]()
    delta = next((p.config.privacy.delta for p in sweep.points if p.config.privacy.private), 1e-6)
    for charge in ledger.charges:
        runs.setdefault(charge.run, []).append(charge)
    named = [(charges[0].label.split()[0], charges) for charges in runs.values()]
    for name, charges in [*named, ("together", ledger.charges)]:
        terms = [charge.event for charge in charges], delta, ledger.unit
        whole = Guarantee.of_events(*terms)
        by = accounting.supporting(events.counts(whole.event))
        costs = {f"epsilon by {a.upper()}": Guarantee.of_events(*terms, a).epsilon() for a in by}
        row = {"releases of": name, "releases": len(charges), **costs}
        rows.append({**row, "statement": whole.statement()})
    return rows


def summary(sweep: Sweep, points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each combination of values, over its repetitions.

    A row has the values, "mean", "deviation" (the sample's standard deviation; None for a single
    run), "least", "largest", "runs", the finished ones of its "points", "private" and "mark", and
    in a sweep with a gap "gap" and "gap_deviation" in per cent, None where there is none. If the
    "value" of a finished point is not finite, there is no mean: that of the others would hide it.
    """
    closed = gap_closed(sweep, [point.get("value") for point in points]) if sweep.gap else None
    rows = []
    for group in _repetitions(sweep, SEED):
        done = [points[index] for index in group if "value" in points[index]]
        values = [point["value"] for point in done]
        mean, deviation = mean_and_deviation(values)
        row = {name: sweep.points[group[0]].values[name] for name in sweep.fields}
        row |= {"mean": mean, "deviation": deviation, "runs": len(done), "points": len(group)}
        row["least"], row["largest"] = (None,) * 2 if mean is None else (min(values), max(values))
        if closed is not None:
            row["gap"], row["gap_deviation"] = mean_and_deviation([closed[i] for i in group])
        mark = joined(point["mark"] for point in done)
        rows.append({**row, "private": not mark, "mark": mark})
    return rows


def _repetitions(sweep: Sweep, field: str) -> list[list[int]]:
    """The numbers of the points that differ in this field alone, group by group."""
    groups: dict[str, list[int]] = {}
    for index, point in enumerate(sweep.points):
        others = {name: value for name, value in point.values.items() if name != field}
        groups.setdefault(repr(others), []).append(index)
    return list(groups.values())


def higher_is_better(metric: str) -> bool:
    """Of accuracies and a classifier's score; of other metrics lower is better."""
    return "accuracy" in metric or metric in ("classifier_score", "average_precision")


def gap_closed(sweep: Sweep, values: Sequence[float | None]) -> list[float | None]:
    """How far each point is on the way between two cases, in per cent: `from` 0, `to` 100.

    All other values, including the seed, are equal. POPri's gap (Hou et al. 2025, Table 1) has
    central training without privacy as `to`; with another one it is another quantity. None where
    one of the three runs has no value that is finite, or both cases have the same.
    """
    assert sweep.gap is not None
    closed: list[float | None] = [None] * len(values)
    for group in _repetitions(sweep, CASE):
        by_case = {sweep.points[index].values[CASE]: values[index] for index in group}
        start, end = (by_case[case] for case in sweep.gap)
        for index in group:
            value = values[index]
            if value is not None and start is not None and end is not None and start != end:
                closed[index] = 100 * ((value - start) / (end - start))
    return closed


def planned_cost(folder: Path) -> dict[str, float | None]:
    """What a point's plans, and so its config, say of its clients' releases; public.

    "uploads" are the bytes that the planned clients of all rounds send; "noise_multiplier" is of
    the query to which they send most. None where plans are for examples, or nothing was released.
    """
    sent: list[tuple[int, float]] = []
    for run, rounds in _runs(folder):
        coordinates = {line["query"]: line["coordinates"] for line in rounds}
        for query in run["queries"]:
            plan = query["plan"]
            if query["label"] in coordinates and plan["unit"] == "client":
                clients = plan["clients_per_round"] * plan["rounds"]
                size = _BYTES * clients * coordinates[query["label"]]
                sent.append((size, plan["noise_multiplier"]))
    if not sent:
        return {"noise_multiplier": None, "uploads": None}
    return {"noise_multiplier": max(sent)[1], "uploads": sum(size for size, _ in sent)}


def time_taken(folder: Path) -> dict[str, float | None]:
    """What a point's releases took; PRIVATE.

    "seconds" are from a run's beginning to its last release, over all runs of the point;
    "clients_a_second" is without the first release of each run, which compiles.
    """
    seconds, later, clients = 0.0, 0.0, 0
    for _, rounds in _runs(folder):
        # A run that was resumed counts from its resumption on, and compiles again.
        for before, line in zip([{"seconds": math.inf}, *rounds], rounds, strict=False):
            first = line["seconds"] < before["seconds"]
            took = line["seconds"] - (0.0 if first else before["seconds"])
            seconds += took
            later, clients = later + took * (not first), clients + line["clients"] * (not first)
    return {"seconds": seconds or None, "clients_a_second": clients / later if later else None}


def _runs(folder: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each run of a point, and its private record of releases."""
    for path in sorted(folder.rglob("private/rounds.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        yield files.read_record(path.parents[1] / "run.json"), [json.loads(line) for line in lines]
