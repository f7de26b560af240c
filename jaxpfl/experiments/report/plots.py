"""Building blocks of all pictures: axes, titles, stamps, and grids of images."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpfl.printable import printable

INK, ACCENT, RED, PALE, GREY = "#1f2937", "#2563eb", "#c81e1e", "#93c5fd", "#9ca3af"
_WATERMARK: dict[str, Any] = dict(
    ha="center", va="center", rotation=18, fontweight="bold", color=RED, alpha=0.14
)
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#475569")


def axes(title: str, *, width: float = 4.8, height: float = 3.1, stamp: str = "") -> Any:
    """One set of axes on a figure of its own, with a stamp such as NOT PRIVATE across it."""
    # Not pyplot, which keeps every figure and needs a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    found = figure.add_subplot()
    found.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    found.grid(True, color="#e5e7eb", linewidth=0.8)
    found.set_axisbelow(True)
    found.spines[["top", "right"]].set_visible(False)
    found.tick_params(colors=INK, labelsize=10)
    if stamp:
        watermark(found, stamp)
    return found


def labelled(axes: Any, x: str, y: str) -> Any:
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    return axes.figure


def logarithmic(axes: Any) -> None:
    """Makes the vertical axis of what is drawn logarithmic, with plain numbers that stand apart:
    at 1, 2, 5, 10, 20 and so on or, within less than a power of ten, evenly."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    even = (
        MaxNLocator(5)
        if high < 10 * low
        else LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,))
    )
    axes.yaxis.set_major_locator(even)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def plain(figure: Any) -> Any:
    """The figure with texts, which may be names of others, in which `$` begins no formula."""
    from matplotlib.text import Text

    ticks = [
        each
        for panel in figure.axes
        for axis in (panel.xaxis, panel.yaxis)
        for each in axis.get_ticklabels(which="both")
    ]
    for text in {*figure.findobj(Text)} - {*ticks}:
        text.set(parse_math=False, text=printable(text.get_text(), "\n"))
    return figure


def ticks(axes: Any, values: Sequence[float]) -> None:
    """Marks these values on the horizontal axis of a finished picture; texts that would touch the
    one before them are left out."""
    axes.set_xticks(values, [f"{value:,}" for value in values])
    plain(axes.figure).draw_without_rendering()
    end = -math.inf
    for text in axes.get_xticklabels():
        box = text.get_window_extent()
        text.set_visible(box.x0 > end)
        end = box.x1 + 6 if box.x0 > end else end


def watermark(axes: Any, stamp: str) -> None:
    """Writes `stamp` across a picture, in pale red."""
    axes.text(0.5, 0.5, stamp, transform=axes.transAxes, fontsize=30, **_WATERMARK)


def subtitle(axes: Any, title: str, text: str) -> None:
    """Sets a title and below it a smaller text, which is shortened in the middle if too long."""
    if len(text) > 150:
        text = f"{text[:92]} ... {text[-52:]}"
    axes.set_title(textwrap.fill(text, 72), loc="left", fontsize=8, color="#6b7280")
    axes.figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)


def grids(blocks: list[list[tuple[str, np.ndarray]]], *, side: int, stamp: str = "") -> Any:
    """Grids of `side` x `side` uint8 images [N, H, W, C], each with a title; gray 0 is white."""
    from matplotlib.figure import Figure

    rows, columns = len(blocks), max(len(row) for row in blocks)
    figure = Figure(figsize=(4.2 * columns, 4.5 * rows), dpi=120, layout="constrained")
    for row, contents in enumerate(blocks):
        for column, (title, images) in enumerate(contents):
            panel = figure.add_subplot(rows, columns, row * columns + column + 1)
            # Of three colours, matplotlib ignores the other arguments.
            panel.imshow(_mosaic(images[: side * side], side), cmap="gray_r", vmin=0, vmax=255)
            panel.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
            panel.set_axis_off()
    if stamp:
        figure.text(0.5, 0.5, stamp, fontsize=44, **_WATERMARK)
    return figure


def _mosaic(images_NxHxWxC: np.ndarray, side: int) -> np.ndarray:
    """Images side by side with a grey line between them: uint8 [rows, columns, C]."""
    missing = -len(images_NxHxWxC) % side
    framed = np.pad(images_NxHxWxC, ((0, missing), (1, 1), (1, 1), (0, 0)), constant_values=128)
    _, height, width, channels = framed.shape
    tiles = framed.reshape(-1, side, height, width, channels).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(-1, side * width, channels)


def bars(rows: Sequence[Mapping[str, Any]], stamp: str) -> Any:
    """A bar for each `Score.row`, nearest first.

    The part of "distance" beyond "corrected" is pale, and a line reaches from "low" to "high".
    """
    panel = axes("Frechet distance of the candidates", height=1.3 + 0.34 * len(rows), stamp=stamp)
    places, values = range(len(rows)), [row["distance"] for row in rows]
    panel.barh(places, values, color="#e5e7eb", height=0.66, label="made by the noise alone")
    corrected = [max(row["corrected"], 0.0) for row in rows]
    colours = [ACCENT if place == 0 else PALE for place in places]
    panel.barh(places, corrected, color=colours, height=0.66)
    for place, row in zip(places, rows, strict=True):
        label = "interval of the distance without noise" if place == 0 else None
        panel.plot([row["low"], row["high"]], [place, place], color=INK, lw=1.4, label=label)
        at = max(row["distance"], 0.0), place
        panel.annotate(f" {row['distance']:.4g}", at, va="center", fontsize=8.5, color=INK)
    panel.figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=2)
    names = [printable(row["candidate"]) for row in rows]
    panel.set_yticks(list(places), names, parse_math=False)
    panel.invert_yaxis()
    panel.margins(x=0.14)
    panel.set_xlabel("FreD (less is nearer)", color=INK)
    panel.grid(False, axis="y")
    return panel.figure
