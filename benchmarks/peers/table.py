"""README's tables of peers, from the rows of the last stored runs that nothing disturbed."""

from pathlib import Path
from typing import Any

from benchmarks import comparison

BEGIN, END = "<!-- peers: written by make peers -->", "<!-- /peers -->"

TITLES = {
    "client": (
        "A round of DP-FedAvg on the EMNIST CNN, 100 examples a client (ragged: 1 to 100). The "
        "model is each library's ordinary code, except in plain JAX, DrJAX and jax_privacy, whose "
        "convolutions are written as products because XLA's are slow in loops."
    ),
    "example": (
        "A step of DP-SGD on the same network, where each example's gradient is clipped. Plain JAX "
        "and jax_privacy take one example after the other."
    ),
}

# Processors that anything else may keep busy, at the median round of a program.
_MOST_FOREIGN = 0.2


def write(readme: Path, results: Path) -> Path:
    """Replaces what is between the markers.

    Raises:
      SystemExit: README has no markers.
    """
    text = readme.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise SystemExit(f"{readme} has no lines {BEGIN!r} and {END!r} for the table")
    readme.write_text(f"{before}{BEGIN}\n{rendered(results)}{END}{after}", encoding="utf-8")
    return readme


def rendered(results: Path) -> str:
    """A table in Markdown for each unit of privacy, and a sentence on where it comes from.

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
        if row.get("unit") == unit:
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
    heads = [f"{cohort}{' ragged' if ragged else ''}" for ragged, cohort in kinds]
    lines = [
        f"{title}\n",
        f"| {unit}s a second, of: | {' | '.join(heads)} | CPU ms each | MB | first round s |",
        f"|---|{'---|' * (len(heads) + 3)}",
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        of = {(row["ragged"], row["cohort"]): row for row in rows if row["what"] == what}
        rates = " | ".join(_rate(of[kind]) if kind in of else "" for kind in kinds)
        costs = " | | "
        if measured := [kind for kind, row in of.items() if "left out" not in row]:
            least = of[min(measured)]
            costs = f"{least['cpu s each'] * 1000:,.1f} | {least['peak MB']:,.0f} | "
            costs += f"{least['start s'] + least['first round s']:.1f}"
        lines.append(f"| {what} | {rates} | {costs} |")
    foreign = max(row.get("foreign", 0.0) for row in rows)
    source = (
        "\nThe best round of several by turns, the median in brackets, and how many times as fast "
        f"the best of {rows[0]['what']} is (below 1: slower), on {machine}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. "
        "The last three columns are of the smallest cohort; the first round includes the start of "
        f"the process. Other programs kept up to {foreign:.1f} processors busy meanwhile.\n"
    )
    return "\n".join(lines) + "\n" + source


def _rate(row: dict[str, Any]) -> str:
    if "left out" in row:
        return row["left out"]
    return f"{row['a second']:.1f} ({row['median']:.1f}), {row['ratio']:.2f}"
