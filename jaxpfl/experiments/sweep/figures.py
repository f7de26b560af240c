"""The figure of a sweep: the metric against the field `x`, or bars of it or of the gap closed.

Error bars are standard deviations over repetitions. Baselines are dashed lines.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpfl.experiments.records.cautions import OURS, WITHOUT_PRIVACY
from jaxpfl.experiments.records.numbers import number
from jaxpfl.experiments.report.plots import COLOURS, GREY, GREY_TEXT, INK, RED, axes
from jaxpfl.experiments.sweep.config import CASE, Sweep
from jaxpfl.experiments.sweep.summary import NOT_PRIVATE, joined

_DASHES = ("--", ":", "-.", (0, (1, 3)))


def figure_of(
    sweep: Sweep, rows: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> Any:
    """The figure of the rows that have a run; None where none has.

    Args:
      points: the points of `sweep.json`, with what each is "compared_with".
    """
    rows = [row for row in rows if row["runs"]]
    if not rows:
        return None
    if sweep.x is not None:
        return _by_axis(sweep, rows, points)
    compared = _compared(sweep, rows)
    if compared:
        return _gap_bars(sweep, rows, compared)
    panel = _bars(sweep, rows, "mean", "deviation", sweep.metric)
    for (name, _, stamp, dash), found in _beside(sweep, points).items():
        mean = sum(value for _, value in found) / len(found)
        panel.axvline(mean, color=RED if stamp else GREY_TEXT, linestyle=dash, label=name)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False)
    return panel.figure


def _by_axis(
    sweep: Sweep, rows: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> Any:
    """The metric against the axis, with a line for each combination of what else varies."""
    axis = sweep.x
    assert axis is not None
    panel = axes(f"{sweep.metric} against {short(axis)}", width=7.2, height=4.2)
    others = [name for name in sweep.varied if name != axis]
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(valued(name, row[name]) for name in others)
        lines.setdefault(key, []).append(row)
    for index, (key, found) in enumerate(lines.items()):
        text = stamped(", ".join(key), joined(row["mark"] for row in found))
        found = sorted(found, key=lambda row: row[axis])
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
            name = ": ".join(part for part in (text, number(None)) if part)
            edge = {"transform": panel.get_xaxis_transform(), "clip_on": False}
            style = {"color": colour, "marker": "x", "linestyle": "none", "label": name}
            panel.plot(diverged, [1.0] * len(diverged), **style, **edge)
    for (name, _, stamp, dash), found in _beside(sweep, points).items():
        means = {x: [value for at, value in found if at == x] for x, _ in sorted(found)}
        ys = [sum(values) / len(values) for values in means.values()]
        style = {"color": RED if stamp else GREY, "linestyle": dash, "linewidth": 1.2}
        if len(means) > 1:
            panel.plot(list(means), ys, label=name, **style)
        else:
            panel.axhline(ys[0], label=name, **style)
    smallest, largest = min(row[axis] for row in rows), max(row[axis] for row in rows)
    if largest >= 8 * smallest:
        panel.set_xscale("log")
        panel.minorticks_off()
    ticks = sorted({row[axis] for row in rows})
    if len(ticks) <= 12:
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_xlabel(short(axis))
    panel.set_ylabel(sweep.metric)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=False)
    return panel.figure


def _beside(
    sweep: Sweep, points: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str, bool, Any], list[tuple[Any, float]]]:
    """The baselines, one after the other: (label, data, stamped, dash) -> (x, value) by point.

    The label says where the data is other data than the points' own. Values that are not finite
    are left out.
    """
    measured = {point["scored_on"] for point in points if "scored_on" in point}
    found: dict[tuple[str, str], list[tuple[Any, float]]] = {}
    for point in points:
        for row in point.get("compared_with", ()):
            if row["model"] != OURS and row["value"] is not None:
                key = row["model"], row["scored_on"]
                found.setdefault(key, []).append((point.get(sweep.x or ""), row["value"]))
    lines = {}
    for index, ((model, name), values) in enumerate(found.items()):
        label = model if {name} == measured else f"{model}, on other data (see the table)"
        stamp = model == WITHOUT_PRIVACY
        key = (
            stamped(label, NOT_PRIVATE if stamp else ""),
            name,
            stamp,
            _DASHES[index % len(_DASHES)],
        )
        lines[key] = values
    return lines


def _bars(
    sweep: Sweep, rows: Sequence[Mapping[str, Any]], value: str, error: str, title: str
) -> Any:
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
            panel.annotate(
                number(None), (0, place), (6, 0), textcoords="offset points", va="center",
                fontsize=9, color=INK,
            )  # fmt: skip
    labels = [stamped(label(sweep.varied, row), row["mark"]) for row in rows]
    panel.set_yticks(places, labels, fontsize=8)
    panel.set_xlabel(sweep.metric)
    return panel


def _compared(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with a gap, without the two cases that define it."""
    ends = sweep.gap
    return [row for row in rows if ends and row["gap"] is not None and row[CASE] not in ends]


def _gap_bars(
    sweep: Sweep, rows: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]
) -> Any:
    """The gap closed, with one bar for each row except for the two cases that define the gap."""
    assert sweep.gap is not None
    start, end = (
        stamped(case, joined(row["mark"] for row in rows if row[CASE] == case))
        for case in sweep.gap
    )
    panel = _bars(sweep, compared, "gap", "gap_deviation", f"Gap in {sweep.metric} closed")
    for place, row in zip(panel.get_yticks(), compared, strict=True):
        gap, error = row["gap"], row["gap_deviation"] or 0.0
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


def label(names: Iterable[str], values: Mapping[str, Any]) -> str:
    """The values of some fields as text."""
    return ", ".join(valued(name, values[name]) for name in names) or "all"


def stamped(text: str, mark: str) -> str:
    """A label that says where something is not private."""
    return f"{text} ({mark})".strip() if mark else text


def short(name: str) -> str:
    """The last part of a field's name, in words."""
    return name.rsplit(".", 1)[-1].replace("_", " ")


def valued(name: str, value: Any) -> str:
    """A field and its value as text; of a case and of a text the value alone."""
    return str(value) if name == CASE or isinstance(value, str) else f"{short(name)} {value}"
