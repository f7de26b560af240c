"""The figure of a sweep: the metric against the field `x`, or a bar for each combination of values.

Error bars are standard deviations over repetitions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.records.numbers import number
from jaxpfl.experiments.report.plots import COLOURS, INK, axes
from jaxpfl.experiments.sweep.config import CASE, Sweep

NOT_PRIVATE = "NOT PRIVATE"
Rows = Sequence[Mapping[str, Any]]


def figure_of(sweep: Sweep, rows: Rows) -> Any:
    """The figure of the rows of `sweep.json` that have a run; None where none has."""
    rows = [row for row in rows if row["runs"]]
    if not rows:
        return None
    panel = _bars(sweep, rows) if sweep.x is None else _lines(sweep, sweep.x, rows)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False)
    return panel.figure


def _lines(sweep: Sweep, axis: str, rows: Rows) -> Any:
    """The metric against the axis, with a line for each combination of what else varies."""
    panel = axes(f"{sweep.metric} against {short(axis)}", width=7.2, height=4.2)
    others = [name for name in sweep.varied if name != axis]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[axis]):
        lines.setdefault(label(others, row), []).append(row)
    for index, (text, found) in enumerate(lines.items()):
        # The line has a hole where the metric is not finite.
        holes = [f"{row[axis]:,}" for row in found if row["mean"] is None]
        text = stamped(text, *(row["mark"] for row in found))
        panel.errorbar(
            [row[axis] for row in found],
            [math.nan if row["mean"] is None else row["mean"] for row in found],
            yerr=[row["deviation"] or 0.0 for row in found],
            label=f"{text}, {number(None)} at {', '.join(holes)}" if holes else text,
            color=COLOURS[index % len(COLOURS)], marker="o", markersize=4, capsize=3, linewidth=1.6,
        )  # fmt: skip
    ticks = sorted({row[axis] for row in rows})
    if ticks[-1] >= 8 * ticks[0]:
        panel.set_xscale("log")
        panel.minorticks_off()
    if len(ticks) <= 12:
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_xlabel(short(axis))
    panel.set_ylabel(sweep.metric)
    return panel


def _bars(sweep: Sweep, rows: Rows) -> Any:
    panel = axes(sweep.metric, width=7.2, height=1.0 + 0.36 * len(rows))
    labels = [stamped(label(sweep.varied, row), row["mark"]) for row in rows]
    panel.barh(
        [text if row["mean"] is not None else f"{text}: {number(None)}"
         for text, row in zip(labels, rows, strict=True)],
        [row["mean"] or 0.0 for row in rows], xerr=[row["deviation"] or 0.0 for row in rows],
        color=COLOURS[0], capsize=3, error_kw={"ecolor": INK, "elinewidth": 1.2},
    )  # fmt: skip
    panel.invert_yaxis()
    panel.set_xlabel(sweep.metric)
    return panel


def label(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """The values of some fields as text; of a case and of a text the value alone."""
    parts = []
    for name in names:
        value = values[name]
        alone = name == CASE or isinstance(value, str)
        parts.append(str(value) if alone else f"{short(name)} {value}")
    return ", ".join(parts) or "all"


def stamped(text: str, *marks: str) -> str:
    """A label that says where something is not private."""
    found = " and ".join(dict.fromkeys(mark for mark in marks if mark))
    return f"{text} ({found})" if found else text


def short(name: str) -> str:
    """The last part of a field's name, in words."""
    return name.rsplit(".", 1)[-1].replace("_", " ")
