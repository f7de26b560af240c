"""The `report.html` of a sweep: a figure, the table, the cost of a round, texts side by side.

The figure shows the metric against the field `x`, or without one, bars of the gap closed or of the
metric.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from jaxpfl.experiments.report.cautions import OURS
from jaxpfl.experiments.report.page import Page, Section, Table, text_lines, write_page
from jaxpfl.experiments.report.plots import COLOURS, INK, axes
from jaxpfl.experiments.sweep.config import CASE, Sweep

NOT_PRIVATE = "NOT PRIVATE"
_TEXTS = 7
_CHARACTERS = 320
_COLUMNS = 4


def write_sweep_page(directory: Path, sweep: Sweep, record: dict[str, Any]) -> Path:
    """Draws the figure and writes the page; returns the page's path."""
    rows = record["rows"]
    stamped = not all(point["private"] for point in record["points"])
    if sweep.x is not None:
        figure = _by_axis(sweep, rows)
    elif _compared(sweep, rows):
        figure = _gap_bars(sweep, rows)
    else:
        figure = _bars(sweep, rows, "mean", "error", sweep.metric).figure
    cells = [
        (
            point["point"],
            f"{point['value']:.5g}",
            point["scored_on"],
            str(point["privacy"] or NOT_PRIVATE),
        )
        for point in record["points"]
    ]
    columns = ("point", sweep.metric, "scored on", "privacy of this point alone")
    points = Table(columns, cells, (1,))
    measured = measured_on(sweep.metric, [point["scored_on"] for point in record["points"]])
    page = Page(
        title=f"Sweep: {sweep.title}",
        lead=f"{measured} at {len(sweep.points)} points"
        + (f", repeated over {sweep.over}" if any(row["runs"] > 1 for row in rows) else ""),
        stamp="Some points are NOT PRIVATE; the table of points states which" if stamped else "",
        privacy=record["note"],
        privacy_notes=[record["note"]] if stamped else [],
        facts=_facts(sweep, rows, measured),
        cautions=record["cautions"],
        sections=[
            Section("Figure", figures=[("sweep", "", figure)], wide=True),
            Section("Table", f"{measured}. {_gap_text(sweep, rows)}", table=_table(sweep, rows)),
            *_baselines(sweep, record["baselines"]),
            *_costs(sweep, record["points"]),
            *_texts(sweep, record["points"]),
            Section("Points", "Each point has a ledger of its own.", table=points),
        ],
    )
    return write_page(directory, page)


def table_lines(sweep: Sweep, rows: list[dict[str, Any]]) -> list[str]:
    """The table as text."""
    return text_lines(_table(sweep, rows))


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


def _table(sweep: Sweep, rows: list[dict[str, Any]]) -> Table:
    names = sweep.varied or tuple(n for n in sweep.points[0].values if n != sweep.over)
    columns = [(_short(name), [str(row[name]) for row in rows]) for name in names]
    columns.append((sweep.metric, [f"{row['mean']:.5g}" for row in rows]))
    if any(row["error"] is not None for row in rows):
        errors = ["" if row["error"] is None else f"{row['error']:.2g}" for row in rows]
        columns += [("standard error", errors), ("runs", [str(row["runs"]) for row in rows])]
    if sweep.gap:
        columns.append(("gap closed", [_gap_cell(sweep, row) for row in rows]))
    numbers = tuple(range(len(names), len(columns)))
    if not all(row["private"] for row in rows):
        columns.append(("privacy", ["" if row["private"] else NOT_PRIVATE for row in rows]))
    titles, cells = zip(*columns, strict=True)
    return Table(titles, list(zip(*cells, strict=True)), numbers)


def _gap_cell(sweep: Sweep, row: Mapping[str, Any]) -> str:
    """The gap closed and its standard error, except for the two cases that define the gap."""
    if row["gap"] is None:
        return ""
    if row[CASE] in (sweep.gap or ()):
        return f"{row['gap']:.0f} %"
    error = "" if row["gap_error"] is None else f" ± {row['gap_error']:.1f}"
    return f"{row['gap']:.1f}{error} %"


def _facts(sweep: Sweep, rows: list[dict[str, Any]], measured: str) -> list[tuple[str, str]]:
    """The number of points, and the ends of the gap where all points have the same one."""
    facts = [(str(len(sweep.points)), "points")]
    ends = sweep.gap or ()
    found = [row for end in ends for row in rows if row[CASE] == end]
    where = measured.removeprefix(sweep.metric)
    if len(found) == 2:
        facts += [
            (
                f"{row['mean']:.4g}",
                f"{sweep.metric} of {_stamped(row[CASE], row['private'])}{where}",
            )
            for row in found
        ]
    return facts


