"""The tables of peers in docs/performance.md, from the last stored runs that nothing disturbed."""

from pathlib import Path
from typing import Any

from benchmarks import comparison

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- peers: written by make peers -->", "<!-- /peers -->"

TITLES = {
    "client": (
        "A round of DP-FedAvg on the EMNIST CNN, 100 examples a client (ragged: 1 to 100). In "
        "plain JAX, DrJAX and jax_privacy, convolutions are written as products: XLA's are slow in "
        "loops."
    ),
    "example": (
        "A step of DP-SGD on the same network. Plain JAX and jax_privacy take one example after "
        "the other."
    ),
}

# The cohorts that the page has room for: a usual one, and a large one.
COHORTS = {"client": (50, 1_000), "example": (100,)}
# Processors that anything else may keep busy, at the median round of a program.
_MOST_FOREIGN = 0.2


def write(page: Path, results: Path) -> Path:
    """Replaces what is between the markers.

    Raises:
      SystemExit: The page has no markers.
    """
    text = page.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r} for the table")
    page.write_text(f"{before}{BEGIN}\n{rendered(results)}{END}{after}", encoding="utf-8")
    return page


def rendered(results: Path) -> str:
    """A table in Markdown for each unit of privacy, and a sentence on where it comes from.

    A cell has the median rate, and how many times as fast the first program is. Costs are of the
    smallest cohort that is shown.

    Beside other programs, ratios mislead: PyTorch's threads, which wait for each other at every
    product, lose most.
    """
    stored = comparison.read(results)
    return "\n".join(_table(title, unit, stored) for unit, title in TITLES.items())


def _table(title: str, unit: str, stored: list[dict[str, Any]]) -> str:
    # Each cohort is shown as it was last measured without disturbance, on the machine that has most
    # of them; of several, the last.
    runs: dict[tuple[str, bool, int], list[dict[str, Any]]] = {}
    for row in stored:
        if row.get("unit") == unit and row["cohort"] in COHORTS[unit]:
            runs.setdefault((row["date"], row["ragged"], row["cohort"]), []).append(row)
    quiet = [
        run for run in runs.values() if all(row.get("foreign", 0.0) <= _MOST_FOREIGN for row in run)
    ]
    if not quiet:
        return f"{title} Not measured on a quiet machine yet: `make peers` writes the table.\n"
    of_machine: dict[str, set[tuple[bool, int]]] = {}
    for row, *_ in reversed(quiet):
        of_machine.setdefault(row["machine"], set()).add((row["ragged"], row["cohort"]))
    machine = max(of_machine, key=lambda each: len(of_machine[each]))
    last = {
        (run[0]["ragged"], run[0]["cohort"]): run for run in quiet if run[0]["machine"] == machine
    }
    rows = [row for run in last.values() for row in run]
    dates = sorted({row["date"][:10] for row in rows})
    kinds = sorted({(row["ragged"], row["cohort"]) for row in rows})
    heads = [f"{cohort:,}{' ragged' if ragged else ''}" for ragged, cohort in kinds]
    lines = [
        f"{title}\n",
        f"| {unit}s a second, of: | {' | '.join(heads)} | CPU ms each | MB |",
        f"|---|{'---|' * (len(heads) + 2)}",
    ]
    ours = {(row["ragged"], row["cohort"]): row for row in rows if row["what"] == rows[0]["what"]}
    for what in dict.fromkeys(row["what"] for row in rows):
        of = {(row["ragged"], row["cohort"]): row for row in rows if row["what"] == what}
        rates = " | ".join(_rate(of[kind], ours.get(kind)) if kind in of else "" for kind in kinds)
        costs = " | "
        if measured := [kind for kind, row in of.items() if "left out" not in row]:
            least = of[min(measured)]
            costs = f"{least['cpu s each'] * 1000:,.1f} | {least['peak MB']:,.0f}"
        lines.append(f"| {what} | {rates} | {costs} |")
    foreign = max(row.get("foreign", 0.0) for row in rows)
    source = (
        f"\nOn {machine}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; other programs kept "
        f"up to {foreign:.1f} processors busy.\n"
    )
    return "\n".join(lines) + "\n" + source


def _rate(row: dict[str, Any], ours: dict[str, Any] | None) -> str:
    if "left out" in row or ours is None:
        return row.get("left out", "")
    return f"{row['median']:.1f}, {ours['median'] / row['median']:.2f}"
