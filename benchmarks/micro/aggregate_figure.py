"""docs/aggregation.png from the last rows of aggregate.jsonl of each size.

python -m benchmarks.micro.aggregate_figure docs/aggregation.png
"""

import sys
from typing import Any

from matplotlib.figure import Figure

from benchmarks import comparison
from benchmarks.harness import RESULTS
from jaxpfl.experiments.report.plots import ACCENT, INK

RED, GREY = "#c81e1e", "#6b7280"
RATES = (1, 2, 5, 10, 20, 50)
LINES = {"door": ("the door", ACCENT), "plain": ("a plain loop over the same chunks", RED)}
LEVELS = {"read": ("a read (the ceiling)", INK), "three lines": ("three lines of JAX", GREY)}


def sizes() -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """The last rows of each number of clients and coordinates, by what was measured."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for row in comparison.read(RESULTS / "aggregate.jsonl"):
        if row.get("function") == "stored":
            found.setdefault((row["clients"], row["coordinates"]), {})[row["what"]] = row
    return found


def main(path: str) -> None:
    every = sorted(sizes().items(), key=lambda pair: (pair[0][1], pair[0][0]))
    figure = Figure(figsize=(2.9 * len(every) + 0.6, 3.6), dpi=144, layout="constrained")
    panels = figure.subplots(1, len(every), squeeze=False, sharey=True)[0]
    for panel, ((clients, coordinates), rows) in zip(panels, every, strict=True):
        # Rates by processor time, which other programs disturb least.
        size = 4e-9 * clients * coordinates
        for level, (label, colour) in LEVELS.items():
            panel.axhline(size / rows[level]["usual"], color=colour, ls="--", lw=1, label=label)
        names = [name.partition("chunk ")[2] for name in rows if name.startswith("plain, chunk")]
        for line, (label, colour) in LINES.items():
            rates = [size / rows[f"{line}, chunk {name}"]["usual"] for name in names]
            panel.plot(range(len(names)), rates, marker="o", ms=4, color=colour, label=label)
        panel.set_xticks(range(len(names)), names)
        panel.set_yscale("log")
        panel.minorticks_off()
        panel.set_yticks(RATES, list(map(str, RATES)))
        panel.set_title(f"{clients:,} clients x {coordinates:,}", loc="left", fontsize=9.5)
        panel.set_xlabel("clients in a chunk")
        panel.grid(color="#e5e7eb")
    panels[0].set_ylabel("GB per processor second")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
