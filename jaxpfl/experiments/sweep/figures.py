"""The figure of a sweep: the metric against the field `x`, or bars of it or of the gap closed.

Error bars are standard deviations over repetitions. Baselines are dashed lines.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.numbers import number
from jaxpfl.experiments.report.plots import COLOURS, GREY_TEXT, INK, RED, axes
from jaxpfl.experiments.sweep.config import CASE, Sweep

NOT_PRIVATE = "NOT PRIVATE"
_DASHES = ("--", ":", "-.", (0, (1, 3)))
Rows = Sequence[Mapping[str, Any]]


def figure_of(sweep: Sweep, rows: Rows, points: Rows) -> Any:
    """The figure of the rows that have a run; None where none has.

    Args:
      points: the points of `sweep.json`, with what each is "compared_with".
    """
    rows = [row for row in rows if row["runs"]]
    if not rows:
        return None
    ends = sweep.gap
    compared = [row for row in rows if ends and row["gap"] is not None and row[CASE] not in ends]
    if sweep.x is not None:
        panel = _lines(sweep, sweep.x, rows)
    elif compared:
        return _gap_bars(sweep, rows, compared).figure
    else:
        panel = _bars(sweep, rows, "mean", "deviation", sweep.metric)
    _draw_baselines(panel, sweep.x, points)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False)
    return panel.figure


def _lines(sweep: Sweep, axis: str, rows: Rows) -> Any:
    """The metric against the axis, with a line for each combination of what else varies."""
    panel = axes(f"{sweep.metric} against {short(axis)}", width=7.2, height=4.2)
    others = [name for name in sweep.varied if name != axis]
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[axis]):
        lines.setdefault(tuple(valued(name, row[name]) for name in others), []).append(row)
    for index, (key, found) in enumerate(lines.items()):
        text = stamped(", ".join(key), joined(row["mark"] for row in found))
        xs = [row[axis] for row in found]
        means = [math.nan if row["mean"] is None else row["mean"] for row in found]
        errors = [row["deviation"] or 0.0 for row in found]
        colour = COLOURS[index % len(COLOURS)]
        panel.errorbar(
            xs, means, yerr=errors if any(errors) else None, label=text or None,
            color=colour, marker="o", markersize=4, capsize=3, linewidth=1.6,
        )  # fmt: skip
        diverged = [x for x, mean in zip(xs, means, strict=True) if math.isnan(mean)]
        if diverged:
            # The line has a hole there, so a cross at the upper edge says why.
            panel.plot(
                diverged, [1.0] * len(diverged), color=colour, marker="x", linestyle="none",
                label=": ".join(part for part in (text, number(None)) if part),
                transform=panel.get_xaxis_transform(), clip_on=False,
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


def _draw_baselines(panel: Any, axis: str | None, points: Rows) -> None:
    """A dashed line for each model that points are compared with, at its mean over the points.

    The label says where the data is other data than the points' own. Values that are not finite
    are left out.
    """
    measured = {point["scored_on"] for point in points if "scored_on" in point}
    found: dict[tuple[str, str, str], dict[Any, list[float]]] = {}
    for point in points:
        for row in point.get("compared_with", ()):
            if row["model"] != OURS and row["value"] is not None:
                model = found.setdefault((row["model"], row["scored_on"], row["mark"]), {})
                model.setdefault(point.get(axis or ""), []).append(row["value"])
    for index, ((model, data, mark), values) in enumerate(found.items()):
        name = model if {data} == measured else f"{model}, on other data (see the table)"
        means = {x: sum(values[x]) / len(values[x]) for x in sorted(values)}
        style = {"color": RED if mark else GREY_TEXT, "linestyle": _DASHES[index % len(_DASHES)]}
        style |= {"label": stamped(name, mark), "linewidth": 1.2}
        if len(means) > 1:
            panel.plot(list(means), list(means.values()), **style)
        else:
            (mean,) = means.values()
            (panel.axvline if axis is None else panel.axhline)(mean, **style)


def _bars(sweep: Sweep, rows: Rows, value: str, error: str, title: str) -> Any:
    """One bar for each row, with its error, or "not finite" in its place; returns the axes."""
    panel = axes(title, width=7.2, height=1.0 + 0.36 * len(rows))
    places = list(range(len(rows)))[::-1]
    errors = [row[error] or 0.0 for row in rows]
    panel.barh(
        places, [row[value] or 0.0 for row in rows], xerr=errors if any(errors) else None,
        color=COLOURS[0], capsize=3, error_kw={"ecolor": INK, "elinewidth": 1.2},
    )  # fmt: skip
    for place, row in zip(places, rows, strict=True):
        if row[value] is None:
            _annotate(panel, number(None), 0, place)
    labels = [stamped(label(sweep.varied, row), row["mark"]) for row in rows]
    panel.set_yticks(places, labels, fontsize=8)
    panel.set_xlabel(sweep.metric)
    return panel


def _gap_bars(sweep: Sweep, rows: Rows, compared: Rows) -> Any:
    """The gap closed, with one bar for each row except for the two cases that define the gap."""
    assert sweep.gap is not None
    start, end = (
        stamped(case, joined(row["mark"] for row in rows if row[CASE] == case))
        for case in sweep.gap
    )
    panel = _bars(sweep, compared, "gap", "gap_deviation", f"Gap in {sweep.metric} closed")
    for place, row in zip(panel.get_yticks(), compared, strict=True):
        gap, error = row["gap"], row["gap_deviation"] or 0.0
        _annotate(panel, f"{gap:.1f} %", gap + math.copysign(error, gap), place)
    panel.axvline(0, color=INK, linewidth=0.8)
    # Leaves room for the numbers at the ends of the bars.
    panel.margins(x=0.14)
    panel.set_xlabel(f"gap closed in %   (0: {start};  100: {end})", fontsize=9)
    panel.grid(False, axis="y")
    return panel


def _annotate(panel: Any, text: str, x: float, y: float) -> None:
    """Text at the end of a bar, away from zero."""
    left = x < 0
    panel.annotate(
        text, (x, y), (-6 if left else 6, 0), textcoords="offset points", va="center",
        ha="right" if left else "left", fontsize=9, color=INK,
    )  # fmt: skip


def label(names: Iterable[str], values: Mapping[str, Any]) -> str:
    """The values of some fields as text."""
    return ", ".join(valued(name, values[name]) for name in names) or "all"


def joined(marks: Iterable[str]) -> str:
    """All marks of several points, each once."""
    return " and ".join(dict.fromkeys(mark for mark in marks if mark))


def stamped(text: str, mark: str) -> str:
    """A label that says where something is not private."""
    return f"{text} ({mark})".strip() if mark else text


def short(name: str) -> str:
    """The last part of a field's name, in words."""
    return name.rsplit(".", 1)[-1].replace("_", " ")


def valued(name: str, value: Any) -> str:
    """A field and its value as text; of a case and of a text the value alone."""
    return str(value) if name == CASE or isinstance(value, str) else f"{short(name)} {value}"
