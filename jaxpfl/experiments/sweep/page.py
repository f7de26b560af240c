"""The `report.html` of a sweep: a figure, the table, every point; and its text."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from jaxpfl.experiments.records.cautions import number
from jaxpfl.experiments.report import page as report
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, text_lines, write_page
from jaxpfl.experiments.report.plots import COLOURS, INK, MARKERS, axes, labelled, ticks
from jaxpfl.experiments.sweep.config import OF, Sweep

NOT_PRIVATE = "NOT PRIVATE"
OUTSIDE = "-"
Rows = Sequence[Mapping[str, Any]]


def write_sweep_page(directory: Path, sweep: Sweep, record: dict[str, Any]) -> Path:
    """Draws the figure and writes the page of the content of `sweep.json`; returns its path."""
    rows, points = record["rows"], record["points"]
    finished = [point for point in points if point["state"] == "finished"]
    measured = _measured_on(sweep, points)
    repeated = any(row["points"] > 1 for row in rows)
    counted = f"{len(finished)} of {len(points)}" if len(finished) < len(points) else len(points)
    how_often = "repeated over seeds" if repeated else "one run each"
    spread = "Error bars: the standard deviation over the runs." if repeated else ""
    sections = []
    if drawn := [row for row in rows if row["runs"]]:
        panels = enumerate(_panels(sweep, drawn))
        figures = [(f"sweep-{i}" if i else "sweep", "", panel.figure) for i, panel in panels]
        sections.append(Section("Figure", spread, figures, wide=True))
    about = f"{measured}. "
    if sweep.gap is not None:
        about += (
            "{}: {} between that of “{}” (0 %) and that of “{}” (100 %), seed by seed; mean and "
            "standard deviation. It is not shown where both cases have the same {}, or a run is "
            "missing or not finite; {} is outside of both."
        ).format(_way(sweep), sweep.metric, *sweep.gap, sweep.metric, OUTSIDE)
    sections.append(Section("Table", about, table=_table(sweep, rows)))
    if record["ledger"]:
        sections.append(Section("One ledger", table=_ledger(record["ledger"])))
    page = Page(
        title=f"Sweep: {sweep.title}",
        lead=f"{measured} at {counted} points, {how_often}",
        stamp=report.some_are(point["mark"] for point in finished),
        privacy=record["note"],
        facts=[(str(len(points)), "points")],
        cautions=record["cautions"],
        sections=[*sections, _points(sweep, points)],
    )
    return write_page(directory, page)


def lines(sweep: Sweep, record: Mapping[str, Any]) -> list[str]:
    """The tables of `sweep.json` as text for a terminal, below a line that names its data."""
    table = text_lines(_table(sweep, record["rows"]))
    shared = record["ledger"] and ["", *text_lines(_ledger(record["ledger"]))]
    return [f"{_measured_on(sweep, record['points'])}:", *table, *shared]


def _measured_on(sweep: Sweep, points: Rows) -> str:
    names = [name for name in dict.fromkeys(p.get("scored_on") for p in points) if name]
    if len(names) > 3:
        names = [*names[:3], f"{len(names) - 3} more, see the points"]
    return f"{sweep.metric} on {' and on '.join(names)}" if names else sweep.metric


def _table(sweep: Sweep, rows: Rows) -> Table:
    several = any(OF in row for row in rows)
    names = (*(sweep.varied or sweep.fields), *([OF] if several else []))
    # Two columns may have one name.
    columns = [(short(name), *(str(row[name]) for row in rows)) for name in names]
    # The cell is empty where no run is finished.
    columns.append((sweep.metric, *(_score(row["mean"]) if row["runs"] else "" for row in rows)))
    deviations = ["" if (d := row["deviation"]) is None else f"{d:.2g}" for row in rows]
    if any(deviations):
        columns.append(("standard deviation", *deviations))
    if several and any(deviations):
        for end in ("least", "largest"):
            columns.append((end, *(_score(row[end]) if row["runs"] else "" for row in rows)))
    if any(row["points"] > 1 or row["runs"] == 0 for row in rows):
        columns.append(("runs", *(f"{row['runs']} of {row['points']}" for row in rows)))
    if sweep.gap:
        columns.append((_way(sweep), *map(_gap, rows)))
    numbers = tuple(range(len(names), len(columns)))
    if any(row["mark"] for row in rows):
        columns.append(("privacy", *(row["mark"] for row in rows)))
    titles, *cells = zip(*columns, strict=True)
    return Table(titles, cells, numbers)


def _ledger(rows: Rows) -> Table:
    """What each run on the sweep's ledger cost, by one accountant beside the other."""
    names = tuple(name for name in rows[0] if name != "statement")
    cells = [tuple(row[n] if n == names[0] else f"{row[n]:.4g}" for n in names) for row in rows]
    return Table(names, cells, tuple(range(1, len(names))))


def _score(value: dict[str, float | None] | float | None) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{of} {_score(one)}" for of, one in value.items())
    return number(None) if value is None else f"{value:.5g}"


