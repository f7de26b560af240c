"""Prints the newest rows of the compile check as tables; docs/scale.md has some of them.

python -m benchmarks.compile.summary
"""

import json
from typing import Any

from benchmarks import harness
from benchmarks.compile.programs import PROGRAMS
from benchmarks.compile.targets import TARGETS

RELEASE = ("exchange", "release", "gather")


def newest() -> list[dict[str, Any]]:
    """The last row of each program on each machine, in the order of the machines."""
    text = (harness.RESULTS / "compile.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [row for row in rows if row["system"] in PROGRAMS]
    last = {(row["target"], row["system"], row.get("program", "")): row for row in rows}
    compiled = {key[:2] for key, row in last.items() if "error" not in row}
    kept = [row for key, row in last.items() if "error" not in row or key[:2] not in compiled]
    machines, systems = list(TARGETS), list(PROGRAMS)
    return sorted(
        kept, key=lambda row: (machines.index(row["target"]), systems.index(row["system"]))
    )


def work_line(row: dict[str, Any]) -> str:
    """A program that trains, scores or generates."""
    memory, least = row["memory_bytes"], row["least_seconds"]
    share = memory["in_all"] / TARGETS[row["target"]].memory
    collectives = ", ".join(
        f"{kind} {found['bytes'] / 1e6:,.1f} MB"
        for kind, found in row["collectives"].items()
        if found["bytes"] > 1e5
    )
    return (
        f"| {row['target']} | {row['system']}, {row['program']} | {row['work']} | "
        f"{row['compile_cpu_s']:.0f} | {memory['arguments'] / 1e9:.2f} + "
        f"{memory['temporaries'] / 1e9:.2f} GB ({share:.0%}) | {collectives or 'none'} | "
        f"{least * 1e3:.1f} ms |"
    )


def release_line(parts: dict[str, dict[str, Any]]) -> str:
    """The programs of a release; during the exchange of a half, the other one is there as well."""
    first = parts["release"]
    other = first["memory_bytes"]["arguments"] / 2
    model = first["model_bytes"]
    sizes = {name: parts[name]["memory_bytes"]["in_all"] for name in RELEASE}
    sizes["exchange"] += other
    seconds = sum(parts[name]["compile_cpu_s"] for name in RELEASE)
    transfers = sum(parts[name]["host_transfers"] for name in RELEASE)
    share = ", ".join(f"{name} {sizes[name] / model:.1f}" for name in RELEASE)
    return (
        f"| {first['target']} | {first['system']} | {model / 1e6:,.1f} MB | {share} | "
        f"{seconds:.0f} | {transfers} |"
    )


def main() -> None:
    rows = newest()
    print(
        "| machine | program | work on a device | compile, CPU s | memory | collectives | least |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if "error" in row:
            print(f"| {row['target']} | {row['system']} | not compiled: {row['error']} | | | | |")
        elif row["program"] not in RELEASE:
            print(work_line(row))
    print()
    print("| machine | system | model | memory in models | compile, CPU s | host transfers |")
    print("|---|---|---|---|---|---|")
    parts: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row.get("program") in RELEASE:
            parts.setdefault((row["target"], row["system"]), {})[row["program"]] = row
    for found in parts.values():
        # A few numbers are padded to 512.
        if found["release"]["model_bytes"] > 1e6:
            print(release_line(found))


if __name__ == "__main__":
    main()
