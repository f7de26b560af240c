"""The pictures of a ranking: every candidate's FreD, and FreD against perplexity."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.report.plots import subtitle, watermark

_INK, _ACCENT, _RED, _PALE = "#1f2937", "#2563eb", "#c81e1e", "#93c5fd"
_LABELS = {"before": "before the private rounds", "after": "after the private rounds"}
_COLOURS = {"before": _PALE, "after": _ACCENT}


def ranking_figures(
    fred: Mapping[str, Any], metric: str, of: str, stamp: str
) -> list[tuple[str, str, Any]]:
    """File name, title and figure of each picture.

    Args:
      fred: as `ranking.ranking` returns it.
      metric: "perplexity" or "loss": what the second picture, where there are models, shows.
      of: what these were evaluated on, in words.
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
      rows: "candidate", and "distance" or, without it, "non_private"; of both, the second is a
        mark on the bar. What "corrected" takes off "distance" is pale.
      stamp: written across it, or "".
    """
    axes = _axes("Frechet distance of the candidates", stamp, height=1.3 + 0.34 * len(rows))
    places = range(len(rows))
    main = "distance" if "distance" in rows[0] else "non_private"
    values = [row[main] for row in rows]
    # The winner has a colour of its own, and stands first.
    colours = [_ACCENT if place == 0 else _PALE for place in places]
    if all("corrected" in row for row in rows):
        axes.barh(places, values, color="#e5e7eb", height=0.66, label="made by the noise alone")
        corrected = [max(row["corrected"], 0.0) for row in rows]
        axes.barh(places, corrected, color=colours, height=0.66)
    else:
        axes.barh(places, values, color=colours, height=0.66)
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f" {value:.4g}", (max(value, 0.0), place), va="center", fontsize=8.5, color=_INK
        )
    if main == "distance" and "non_private" in rows[0]:
        exact = [row["non_private"] for row in rows]
        axes.plot(exact, places, "D", color=_RED, ms=5, label="NOT PRIVATE: without noise")
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=2)
    axes.set_yticks(list(places), [row["candidate"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel("FreD (less is nearer)", color=_INK)
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
    from matplotlib.ticker import LogLocator, NullLocator

    axes = _axes("", stamp, height=3.6)
    subtitle(axes, title, f"{metric} on {of}")
    for stage in stages:
        found = [
            (row["distance"], row[stage][metric], row["candidate"])
            for row in rows
            if row[stage] is not None and row[stage].get(metric) is not None
        ]
        axes.scatter(
            [x for x, _, _ in found],
            [y for _, y, _ in found],
            color=_COLOURS[stage],
            edgecolor=_ACCENT,
            label=_LABELS[stage],
            s=34,
            zorder=3,
        )
        if stage == stages[-1]:
            for (x, y, name), level in zip(found, _levels([x for x, _, _ in found]), strict=True):
                axes.annotate(
                    name, (x, y), xytext=(0, -11 - 9 * level), textcoords="offset points",
                    ha="center", fontsize=8, color=_INK,
                )  # fmt: skip
    if metric == "perplexity":
        # As on the other pictures of perplexity; a far corpus can cost a power of ten.
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.24)
    axes.set_xlabel("FreD", color=_INK)
    axes.set_ylabel(metric, color=_INK)
    axes.legend(frameon=False, fontsize=8.5)
    return axes.figure


def _levels(places: Sequence[float]) -> list[int]:
    """How far down each name goes, so that those of close points (places ascend) do not meet."""
    reach = 0.09 * (max(places) - min(places)) if places else 0.0
    levels: list[int] = []
    for number, place in enumerate(places):
        close = number > 0 and place - places[number - 1] < reach
        levels.append(levels[-1] + 1 if close else 0)
    return levels


def _axes(title: str, stamp: str, *, height: float) -> Any:
    # The object API: pyplot would keep every figure and choose a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, height), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    if stamp:
        watermark(axes, stamp)
    return axes
