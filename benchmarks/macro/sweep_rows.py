"""Appends the finished points of a sweep to benchmarks/results/NAME.jsonl, a row for each point.

    python -m benchmarks.macro.sweep_rows runs/popri_table popri_table
    python -m benchmarks.macro.sweep_rows runs/gan_random gan_inversion     a run is one row
    python -m benchmarks.macro.sweep_rows runs/image clients_per_round_memory --memory

A row has what differs between the points, what came out and what it took, with device, versions and
today's date: a run's own files have none, because the times of rounds are private. So a row is for
clients whose data is public. A sweep that was stopped gives the rows of the points it finished.
The row of a run has its whole config.

The points of a sweep share a process, whose peak memory only rises. With --memory each point is
therefore carried out again, by a process of its own, and the row says what that one needed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro
import yaml

from benchmarks.harness import record, table
from jaxpfl import files
from jaxpfl.experiments.config.reader import read_mapping
from jaxpfl.experiments.records.lines import leaves
from jaxpfl.experiments.sweep import results
from jaxpfl.experiments.sweep.directory import POINTS
from jaxpfl.experiments.systems import CONFIG, RESULT, SIMULATION

_ALWAYS = ("data.source", "training.rounds")
_KEPT = ("metrics", "accuracy", "classifier", "runs", "corpus", "corpus_fid", "fred", "worlds")


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """The rows of the finished points, in the order of their names."""
    found = []
    points = [finished.parent for finished in sorted((directory / POINTS).glob("*/point.json"))]
    for folder in points or [directory]:
        result = files.read_json(folder / RESULT)
        # FreD's other candidates are simulations, beside the result.
        if (simulated := folder / SIMULATION).exists():
            result["fred"] = files.read_json(simulated)["fred"]
        kept = {name: result[name] for name in (*_KEPT, "privacy") if result.get(name) is not None}
        found.append(
            {
                "what": folder.name,
                "config": read_mapping(folder / CONFIG),
                **kept,
                **results.planned_cost(folder),
                **results.time_taken(folder),
                "checkpoint": result.get("checkpoint"),
                "fid by round": [entry["fid"] for entry in result.get("history", [])],
            }
        )
    return found


def without_common(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with those fields of their configs that differ, and the source and the rounds."""
    flat = [leaves(row["config"], ".") for row in rows]
    names = {name for each in flat for name in each}
    varied = [
        name
        for name in sorted(names)
        if name in _ALWAYS
        or len(rows) == 1
        or len({yaml.dump(each.get(name)) for each in flat}) > 1
    ]
    return [
        {**row, "config": {name: each[name] for name in varied if name in each}}
        for row, each in zip(rows, flat, strict=True)
    ]


def peak_mb(config: Path) -> float:
    """The peak resident memory in MB of a process that carries out this config alone."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxpfl", "run", str(config), "--out", f"{folder}/run"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{config} does not run alone")
    return usage.ru_maxrss / 1024


def main(
    sweep: tyro.conf.Positional[Path], name: tyro.conf.Positional[str], memory: bool = False
) -> None:
    """Appends the points of a sweep, or a run.

    Args:
      sweep: the directory of the sweep or the run.
      name: of the file in benchmarks/results, without its suffix.
      memory: measures the peak memory of each point of a sweep, in a process of its own.
    """
    rows = without_common(rows_of(sweep))
    if memory:
        for row in rows:
            row["peak MB"] = peak_mb(sweep / POINTS / row["what"] / CONFIG)
    shown = [{**row, "accuracy": row["metrics"].get("accuracy")} for row in rows]
    columns = ["what", "accuracy", "noise_multiplier", "uploads", "seconds", "clients_a_second"]
    table(shown, [*columns, "peak MB"] if memory else columns)
    print(record(name, rows))


if __name__ == "__main__":
    tyro.cli(main)
