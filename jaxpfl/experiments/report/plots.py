"""Building blocks of all pictures: axes, titles, stamps, and grids of images."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.printable import printable

INK, ACCENT, RED, PALE, GREY = "#1f2937", "#2563eb", "#c81e1e", "#93c5fd", "#9ca3af"
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#475569")
# Lines are told apart by their markers, too.
MARKERS = "os^Dv*"


def axes(
    title: str, text: str = "", *, width: float = 4.8, height: float = 3.1, stamp: str = ""
) -> Any:
    """One set of axes on a figure of its own, with a stamp such as NOT PRIVATE across it.

    A text stands in small print below the title; the middle of a long one is left out.
    """
    # Pyplot would keep every figure, and needs a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    panel = figure.add_subplot()
    if text:
        text = f"{text[:92]} ... {text[-52:]}" if len(text) > 150 else text
        panel.set_title(textwrap.fill(text, 72), loc="left", fontsize=8, color="#6b7280")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    else:
        panel.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    panel.grid(True, color="#e5e7eb", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors=INK, labelsize=10)
    if stamp:
        watermark(panel, stamp)
    return panel


def curve(axes: Any, points: Sequence[tuple[float, float]], index: int, **style: Any) -> None:
    """Draws (x, y) points as the curve with this index among several, whose colours differ."""
    marker = MARKERS[index % len(MARKERS)] if len(points) < 25 else None
    usual = dict(color=COLOURS[index % len(COLOURS)], linewidth=2, marker=marker, markersize=3.5)
    axes.plot(*zip(*points, strict=True), **usual | style)


def labelled(axes: Any, x: str, y: str, *, legend: bool = False) -> Any:
    """The figure of the axes, which get names and, if wanted, a legend."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    if legend:
        axes.legend(frameon=False, fontsize=8.5)
    return axes.figure


def logarithmic(axes: Any) -> None:
    """Makes the vertical axis logarithmic; plain numbers at 1, 2, 5, 10, or evenly within ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    logs = LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,))
    axes.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else logs)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def plain(figure: Any) -> Any:
    """The figure with texts, which may be names of others, in which `$` begins no formula."""
    from matplotlib.text import Text

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    ticks = {label for axis in axes for label in axis.get_ticklabels(which="both")}
    for text in {*figure.findobj(Text)} - ticks:
        text.set(parse_math=False, text=printable(text.get_text(), "\n"))
    return figure


def ticks(axes: Any, values: Sequence[float]) -> None:
    """Marks these values on a finished picture's horizontal axis, without texts that touch."""
    axes.set_xticks(values, [f"{value:,}" for value in values])
    plain(axes.figure).draw_without_rendering()
    end = -math.inf
    for text in axes.get_xticklabels():
        box = text.get_window_extent()
        text.set_visible(box.x0 > end)
        end = box.x1 + 6 if box.x0 > end else end


def watermark(axes: Any, stamp: str) -> None:
    """Writes `stamp` across a picture, in pale red."""
    style = dict(ha="center", va="center", rotation=18, fontweight="bold", color=RED, alpha=0.14)
    axes.text(0.5, 0.5, stamp, transform=axes.transAxes, fontsize=30, **style)


def grid(title: str, images_NxHxWxC: np.ndarray, *, side: int, stamp: str = "") -> Any:
    """`side` x `side` uint8 images with a grey line between them; gray 0 is white."""
    missing = -len(images_NxHxWxC) % side
    framed = np.pad(images_NxHxWxC, ((0, missing), (1, 1), (1, 1), (0, 0)), constant_values=128)
    _, height, width, channels = framed.shape
    tiles = framed.reshape(-1, side, height, width, channels).transpose(0, 2, 1, 3, 4)
    panel = axes(title, width=4.2, height=4.5, stamp=stamp)
    # matplotlib ignores the colour map for images of three colours.
    panel.imshow(tiles.reshape(-1, side * width, channels), cmap="gray_r", vmin=0, vmax=255)
    panel.set_axis_off()
    return panel.figure


def bars(rows: Sequence[Mapping[str, Any]], stamp: str) -> Any:
    """A bar for each `Score.row`, nearest first.

    The part of "distance" beyond "corrected" is pale, and a line reaches from "low" to "high".
    """
    panel = axes("Frechet distance of the candidates", height=1.3 + 0.34 * len(rows), stamp=stamp)
    places, values = range(len(rows)), [row["distance"] for row in rows]
    panel.barh(places, values, color="#e5e7eb", height=0.66, label="made by the noise alone")
    corrected = [max(row["corrected"], 0.0) for row in rows]
    panel.barh(places, corrected, color=[ACCENT] + [PALE] * (len(rows) - 1), height=0.66)
    intervals = [row["low"] for row in rows], [row["high"] for row in rows]
    label = "interval of the distance without noise"
    panel.hlines(places, *intervals, color=INK, linewidth=1.4, label=label)
    for place, value in enumerate(values):
        at = max(value, 0.0), place
        panel.annotate(f" {value:.4g}", at, va="center", fontsize=8.5, color=INK)
    panel.figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=2)
    panel.set_yticks(places, [printable(row["candidate"]) for row in rows], parse_math=False)
    panel.invert_yaxis()
    panel.margins(x=0.14)
    panel.grid(False, axis="y")
    return labelled(panel, "FreD (less is nearer)", "")


def draw_mechanisms(path: Path, rows: Sequence[Mapping[str, Any]], terms: str) -> None:
    """Writes a PNG of `privacy.alternatives` rows: lines for sums, dashed ones for one round."""
    panel = axes("Noise by mechanism", terms, width=7.2, height=4.6)
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    for index, name in enumerate(names):
        own = [row for row in rows if row["mechanism"] == name]
        points = [(row["population"], row["noise_to_batch_ratio"]) for row in own]
        curve(panel, points, index, linestyle="--", linewidth=1.2)
        sums = [(row["population"], row["noise_of_sums"]) for row in own]
        known = [point for point in sums if point[1] is not None]
        label = f"{name} ({own[0]['adjacency'].replace('_', ' ')})"
        curve(panel, known or [(own[0]["population"], float("nan"))], index, label=label)
    panel.plot([], [], color=COLOURS[-1], linestyle="--", label="dashed: noise-to-batch ratio")
    panel.set_xscale("log")
    panel.minorticks_off()
    logarithmic(panel)
    labelled(panel, "clients", "noise of sums of means, in clip norms", legend=True)
    ticks(panel, sorted({row["population"] for row in rows}))
    files.make_directory(path.parent)
    panel.figure.savefig(path, format="png", metadata={"Software": None})
