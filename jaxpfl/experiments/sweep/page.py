"""The `report.html` of a sweep: a figure, the table, the cost of a round, texts side by side."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.numbers import duration, number
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, text_lines, write_page
from jaxpfl.experiments.sweep.config import CASE, Sweep
from jaxpfl.experiments.sweep.figures import figure_of, label, short, stamped
from jaxpfl.experiments.sweep.summary import NOT_PRIVATE, joined

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
        lead=f"{measured} at {counted} points"
        + (f", repeated over {sweep.over}" if repeated else ""),
        stamp=f"Some results are {marks}; the tables state which" if marks else "",
        privacy=record["note"],
        privacy_notes=[record["note"]] if marks else [],
        facts=_facts(sweep, rows, measured),
        cautions=record["cautions"],
        sections=[
            *([Section("Figure", spread, [("sweep", "", figure)], wide=True)] if figure else []),
            Section("Table", f"{measured}. {_gap_text(sweep, rows)}", table=_table(sweep, rows)),
            *_baselines(sweep, record["baselines"]),
            *_costs(sweep, finished),
            *_texts(sweep, finished),
            _points(sweep, points),
        ],
    )
    return write_page(directory, page)


def _points(sweep: Sweep, points: Sequence[Mapping[str, Any]]) -> Section:
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


def table_lines(
    sweep: Sweep, rows: list[dict[str, Any]], durations: Durations | None = None
) -> list[str]:
    """The table as text; on a terminal with durations, which no file of a sweep has."""
    return text_lines(_table(sweep, rows, durations))


def baseline_lines(sweep: Sweep, found: Sequence[Mapping[str, Any]]) -> list[str]:
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


def _table(sweep: Sweep, rows: list[dict[str, Any]], durations: Durations | None = None) -> Table:
    names = sweep.varied or tuple(n for n in sweep.points[0].values if n != sweep.over)
    columns = [(short(name), [str(row[name]) for row in rows]) for name in names]
    columns.append((sweep.metric, [_mean(row, ".5g") for row in rows]))
    if any(row["deviation"] is not None for row in rows):
        found = [row["deviation"] for row in rows]
        deviations = ["" if each is None else f"{each:.2g}" for each in found]
        columns.append(("standard deviation", deviations))
    if any(row["points"] > 1 or row["runs"] == 0 for row in rows):
        columns.append(("runs", [_runs(row) for row in rows]))
    if sweep.gap:
        columns.append(("gap closed", [_gap_cell(sweep, row) for row in rows]))
    for place, title in enumerate(("time", "clients/s") if durations else ()):
        found = [pair[place] for pair in durations or ()]
        if any(each is not None for each in found):
            form = duration if place == 0 else _speed
            columns.append((title, ["" if each is None else form(each) for each in found]))
    numbers = tuple(range(len(names), len(columns)))
    if any(row["mark"] for row in rows):
        columns.append(("privacy", [row["mark"] for row in rows]))
    titles, cells = zip(*columns, strict=True)
    return Table(titles, list(zip(*cells, strict=True)), numbers)


def _mean(row: Mapping[str, Any], form: str) -> str:
    """The mean of a row's runs, and nothing where none is finished."""
    return _score(row["mean"], form) if row["runs"] else ""


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


def _facts(sweep: Sweep, rows: list[dict[str, Any]], measured: str) -> list[tuple[str, str]]:
    """The number of points, and the ends of the gap where all points have the same one."""
    facts = [(str(len(sweep.points)), "points")]
    ends = sweep.gap or ()
    found = [row for end in ends for row in rows if row[CASE] == end and row["runs"]]
    where = measured.removeprefix(sweep.metric)
    if len(found) == 2:
        facts += [
            (
                _mean(row, ".4g"),
                f"{sweep.metric} of {stamped(row[CASE], row['mark'])}{where}",
            )
            for row in found
        ]
    return facts


def _gap_text(sweep: Sweep, rows: list[dict[str, Any]]) -> str:
    """What the gap is, and at which values there is none."""
    if sweep.gap is None:
        return ""
    (start, end), over = sweep.gap, short(sweep.over)
    repeated = any(row["deviation"] is not None for row in rows)
    each = f", {over} by {over}; mean and standard deviation" if repeated else ""
    text = (
        f"Gap closed: how far {sweep.metric} comes from that of “{start}” (0 %) to that of "
        f"“{end}” (100 %){each}."
    )
    others = [name for name in sweep.varied if name != CASE]
    without = [row for row in rows if row["gap"] is None and row["runs"] and row[CASE] == start]
    some = f" at some {over}" if repeated else ""
    reasons: dict[str, list[str]] = {}
    for row in without:
        place = label(others, row)
        ends = [each for each in rows if each[CASE] in sweep.gap and label(others, each) == place]
        whole = all(each["runs"] == each["points"] and each["mean"] is not None for each in ends)
        same = f"both cases have the same {sweep.metric}{some}"
        missing = f"a run of one of the two has no {sweep.metric} that is finite"
        reasons.setdefault(same if whole else missing, []).append(place)
    for reason, places in reasons.items():
        text += f" It is not shown{' at ' + '; '.join(places) if others else ''}: {reason}."
    return text


def _baselines(sweep: Sweep, found: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The models that every run is compared with, beside the runs on the same data."""
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


def _costs(sweep: Sweep, points: list[dict[str, Any]]) -> list[Section]:
    """What a client receives and sends, by case where all points of a case agree."""
    points = [point for point in points if "cost" in point]
    found: dict[str, list[dict[str, Any]]] = {}
    for names in ((CASE,) if CASE in sweep.points[0].values else (), sweep.varied):
        found = {}
        for point in points:
            found.setdefault(label(names, point), []).append(point["cost"])
        if all(cost == costs[0] for costs in found.values() for cost in costs):
            break
    if not found:
        return []
    rows = [(name, f"{cost['down']:,}", f"{cost['up']:,}") for name, (cost, *_) in found.items()]
    columns = (CASE, "floats to a client", "floats from a client")
    text = "What one client receives and sends in one round, in floats."
    return [Section("Cost of a round", text, table=Table(columns, rows, (1, 2)))]


def _texts(sweep: Sweep, points: list[dict[str, Any]]) -> list[Section]:
    """The first texts of each combination's first repetition, in tables of a readable width."""
    names = sweep.varied
    firsts: dict[str, dict[str, Any]] = {}
    for point in points:
        firsts.setdefault(label(names, point), point)
    columns = {
        stamped(name, point["mark"]): [
            text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
            for text in point["texts"][:_TEXTS]
        ]
        for name, point in firsts.items()
        if point.get("texts")
    }
    if not columns:
        return []
    at = f", at the first {short(sweep.over)}" if sweep.over in points[0] else ""
    heading = "Synthetic texts, side by side", f"The first texts of each corpus{at}."
    sections, tables = [], -(-len(columns) // _COLUMNS)
    # Tables of nearly equal widths, so that the last one does not have a single column.
    bounds = [index * len(columns) // tables for index in range(tables + 1)]
    for start, end in pairwise(bounds):
        part = tuple(columns)[start:end]
        rows = list(zip_longest(*(columns[name] for name in part), fillvalue=""))
        title, text = heading if start == 0 else ("", "")
        sections.append(Section(title, text, table=Table(part, rows)))
    return sections