def _gap_text(sweep: Sweep, rows: list[dict[str, Any]]) -> str:
    """What the gap is, and at which values there is none."""
    if sweep.gap is None:
        return ""
    (start, end), over = sweep.gap, _short(sweep.over)
    repeated = any(row["error"] is not None for row in rows)
    each = f", {over} by {over}; mean and standard error" if repeated else ""
    text = (
        f"Gap closed: how far {sweep.metric} comes from that of “{start}” (0 %) to that of "
        f"“{end}” (100 %){each}."
    )
    others = [name for name in sweep.varied if name != CASE]
    without = [row for row in rows if row["gap"] is None and row[CASE] == start]
    if without:
        where = " at " + "; ".join(_label(others, row) for row in without) if others else ""
        some = f" at some {over}" if repeated else ""
        text += f" It is not shown{where}: both cases have the same {sweep.metric}{some}."
    return text


def _baselines(sweep: Sweep, found: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The models that every run is compared with, beside the runs on the same data."""
    if not found:
        return []
    rows = [
        (
            "the points' runs" if row["model"] == OURS else row["model"],
            f"{row['value']:.5g}",
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
            found.setdefault(_label(names, point), []).append(point["cost"])
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
        firsts.setdefault(_label(names, point), point)
    columns = {
        _stamped(name, point["private"]): [
            text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
            for text in point["texts"][:_TEXTS]
        ]
        for name, point in firsts.items()
        if point.get("texts")
    }
    if not columns:
        return []
    at = f", at the first {_short(sweep.over)}" if sweep.over in points[0] else ""
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


def _by_axis(sweep: Sweep, rows: list[dict[str, Any]]) -> Any:
    """The metric against the axis, with a line for each combination of what else varies."""
    axis = sweep.x
    assert axis is not None
    panel = axes(f"{sweep.metric} against {_short(axis)}", width=7.2, height=4.2)
    others = [name for name in sweep.varied if name != axis]
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(_valued(name, row[name]) for name in others)
        lines.setdefault(key, []).append(row)
    for index, (key, found) in enumerate(lines.items()):
        label = _stamped(", ".join(key), all(row["private"] for row in found))
        found = sorted(found, key=lambda row: row[axis])
        xs, means = [row[axis] for row in found], [row["mean"] for row in found]
        errors = [row["error"] or 0.0 for row in found]
        panel.errorbar(
            xs, means, yerr=errors if any(errors) else None, label=label or None,
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


def _bars(sweep: Sweep, rows: list[dict[str, Any]], value: str, error: str, title: str) -> Any:
    """One bar for each row, with its error; returns the axes."""
    panel = axes(title, width=7.2, height=1.0 + 0.36 * len(rows))
    places = list(range(len(rows)))[::-1]
    errors = [row[error] or 0.0 for row in rows]
    panel.barh(
        places, [row[value] for row in rows], xerr=errors if any(errors) else None,
        color=COLOURS[0], capsize=3, error_kw={"ecolor": INK, "elinewidth": 1.2},
    )  # fmt: skip
    labels = [_stamped(_label(sweep.varied, row), row["private"]) for row in rows]
    panel.set_yticks(places, labels, fontsize=8)
    panel.set_xlabel(sweep.metric)
    return panel


def _compared(sweep: Sweep, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a gap, without the two cases that define it."""
    ends = sweep.gap
    return [row for row in rows if ends and row["gap"] is not None and row[CASE] not in ends]


def _gap_bars(sweep: Sweep, rows: list[dict[str, Any]]) -> Any:
    """The gap closed, with one bar for each row except for the two cases that define the gap."""
    assert sweep.gap is not None
    start, end = (
        _stamped(case, all(row["private"] for row in rows if row[CASE] == case))
        for case in sweep.gap
    )
    rows = _compared(sweep, rows)
    panel = _bars(sweep, rows, "gap", "gap_error", f"Gap in {sweep.metric} closed")
    for place, row in zip(panel.get_yticks(), rows, strict=True):
        gap, error = row["gap"], row["gap_error"] or 0.0
        left = gap < 0
        panel.annotate(
            f"{gap:.1f} %", (gap - error if left else gap + error, place),
            (-6 if left else 6, 0), textcoords="offset points", va="center",
            ha="right" if left else "left", fontsize=9, color=INK,
        )  # fmt: skip
    panel.axvline(0, color=INK, linewidth=0.8)
    # Leaves room for the numbers beside the bars.
    panel.margins(x=0.14)
    panel.set_xlabel(f"gap closed in %   (0: {start};  100: {end})", fontsize=9)
    panel.grid(False, axis="y")
    return panel.figure


def _label(names: Iterable[str], values: Mapping[str, Any]) -> str:
    """The values of some fields as text."""
    return ", ".join(_valued(name, values[name]) for name in names) or "all"


def _stamped(label: str, private: bool) -> str:
    return label if private else f"{label} ({NOT_PRIVATE})".strip()


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1].replace("_", " ")


def _valued(name: str, value: Any) -> str:
    return str(value) if name == CASE or isinstance(value, str) else f"{_short(name)} {value}"
