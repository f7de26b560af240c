"""The picture of `jaxpfl calibrate --check-in-rate`: noise by mechanism and number of clients."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.report.plots import COLOURS, axes, curve, labelled, logarithmic, ticks


def draw(path: Path, rows: Sequence[Mapping[str, Any]], terms: str) -> None:
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
