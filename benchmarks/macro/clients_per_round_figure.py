"""docs/clients_per_round.png from the rows of clients_per_round.jsonl, of the sweep of that name.

python -m benchmarks.macro.clients_per_round_figure docs/clients_per_round.png
"""

import sys
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import comparison
from benchmarks.harness import RESULTS
from jaxpfl.experiments.report.plots import ACCENT, GREY, INK, labelled
from jaxpfl.experiments.report.plots import axes as new_axes

ARMS = {"POPri": ("#059669", "^-"), "DP-FedAvg": (ACCENT, "o-"), "DP-FTRL": ("#d97706", "s--")}


def drawn(rows: list[dict[str, Any]]) -> Figure:
    """Accuracy by clients per round; bars are standard deviations over the seeds."""
    panel = new_axes("Accuracy by clients per round, epsilon 7", width=7.2, height=4.2)
    for arm, (colour, style) in ARMS.items():
        found: dict[int, list[float]] = {}
        for row in rows:
            if row["what"].startswith(f"case={arm},"):
                size = row["config"]["training.clients_per_round"]
                found.setdefault(size, []).append(100 * row["metrics"]["accuracy"])
        means, deviations = zip(
            *((np.mean(found[size]), np.std(found[size], ddof=1)) for size in sorted(found)),
            strict=True,
        )
        panel.errorbar(
            sorted(found), means, deviations, fmt=style, color=colour, capsize=3, label=arm
        )
    untuned = [row["metrics"] for row in rows if row["what"].startswith("case=untuned_generator,")]
    panel.axhline(
        100 * float(np.mean([each["accuracy"] for each in untuned])),
        color=INK,
        ls=":",
        label="untuned generator, epsilon 0",
    )
    panel.axhline(
        100 * untuned[0]["public_accuracy"], color=GREY, ls="--", label="public model, epsilon 0"
    )
    panel.set_xscale("log")
    ticks = [50, 100, 200, 500, 1000, 2000]
    panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=9, loc="lower right")
    return labelled(panel, "clients per round", "next-token accuracy, %")


if __name__ == "__main__":
    drawn(comparison.read(RESULTS / "clients_per_round.jsonl")).savefig(sys.argv[1])
