"""Appends the finished points of a sweep to benchmarks/results/NAME.jsonl, a row for each point.

    python -m benchmarks.macro.sweep_rows runs/popri_table popri_table
    python -m benchmarks.macro.sweep_rows runs/gan_random gan_inversion     a run is one row

A row has what differs between the points, what came out and what it took, with device, versions and
today's date: a run's own files have none, because the times of rounds are private. So a row is for
clients whose data is public. A sweep that was stopped gives the rows of the points it finished.
The row of a run has its whole config.
"""

from pathlib import Path
from typing import Any

import tyro
import yaml

from benchmarks.harness import record, table
from jaxpfl import files
from jaxpfl.experiments.config.reader import read_mapping
from jaxpfl.experiments.sweep import costs
from jaxpfl.experiments.sweep.directory import POINTS
from jaxpfl.experiments.systems import CONFIG, RESULT

_ALWAYS = ("data.source", "training.rounds")


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """The rows of the finished points, in the order of their names."""
    found = []
    points = [finished.parent for finished in sorted((directory / POINTS).glob("*/point.json"))]
    for folder in points or [directory]:
        result = files.read_json(folder / RESULT)
        wanted = ("metrics", "accuracy", "classifier", "corpus", "corpus_fid", "privacy")
        kept = {name: result[name] for name in wanted if name in result}
        found.append(
            {
                "what": folder.name,
                "config": read_mapping(folder / CONFIG),
                **kept,
                **costs.planned(folder),
                **costs.taken(folder),
                "checkpoint": result.get("checkpoint"),
                "fid by round": [entry["fid"] for entry in result.get("history", [])],
            }
        )
    return found


def without_common(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with those fields of their configs that differ, and the source and the rounds."""
    flat = [_flat(row["config"]) for row in rows]
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


def _flat(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in mapping.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def main(sweep: tyro.conf.Positional[Path], name: tyro.conf.Positional[str]) -> None:
    """Appends the points of a sweep, or a run.

    Args:
      sweep: the directory of the sweep or the run.
      name: of the file in benchmarks/results, without its suffix.
    """
    rows = without_common(rows_of(sweep))
    shown = [{**row, "accuracy": row["metrics"].get("accuracy")} for row in rows]
    table(shown, ["what", "accuracy", "noise_multiplier", "uploads", "seconds", "clients_a_second"])
    print(record(name, rows))


if __name__ == "__main__":
    tyro.cli(main)
