"""The `report.html` of a sweep: a figure, the table, the cost of a round, texts side by side."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.numbers import duration, number
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, text_lines, write_page
from jaxpfl.experiments.sweep.config import CASE, SEED, Sweep
from jaxpfl.experiments.sweep.figures import (
    NOT_PRIVATE,
    Rows,
    figure_of,
    joined,
    label,
    short,
    stamped,
)

_TEXTS = 7
_CHARACTERS = 320
_COLUMNS = 4
Durations = Sequence[tuple[float | None, float | None]]
"""For each row the seconds of a run and the clients a second, as `SweepOutcome` has them."""


def write_sweep_page(directory: Path, sweep: Sweep, record: dict[str, Any]) -> Path:
    """Draws the figure and writes the page; returns the page's path.

    Args:
      record: the content of `sweep.json`.
    """
    rows, points = record["rows"], record["points"]
    finished = [point for point in points if point["state"] == "finished"]
    shown = [*finished, *record["baselines"]]
    marks = joined(each["mark"] for each in shown)
    figure = figure_of(sweep, rows, finished)
    measured = measured_on(sweep.metric, [point["scored_on"] for point in finished])
    repeated = any(row["points"] > 1 for row in rows)
    counted = f"{len(finished)} of {len(points)}" if len(finished) < len(points) else len(points)
    spread = "Error bars: the standard deviation over the runs." if repeated else ""
    page = Page(
        title=f"Sweep: {sweep.title}",
        lead=f"{measured} at {counted} points" + (", repeated over seeds" if repeated else ""),
        stamp=f"Some results are {marks}; the tables state which" if marks else "",
        privacy=record["note"],
        privacy_notes=[record["note"]] if marks else [],
        facts=[(str(len(points)), "points")],
        cautions=record["cautions"],
        sections=[
            *([Section("Figure", spread, [("sweep", "", figure)], wide=True)] if figure else []),
            Section("Table", f"{measured}. {_gap_text(sweep)}", table=_table(sweep, rows)),
            *_baselines(sweep, record["baselines"]),
            *_costs(sweep, finished),
            *_texts(sweep, finished),
            _points(sweep, points),
        ],
    )
    return write_page(directory, page)


def _points(sweep: Sweep, points: Rows) -> Section:
    """Every point with its statement, and what became of those that did not finish."""
    cells = [
        (
            point["point"],
            _score(point["value"], ".5g"),
            point["scored_on"],
            str(point["privacy"] or NOT_PRIVATE),
        )
        if point["state"] == "finished"
        else (
            Cell(point["point"], stamps=[point["state"].upper()]),
            "",
            "",
            point.get("error", "not finished yet"),
        )
        for point in points
    ]
    text = "Each point has a ledger of its own."
    if any(point["state"] != "finished" for point in points):
        text += " What a point charged before it failed or stopped stays on it."
    columns = ("point", sweep.metric, "scored on", "privacy of this point alone")
    return Section("Points", text, table=Table(columns, cells, (1,)))


def table_lines(sweep: Sweep, rows: Rows, durations: Durations | None = None) -> list[str]:
    """The table as text; on a terminal with durations, which no file of a sweep has."""
    return text_lines(_table(sweep, rows, durations))


def baseline_lines(sweep: Sweep, found: Rows) -> list[str]:
    """The models that the runs are compared with as text, each with its data."""
    return [
        f"{row[0]}: mean {sweep.metric} {row[1]} on {row[3]}"
        for section in _baselines(sweep, found)
        if section.table is not None
        for row in section.table.rows
    ]


def measured_on(metric: str, scored_on: Sequence[str]) -> str:
    """The metric, and the data sets that it was measured on."""
    names = [name for name in dict.fromkeys(scored_on) if name]
    if len(names) > 3:
        names = [*names[:3], f"{len(names) - 3} more, see the points"]
    return f"{metric} on {' and on '.join(names)}" if names else metric


def _table(sweep: Sweep, rows: Rows, durations: Durations | None = None) -> Table:
    names = sweep.varied or sweep.fields
    columns = [(short(name), [str(row[name]) for row in rows]) for name in names]
    # Nothing where no run is finished.
    means = [_score(row["mean"], ".5g") if row["runs"] else "" for row in rows]
    columns.append((sweep.metric, means))
    if any(row["deviation"] is not None for row in rows):
        found = [row["deviation"] for row in rows]
        deviations = ["" if each is None else f"{each:.2g}" for each in found]
        columns.append(("standard deviation", deviations))
    if any(row["points"] > 1 or row["runs"] == 0 for row in rows):
        columns.append(("runs", [_runs(row) for row in rows]))
    if sweep.gap:
        columns.append(("gap closed", [_gap_cell(sweep, row) for row in rows]))
    for place, title, form in ((0, "time", duration), (1, "clients/s", _speed)):
        found = [each[place] for each in durations or ()]
        if any(each is not None for each in found):
            columns.append((title, ["" if each is None else form(each) for each in found]))
    numbers = tuple(range(len(names), len(columns)))
    if any(row["mark"] for row in rows):
        columns.append(("privacy", [row["mark"] for row in rows]))
    titles, cells = zip(*columns, strict=True)
    return Table(titles, list(zip(*cells, strict=True)), numbers)


def _score(value: float | None, form: str) -> str:
    """The metric of runs that are finished, which may not be finite."""
    return number(None) if value is None else format(value, form)


def _speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def _runs(row: Mapping[str, Any]) -> str:
    """The number of finished runs, and of all where some are missing."""
    runs, points = row["runs"], row["points"]
    return str(runs) if runs == points else f"{runs} of {points}"


def _gap_cell(sweep: Sweep, row: Mapping[str, Any]) -> str:
    """The gap closed and its standard deviation, except for the two cases that define the gap."""
    if row["gap"] is None:
        return ""
    if row[CASE] in (sweep.gap or ()):
        return f"{row['gap']:.0f} %"
    error = "" if row["gap_deviation"] is None else f" ± {row['gap_deviation']:.1f}"
    return f"{row['gap']:.1f}{error} %"


def _gap_text(sweep: Sweep) -> str:
    """What the gap is, and where there is none."""
    if sweep.gap is None:
        return ""
    start, end = sweep.gap
    return (
        f"Gap closed: how far {sweep.metric} comes from that of “{start}” (0 %) to that of "
        f"“{end}” (100 %), seed by seed; mean and standard deviation. It is not shown where both "
        f"cases have the same {sweep.metric}, or a run is missing or not finite."
    )


def _baselines(sweep: Sweep, found: Rows) -> list[Section]:
    """The models that every run is compared with, and the runs on the same data."""
    if not found:
        return []
    rows = [
        (
            stamped("the points' runs" if row["model"] == OURS else row["model"], row["mark"]),
            _score(row["value"], ".5g"),
            str(row["points"]),
            row["scored_on"],
        )
        for row in found
    ]
    columns = ("model", f"mean {sweep.metric} over points", "points", "scored on")
    text = "Means over the points that have such a model, all scored at their ends."
    return [Section("Compared with", text, table=Table(columns, rows, (1, 2)))]


def _costs(sweep: Sweep, points: Rows) -> list[Section]:
    """What a client receives and sends, by combination of values."""
    costs = {label(sweep.varied, point): point["cost"] for point in points if "cost" in point}
    rows = [(name, f"{cost['down']:,}", f"{cost['up']:,}") for name, cost in costs.items()]
    columns = ("run", "floats to a client", "floats from a client")
    text = "What one client receives and sends in one round, in floats."
    return [Section("Cost of a round", text, table=Table(columns, rows, (1, 2)))] if rows else []


def _texts(sweep: Sweep, points: Rows) -> list[Section]:
    """The first texts of each combination's first repetition, in tables of a readable width."""
    columns: dict[str, list[str]] = {}
    for point in points:
        name = stamped(label(sweep.varied, point), point["mark"])
        if point.get("texts") and name not in columns:
            columns[name] = [_cut(text) for text in point["texts"][:_TEXTS]]
    at = f", at the first {short(SEED)}" if points and SEED in points[0] else ""
    title, text = "Synthetic texts, side by side", f"The first texts of each corpus{at}."
    sections, names = [], tuple(columns)
    for start in range(0, len(names), _COLUMNS):
        part = names[start : start + _COLUMNS]
        rows = list(zip_longest(*(columns[name] for name in part), fillvalue=""))
        sections.append(Section(title, text, table=Table(part, rows)))
        title = text = ""
    return sections


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
