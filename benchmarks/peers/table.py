"""README's table of peers, from the rows of the last stored run that nothing disturbed."""

import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- peers: written by make peers -->", "<!-- /peers -->"

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
    """The table in Markdown, and a sentence on where it comes from.

    Beside other programs, ratios mislead: PyTorch's threads, which wait for each other at every
    product, lose most.
    """
    stored = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    disturbed = {row["date"] for row in stored if row.get("foreign", 0.0) > _MOST_FOREIGN}
    quiet = [row for row in stored if row["date"] not in disturbed]
    if not quiet:
        return "Not measured on a quiet machine yet: `make peers` writes the table.\n"
    rows = [row for row in quiet if row["date"] == quiet[-1]["date"]]
    kinds = sorted({(row["ragged"], row["cohort"]) for row in rows})
    heads = [f"{cohort}{' ragged' if ragged else ''}" for ragged, cohort in kinds]
    lines = [
        f"| clients/s, cohort: | {' | '.join(heads)} | CPU s a client | MB | first round s |",
        f"|---|{'---|' * (len(heads) + 3)}",
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        of = {(row["ragged"], row["cohort"]): row for row in rows if row["what"] == what}
        rates = " | ".join(_rate(of[kind]) if kind in of else "" for kind in kinds)
        least = of[min(kind for kind, row in of.items() if "left out" not in row)]
        lines.append(
            f"| {what} | {rates} | {least['cpu s/client']:.3f} | {least['peak MB']:,.0f} | "
            f"{least['start s'] + least['first round s']:.1f} |"
        )
    foreign = max(row.get("foreign", 0.0) for row in rows)
    source = (
        "\nThe best round of several by turns, the median in brackets, and how many times as fast "
        f"our best is (below 1, it is slower), on {rows[0]['machine']}, {rows[0]['date'][:10]}. "
        "The last three columns are of the first cohort; the first round includes the start of the "
        f"process. Other programs kept up to {foreign:.1f} processors busy meanwhile.\n"
    )
    return "\n".join(lines) + "\n" + source


def _rate(row: dict[str, Any]) -> str:
    if "left out" in row:
        return row["left out"]
    return f"{row['clients/s']:.1f} ({row['median']:.1f}), {row['ratio']:.2f}"
