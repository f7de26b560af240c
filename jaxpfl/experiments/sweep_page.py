"""A sweep's `report.html`: the metric against the axis, a line for each value, and the table."""

from pathlib import Path
from typing import Any

from jaxpfl.experiments.plots import COLOURS, axes
from jaxpfl.experiments.study_report import Page, Section, Table, write_page
from jaxpfl.experiments.sweep_config import CASE, Sweep


def write_sweep_page(directory: Path, sweep: Sweep, record: dict[str, Any]) -> Path:
    """Draws the plot and writes the page; returns its path."""
    rows = record["rows"]
    stamped = not all(point["private"] for point in record["points"])
    figure = _by_axis(sweep, rows) if sweep.x is not None else _bars(sweep, rows)
    page = Page(
        title=f"Sweep: {sweep.title}",
        lead=f"{sweep.metric} at {len(sweep.points)} points"
        + (f", repeated over {sweep.over}" if any(row["runs"] > 1 for row in rows) else ""),
        stamp="Some points are NOT PRIVATE: see the table of points" if stamped else "",
        privacy=record["note"],
        privacy_notes=[],
        facts=[(str(len(sweep.points)), "points")],
        sections=[
            Section("", figures=[("sweep", "", figure)], wide=True),
            Section("Table", table=_table(sweep, rows)),
            Section("Points", "Each with its own ledger.", table=_points(record)),
        ],
        runs=[],
    )
    return write_page(directory, page)


def table_lines(sweep: Sweep, rows: list[dict[str, Any]]) -> list[str]:
    """The table as text."""
    table = _table(sweep, rows)
    cells = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    return [
        "  ".join(
            cell.rjust(width) if i in table.numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _table(sweep: Sweep, rows: list[dict[str, Any]]) -> Table:
    names = sweep.varied or tuple(n for n in sweep.points[0].values if n != sweep.over)
    repeated = any(row["error"] is not None for row in rows)
    columns = (*map(_short, names), sweep.metric, *(("standard error", "runs") if repeated else ()))
    cells = []
    for row in rows:
        cell = [str(row[name]) for name in names] + [f"{row['mean']:.5g}"]
        if repeated:
            error = row["error"]
            cell += ["" if error is None else f"{error:.2g}", str(row["runs"])]
        cells.append(tuple(cell))
    return Table(columns, cells, tuple(range(len(names), len(columns))))


def _points(record: dict[str, Any]) -> Table:
    rows = [
        (point["point"], f"{point['value']:.5g}", str(point["privacy"] or "NOT PRIVATE"))
        for point in record["points"]
    ]
    return Table(("point", record["metric"], "privacy"), rows, (1,))


def _by_axis(sweep: Sweep, rows: list[dict[str, Any]]) -> Any:
    """The metric against the axis; the mean of what else varies is never taken: more lines."""
    axis = sweep.x
    assert axis is not None
    panel = axes(f"{sweep.metric} against {_short(axis)}", width=7.2, height=4.2)
    others = [name for name in sweep.varied if name != axis]
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(_valued(name, row[name]) for name in others)
        lines.setdefault(key, []).append(row)
    for index, (key, found) in enumerate(lines.items()):
        found = sorted(found, key=lambda row: row[axis])
        xs, means = [row[axis] for row in found], [row["mean"] for row in found]
        errors = [row["error"] or 0.0 for row in found]
        panel.errorbar(
            xs, means, yerr=errors if any(errors) else None, label=", ".join(key) or None,
            color=COLOURS[index % len(COLOURS)], marker="o", markersize=4, capsize=3, linewidth=1.6,
        )  # fmt: skip
    smallest, largest = min(row[axis] for row in rows), max(row[axis] for row in rows)
    if largest >= 8 * smallest:
        panel.set_xscale("log")
        panel.minorticks_off()
    ticks = sorted({row[axis] for row in rows})
    if len(ticks) <= 12:
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_xlabel(_short(axis))
    panel.set_ylabel(sweep.metric)
    if any(lines):
        panel.legend(fontsize=8, frameon=False)
    return panel.figure


def _bars(sweep: Sweep, rows: list[dict[str, Any]]) -> Any:
    """One bar for each row."""
    panel = axes(sweep.metric, width=7.2, height=0.8 + 0.36 * len(rows))
    names = sweep.varied
    labels = [", ".join(_valued(name, row[name]) for name in names) or "all" for row in rows]
    places = list(range(len(rows)))[::-1]
    errors = [row["error"] or 0.0 for row in rows]
    panel.barh(
        places, [row["mean"] for row in rows], xerr=errors if any(errors) else None,
        color=COLOURS[0], capsize=3,
    )  # fmt: skip
    panel.set_yticks(places, labels, fontsize=8)
    panel.set_xlabel(sweep.metric)
    return panel.figure


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1].replace("_", " ")


def _valued(name: str, value: Any) -> str:
    return str(value) if name == CASE or isinstance(value, str) else f"{_short(name)} {value}"
