"""Prints the newest rows of the compile check as the table of docs/scale.md.

python -m benchmarks.compile.summary
"""

import json
from typing import Any

from benchmarks import harness
from benchmarks.compile.programs import PROGRAMS
from benchmarks.compile.targets import TARGETS


def newest() -> list[dict[str, Any]]:
    """The last row of each program on each machine, in the order of the machines."""
    text = (harness.RESULTS / "compile.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    last = {(row["target"], row["system"], row.get("program", "")): row for row in rows}
    compiled = {key[:2] for key, row in last.items() if "error" not in row}
    kept = [row for key, row in last.items() if "error" not in row or key[:2] not in compiled]
    machines, systems = list(TARGETS), list(PROGRAMS)
    return sorted(
        kept, key=lambda row: (machines.index(row["target"]), systems.index(row["system"]))
    )


def line_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['target']} | {row['system']} | not compiled: {row['error']} | | | | |"
    memory, share = row["memory_bytes"], row["memory_bytes"]["in_all"]
    limit = TARGETS[row["target"]].memory
    collectives = ", ".join(
        f"{kind} {found['bytes'] / 1e6:,.1f} MB" for kind, found in row["collectives"].items()
    )
    least = row["least_seconds"]
    return (
        f"| {row['target']} | {row['system']} | {row['program']} | {row['compile_cpu_s']:.0f} | "
        f"{memory['arguments'] / 1e9:.2f} + {memory['temporaries'] / 1e9:.2f} GB "
        f"({share / limit:.0%}) | {collectives or 'none'} | "
        f"{f'{least * 1e3:.1f} ms' if least > 5e-5 else ''} |"
    )


def main() -> None:
    print("| machine | system | program | compile, CPU s | memory | collectives | least time |")
    print("|---|---|---|---|---|---|---|")
    for row in newest():
        print(line_of(row))


if __name__ == "__main__":
    main()
