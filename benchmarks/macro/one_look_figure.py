"""docs/one_look.png from the rows of one_look.jsonl with the noise of 72,000 clients.

python -m benchmarks.macro.one_look_figure docs/one_look.png
"""

import sys
from typing import Any

from matplotlib.figure import Figure

from benchmarks import comparison
from benchmarks.harness import RESULTS
from jaxpfl.experiments.report.plots import ACCENT, GREY, INK, RED

PANELS = {
    "frechet": "Frechet distance (MiniLM, which rewards use)",
    "hashed": "Frechet distance (hashed words)",
    "recall": "recall, of 5 neighbours (MiniLM)",
    "nats": "loss on held-out private text, nats a token",
}
# Told apart by the colour-blind, and by marker and line in grey.
ARMS = {
    "one_look": ("one look", ACCENT, "o-"),
    "popri": ("POPri's scores", RED, "s--"),
    "pe": ("private evolution", "#d97706", "^-."),
    "random": ("random scores", GREY, "x:"),
}


def rows() -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """The last row of each arm and seed, by round; round 0 is the untuned model."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in comparison.read(RESULTS / "one_look.jsonl"):
        if row["simulate"] == 72_000 and row.get("tuned_by") == "dpo" and row["epsilon"] == 7:
            found.setdefault((row["arm"], row["seed"]), {})[row["round"]] = row
    return found


def main(path: str) -> None:
    every = rows()
    untuned, floor = every.pop(("untuned", 0))[0], every.pop(("floor", 0))[0]
    figure = Figure(figsize=(10.5, 6.0), dpi=144, layout="constrained")
    for axes, (measure, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for (arm, seed), by_round in sorted(every.items()):
            label, colour, style = ARMS[arm]
            points = {0: untuned, **by_round}
            shown = sorted(n for n in points if measure in points[n])
            axes.plot(
                shown,
                [points[n][measure] for n in shown],
                style,
                ms=4.5,
                color=colour,
                label=label if seed == 0 else None,
            )
        if measure in floor:
            axes.axhline(floor[measure], color=INK, ls="--", lw=1, label="real text")
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel("rounds")
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("SIMULATED: the noise of 72,000 clients at epsilon 7", fontsize=9, color=RED)
    figure.axes[0].legend(frameon=False, fontsize=8.5)
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main(sys.argv[1])
