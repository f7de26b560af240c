"""A picture of what was reached, beside the ceilings of the machine measured in the same run."""

import pathlib
from collections.abc import Mapping, Sequence

from benchmarks.comparison import Compared

UNITS = {"GFLOP/s": "matrix product", "GB/s": "plain read"}


def draw(
    path: pathlib.Path,
    results: Mapping[str, Sequence[Compared]],
    ceilings: Mapping[str, float],
    title: str,
) -> bool:
    """Writes a PNG with a bar for each rate in GFLOP/s or GB/s, and a line for its ceiling.

    Args:
      results: by benchmark, what it measured.
      ceilings: by unit, what the machine allows.

    Returns:
      Whether there was a bar to draw; without one, no file is written.
    """
    from matplotlib.figure import Figure

    bars = {
        unit: [
            (f"{name}: {each.setting}", each.now)
            for name, measures in results.items()
            for each in measures
            if each.unit == unit
        ]
        for unit in UNITS
    }
    shown = {unit: pairs for unit, pairs in bars.items() if pairs}
    if not shown:
        return False
    count = sum(len(pairs) for pairs in shown.values())
    figure = Figure(figsize=(10, 1.4 * len(shown) + 0.32 * count), layout="constrained")
    figure.suptitle(title)
    heights = [len(pairs) + 1.5 for pairs in shown.values()]
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (unit, pairs) in zip(axes, shown.items(), strict=True):
        ceiling = ceilings[unit]
        values = [value for _, value in pairs]
        axis.barh(range(len(pairs)), values, color="#3b6ea5")
        axis.axvline(ceiling, color="#b03a2e")
        axis.set_yticks(range(len(pairs)), [name for name, _ in pairs])
        axis.invert_yaxis()
        for place, value in enumerate(values):
            axis.annotate(
                f" {value:.3g} ({value / ceiling:.0%})", (value, place), va="center", fontsize=8
            )
        axis.set_xlim(0, 1.25 * max(ceiling, *values))
        axis.set_xlabel(f"{unit}; the line is a {UNITS[unit]}, {ceiling:.3g} {unit}")
    figure.savefig(path, dpi=130)
    return True
