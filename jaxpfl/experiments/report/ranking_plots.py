"""The picture of a ranking: FreD of every candidate."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.plots import ACCENT, INK, PALE


def bars(rows: Sequence[Mapping[str, Any]], stamp: str) -> Any:
    """A bar for each candidate, nearest first.

    Args:
      rows: mappings with "candidate", "distance" and, if there was noise, "corrected", "low" and
        "high": the part of "distance" beyond "corrected" is pale, and a line reaches from "low" to
        "high".
      stamp: written across it, or "".
    """
    axes = plots.axes("Frechet distance of the candidates", height=1.3 + 0.34 * len(rows))
    if stamp:
        plots.watermark(axes, stamp)
    places = range(len(rows))
    values = [row["distance"] for row in rows]
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
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=2)
    axes.set_yticks(list(places), [row["candidate"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set_xlabel("FreD (less is nearer)", color=INK)
    axes.grid(False, axis="y")
    return axes.figure
