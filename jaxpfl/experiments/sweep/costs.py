"""What each point of a sweep took: its noise and what clients send, and, PRIVATE, its time.

    private/costs.csv      a row for each finished point; times depend on what sampled clients hold

Noise and planned uploads follow from the config, and are public: `sweep.json` and the page have
them.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.sweep.directory import PointFolder

_BYTES = 4  # of a coordinate, float32


def write_costs(
    out: Path, points: Sequence[dict[str, Any]], folders: Sequence[PointFolder]
) -> None:
    """Adds the public costs to finished points of `sweep.json`, and writes the private table."""
    rows = []
    for point, folder in zip(points, folders, strict=True):
        if point["state"] == "finished":
            public = planned(folder.path)
            point |= public
            rows.append({"point": point["point"], **public, **taken(folder.path)})
    if rows:
        path = files.private_directory(out / "private") / "costs.csv"
        write_csv(path, rows, mode=0o600)


def write_csv(path: Path, rows: Sequence[dict[str, Any]], *, mode: int = 0o644) -> None:
    """Writes rows of the same names as a table, whole or not at all."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_atomically(path, buffer.getvalue(), mode=mode)


def planned(folder: Path) -> dict[str, float | None]:
    """What a point's plans say of its clients' releases; public.

    Returns:
      "uploads", the bytes that the planned clients of all rounds send; and "noise_multiplier", of
      the query to which they send most. None where plans are for examples, which nobody uploads,
      or nothing was released.
    """
    sent: list[tuple[int, float]] = []
    for run, rounds in _runs(folder):
        coordinates = {line["query"]: line["coordinates"] for line in rounds}
        for query in run["queries"]:
            plan = query["plan"]
            if query["label"] in coordinates and plan["unit"] == "client":
                clients = plan["clients_per_round"] * plan["rounds"]
                size = _BYTES * clients * coordinates[query["label"]]
                sent.append((size, plan["noise_multiplier"]))
    if not sent:
        return {"noise_multiplier": None, "uploads": None}
    return {"noise_multiplier": max(sent)[1], "uploads": sum(size for size, _ in sent)}


def taken(folder: Path) -> dict[str, float | None]:
    """What a point's releases took; PRIVATE.

    Returns:
      "seconds", from a run's beginning to its last release, with compilation and what is done
      between releases, over all runs of the point; and "clients_a_second" without the first
      release of each run, which compiles.
    """
    seconds, later, clients = 0.0, 0.0, 0
    for _, rounds in _runs(folder):
        # A run that was resumed counts from its resumption on, and compiles again.
        for before, line in zip([{"seconds": math.inf}, *rounds], rounds, strict=False):
            first = line["seconds"] < before["seconds"]
            took = line["seconds"] - (0.0 if first else before["seconds"])
            seconds += took
            later, clients = later + took * (not first), clients + line["clients"] * (not first)
    return {"seconds": seconds or None, "clients_a_second": clients / later if later else None}


def _runs(folder: Path) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each run of a point, and its private record of releases."""
    for path in sorted(folder.rglob("private/rounds.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        yield files.read_record(path.parents[1] / "run.json"), [json.loads(line) for line in lines]
