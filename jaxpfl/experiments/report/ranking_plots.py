"""The pictures of a ranking: FreD of every candidate, and FreD against perplexity."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.plots import ACCENT, INK, PALE, RED

_LABELS = {"before": "before the private rounds", "after": "after the private rounds"}
_COLOURS = {"before": PALE, "after": ACCENT}


def ranking_figures(
    fred: Mapping[str, Any], metric: str, of: str, stamp: str
) -> list[tuple[str, str, Any]]:
    """Returns file name, title and figure of each picture.

    Args:
      fred: as returned by the system's `ranking.ranking`.
      metric: "perplexity" or "loss"; the second picture shows it, if models were evaluated.
      of: what they were evaluated on.
      stamp: written across every picture, or "".
    """
    rows = fred["candidates"]
    figures = [("fred", "Frechet distance of the candidates", bars(rows, stamp))]
    stages = [stage for stage in _LABELS if any(row.get(stage) is not None for row in rows)]
    if any(sum(row[stage] is not None for row in rows) > 1 for stage in stages):
        title = f"Does the order predict the {metric}?"
        figure = _scatter(rows, stages, metric, title, of, stamp)
        figures.append(("fred_perplexity", title, figure))
    return figures


def bars(rows: Sequence[Mapping[str, Any]], stamp: str) -> Any:
    """A bar for each candidate, nearest first.

    Args:
      rows: mappings with "candidate" and "distance", "non_private", or both; then the latter is a
        mark on the bar. The part of "distance" beyond "corrected" is pale, and a line reaches from
        "low" to "high".
      stamp: written across it, or "".
    """
    axes = plots.axes("Frechet distance of the candidates", height=1.3 + 0.34 * len(rows))
    if stamp:
        plots.watermark(axes, stamp)
    places = range(len(rows))
    main = "distance" if "distance" in rows[0] else "non_private"
    values = [row[main] for row in rows]
    colours = [ACCENT if place == 0 else PALE for place in places]
    if all("corrected" in row for row in rows):
        axes.barh(places, values, color="#e5e7eb", height=0.66, label="made by the noise alone")
        corrected = [max(row["corrected"], 0.0) for row in rows]
        axes.barh(places, corrected, color=colours, height=0.66)
        for place, row in zip(places, rows, strict=True):
            label = "interval of the distance without noise" if place == 0 else None
            axes.plot([row["low"], row["high"]], [place, place], color=INK, lw=1.4, label=label)
    else:
        axes.barh(places, values, color=colours, height=0.66)
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f" {value:.4g}", (max(value, 0.0), place), va="center", fontsize=8.5, color=INK
        )
    if main == "distance" and "non_private" in rows[0]:
        exact = [row["non_private"] for row in rows]
        axes.plot(exact, places, "D", color=RED, ms=5, label="NOT PRIVATE: without noise")
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=2)
    axes.set_yticks(list(places), [row["candidate"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel("FreD (less is nearer)", color=INK)
    axes.grid(False, axis="y")
    return axes.figure


def _scatter(
    rows: Sequence[Mapping[str, Any]],
    stages: Sequence[str],
    metric: str,
    title: str,
    of: str,
    stamp: str,
) -> Any:
    axes = plots.axes("", height=3.6)
    if stamp:
        plots.watermark(axes, stamp)
    plots.subtitle(axes, title, f"{metric} on {of}")
    for stage in stages:
        found = [
            (row["corrected"], row[stage][metric], row["candidate"])
            for row in rows
            if row[stage] is not None and row[stage].get(metric) is not None
        ]
        axes.scatter(
            [x for x, _, _ in found],
            [y for _, y, _ in found],
            color=_COLOURS[stage],
            edgecolor=ACCENT,
            label=_LABELS[stage],
            s=34,
            zorder=3,
        )
        if stage == stages[-1]:
            for (x, y, name), level in zip(found, _levels([x for x, _, _ in found]), strict=True):
                axes.annotate(
                    name, (x, y), xytext=(0, -11 - 9 * level), textcoords="offset points",
                    ha="center", fontsize=8, color=INK,
                )  # fmt: skip
    if metric == "perplexity":
        # Perplexities can differ by a power of ten.
        plots.logarithmic(axes)
    axes.margins(x=0.12, y=0.24)
    axes.legend(frameon=False, fontsize=8.5)
    return plots.labelled(axes, "FreD without the bias of the noise", metric)


def _levels(places: Sequence[float]) -> list[int]:
    """How far down to write each name, so that names of close points, in order, do not overlap."""
    reach = 0.09 * (max(places) - min(places)) if places else 0.0
    levels: list[int] = []
    for number, place in enumerate(places):
        close = number > 0 and place - places[number - 1] < reach
        levels.append(levels[-1] + 1 if close else 0)
    return levels