def _way(sweep: Sweep) -> str:
    assert sweep.gap is not None
    return "of the way from {} to {}".format(*sweep.gap)


def _gap(row: Mapping[str, Any]) -> str:
    if row["gap"] is None:
        return ""
    if not 0 <= row["gap"] <= 100:
        return OUTSIDE
    error = f" ± {row['gap_deviation']:.1f}" if row["gap_deviation"] else ""
    return f"{row['gap']:.1f}{error} %"


def _points(sweep: Sweep, points: Rows) -> Section:
    shared, cells = sweep.ledger is not None, []
    text = "All points charge one ledger." if shared else "Each point has a ledger of its own."
    for point in points:
        name, values = point["point"], ("", "", "", "", point.get("error", "not finished yet"))
        if point["state"] == "finished":
            noise, sent = point["noise_multiplier"], point["uploads"]
            costs = f"{noise:.3g}" if noise else "", decimal(sent) if sent else ""
            privacy = point["privacy"] or NOT_PRIVATE
            values = _score(point["value"]), *costs, point["scored_on"], privacy
        else:
            name = Cell(name, stamps=[point["state"].upper()])
        cells.append((name, *values))
    if any(point["state"] != "finished" for point in points):
        text += " What a point charged before it failed or stopped stays on it."
    text += (
        " Noise multiplier: of the query to which clients send most. Uploads: of the planned "
        "clients of all rounds, float32. Times, which are private, are in private/costs.csv."
    )
    columns = "point", sweep.metric, "noise multiplier", "uploads", "scored on"
    table = Table((*columns, "privacy of this point alone"), cells, (1, 2, 3))
    return Section("Points", text, table=table)


def _panels(sweep: Sweep, rows: Rows) -> list[Any]:
    """One picture; several of a metric whose several values have no axis, or are one themselves."""
    numbers = OF in rows[0] and all(type(row[OF]) in (int, float) for row in rows)
    if sweep.x is not None and not numbers:
        return [_lines(sweep, sweep.x, rows)]
    if OF not in rows[0]:
        return [_bars(sweep, rows)]
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        parts.setdefault(label(sweep.varied, row), []).append(row)
    return [(_lines(sweep, OF, part) if numbers else _bars(sweep, part)) for part in parts.values()]


def _lines(sweep: Sweep, axis: str, rows: Rows) -> Any:
    """The metric against the axis, with a line for each combination of what else varies."""
    against = "" if axis == OF else f" against {short(axis)}"
    panel = axes(f"{sweep.metric}{against}", width=7.2, height=4.2)
    others = [name for name in (OF, *sweep.varied) if name != axis and name in rows[0]]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[axis]):
        lines.setdefault(label(others, row), []).append(row)
    for index, (text, line) in enumerate(lines.items()):
        # The line has a hole where the metric is not finite.
        holes = [f"{row[axis]:,}" for row in line if row["mean"] is None]
        text = stamped(text, *(row["mark"] for row in line))
        panel.errorbar(
            [row[axis] for row in line],
            [math.nan if row["mean"] is None else row["mean"] for row in line],
            yerr=[row["deviation"] or math.nan for row in line],
            label=f"{text}, {number(None)} at {', '.join(holes)}" if holes else text,
            color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], markersize=5,
            capsize=3, linewidth=1.6,
        )  # fmt: skip
    values = sorted({row[axis] for row in rows})
    if axis != OF and values[-1] >= 8 * values[0]:
        panel.set_xscale("log")
        panel.minorticks_off()
    labelled(panel, short(axis), sweep.metric, legend=True)
    ticks(panel, values)
    return panel


def _bars(sweep: Sweep, rows: Rows) -> Any:
    panel = axes(sweep.metric, width=7.2, height=1.0 + 0.36 * len(rows))
    fields = [*([OF] if OF in rows[0] else []), *sweep.varied]
    names = [stamped(label(fields, row), row["mark"]) for row in rows]
    for index, row in enumerate(rows):
        names[index] += f": {number(None)}" if row["mean"] is None else ""
    widths = [row["mean"] or 0.0 for row in rows]
    # One run has no deviation, and no bar of it.
    errors = [row["deviation"] or math.nan for row in rows]
    line = {"ecolor": INK, "elinewidth": 1.2}
    panel.barh(names, widths, xerr=errors, color=COLOURS[0], capsize=3, error_kw=line)
    panel.invert_yaxis()
    panel.set_xlabel(sweep.metric)
    return panel


def label(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """The values of some fields as text; of a case, or another text, the value alone."""
    own = {name: values[name] for name in names}
    texts = (x if isinstance(x, str) else f"{short(name)} {x}" for name, x in own.items())
    return ", ".join(texts) or "all"


def stamped(text: str, *marks: str) -> str:
    """A label that says where something is not private."""
    return f"{text} ({report.joined(marks)})" if any(marks) else text


def short(name: str) -> str:
    return name.rsplit(".", 1)[-1].replace("_", " ")
