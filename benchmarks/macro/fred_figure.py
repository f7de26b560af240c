"""docs/fred_figure2.png from the rows of fred_figure2.jsonl, of the sweep `fred_resolution`.

python -m benchmarks.macro.fred_figure docs/fred_figure2.png
"""

import sys
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import comparison
from benchmarks.harness import RESULTS
from jaxpfl.experiments.report.plots import ACCENT, INK, RED

# Case of the sweep, colour, marker, and how far aside its bars stand.
EXACT = ("epsilon_0.6", "(0.6, 2e-6)", ACCENT, "o", -0.04)
PAPER = ("Algorithm_1,_which_states_0.6", "states 0.6,\nREALISES 212.3", RED, "s", 0.0)
FREE = ("without_privacy", "without privacy", INK, "^", 0.04)
PANELS = (
    ("0 to 100 %", 0, (FREE, EXACT)),
    ("95 to 100 %", 95, (FREE, EXACT)),
    ("by Algorithm 1 as printed", 0, (PAPER,)),
)


def curves(rows: list[dict[str, Any]], case: str, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The shares in % from `least` on, [shares], and FreD by them, [runs, shares]."""
    found = [row["metrics"]["fred"] for row in rows if row["what"].startswith(f"case={case},")]
    shares = sorted(share for share in (int(key[:-1]) for key in found[0]) if share >= least)
    return np.array(shares), np.array([[run[f"{share}%"] for share in shares] for run in found])


def drawn(rows: list[dict[str, Any]]) -> Figure:
    """FreD by the share of the near corpus; bars are standard deviations over the runs."""
    figure = Figure(figsize=(10.5, 3.4), dpi=144, layout="constrained")
    for axes, (title, least, arms) in zip(figure.subplots(1, 3), PANELS, strict=True):
        for case, label, colour, marker, aside in arms:
            shares, fred_RxS = curves(rows, case, least)
            axes.errorbar(
                shares + (aside if least else 0),
                fred_RxS.mean(0),
                fred_RxS.std(0, ddof=1),
                fmt=f"{marker}-",
                ms=4,
                capsize=3,
                color=colour,
                label=label,
            )
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
        axes.set_xlabel("share of the near corpus, %")
        axes.set_ylabel("FreD")
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5)
    return figure


if __name__ == "__main__":
    drawn(comparison.read(RESULTS / "fred_figure2.jsonl")).savefig(sys.argv[1])
