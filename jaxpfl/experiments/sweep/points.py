"""Carries out all points of a sweep in one process and compares them in a table and a plot.

    sweep.yaml             the config of every point
    points/NAME/           the run of a point, with its own ledger, report and result.json
    table.csv, sweep.json  the metric of each point; mean and standard error over repetitions, of
                           the metric and of the gap closed
    report.html, pictures/

The points share compiled programs, which depend on shapes and not on the noise. A finished point is
not repeated. An interrupted point is resumed, and ends in the same bits.

A sweep is a SIMULATION: each point spends its own epsilon on the same clients, on a ledger of its
own. Whoever publishes several points has released all of them, and the report says so.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.report.cautions import of_points
from jaxpfl.experiments.sweep.config import CASE, Point, Sweep
from jaxpfl.experiments.systems.base import CONFIG, RESULT
from jaxpfl.progress import Progress

POINTS = "points"
SIMULATION = (
    "SIMULATION: every point spent its own epsilon on the same clients, on a ledger of its own. "
    "What is published of several points costs the sum of them."
)


@dataclass(frozen=True)
class SweepOutcome:
    """The result of a sweep in the directory `out`.

    Each combination of values has a row over all its repetitions: the values, "mean", "error"
    (standard error of the mean; None for a single run), "runs", and in a sweep with a gap "gap" and
    "gap_error" in per cent, which are None where there is no gap. `cautions` are warnings such as
    that all points end worse than word frequencies. `scored_on` names the data of the metric, point
    by point, and `baselines` are the rows of the function of this name.
    """

    out: Path
    rows: list[dict[str, Any]]
    cautions: list[str]
    scored_on: list[str]
    baselines: list[dict[str, Any]]


def run_sweep(sweep: Sweep, out: str | Path, *, progress: bool = True) -> SweepOutcome:
    """Carries out the unfinished points of `sweep` in the directory `out`.

    Raises:
      InputError: `out` holds another sweep, or the result of a point lacks the metric.
      CorruptFile: the result of a finished point was altered.
      Interrupted: SIGINT or SIGTERM was received; the same call continues the sweep.
    """
    directory = Path(out)
    with files.exclusive(directory), _begun(directory, sweep):
        results = []
        memory: dict[Any, Any] = {}
        label, total = f"sweep {sweep.title}", len(sweep.points)
        with Progress(label, total=total, progress=progress, step="point") as bar:
            for number, point in enumerate(sweep.points, 1):
                bar.message(f"point {number} of {total}: {point.name}")
                results.append(
                    _carried_out(point, directory / POINTS / point.name, memory, sweep.title)
                )
                bar.update(number)
        values = [value_of(result, sweep.metric) for result in results]
        rows = summary(sweep, values, [is_private(result) for result in results])
        _write(directory, sweep, results, rows)
    scored = [scored_on(result, sweep.metric) for result in results]
    beside = baselines(results, sweep.metric)
    return SweepOutcome(directory, rows, of_points(results), scored, beside)


def _carried_out(point: Point, folder: Path, memory: dict[Any, Any], sweep: str) -> dict[str, Any]:
    """The result.json of a point, which is carried out unless it is finished."""
    result, finished = folder / RESULT, folder / "point.json"
    if not finished.exists():
        command = f"a point of the sweep {sweep}"
        if (folder / CONFIG).exists():
            carry_out.resume(folder, progress=False, memory=memory, command=command)
        else:
            carry_out.run(point.config, folder, progress=False, memory=memory, command=command)
        files.write_json(finished, {"sha256": files.sha256_file(result)})
    if files.sha256_file(result) != files.read_json(finished)["sha256"]:
        raise CorruptFile(
            f"{result}: was altered after the point was finished: it does not match the SHA-256 in "
            f"{finished.name}; delete that file to resume the point"
        )
    return files.read_json(result)


def value_of(result: Mapping[str, Any], metric: str) -> float:
    """The value of a metric in a point's "metrics", which include those of an evaluation.

    Raises:
      InputError: there is no such number; the message lists those that exist.
    """
    known: dict[str, float] = {}

    def add(mapping: Mapping[str, Any]) -> None:
        for name, value in mapping.items():
            if isinstance(value, Mapping):
                add(value)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                known[name] = float(value)

    add(result.get("metrics", {}))
    if metric not in known:
        raise InputError(
            f"metric must be a number in the points' results, one of {', '.join(sorted(known))}, "
            f"found {metric!r}"
        )
    return known[metric]


def scored_on(result: Mapping[str, Any], metric: str) -> str:
    """Names the data that a point's metric was measured on; "" where it is none of data."""
    if metric in ("epsilon", "round", "clip_norm", "update_norm"):
        return ""
    if metric in (result["metrics"].get("evaluation") or {}):
        return result.get("evaluated_on") or ""
    return result.get("tested_on") or ""


def baselines(results: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """What the points' results compare their runs with, such as the untrained model and word
    frequencies: "model", "value" of the metric, "scored_on", and how many "points" have this row.

    The runs' own rows are there too, as "this run", with the mean over the points: their scores on
    the same data, which need not be the data of the sweep's metric. Empty where no row has it.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for result in results:
        for row in result.get("table") or ():
            if row.get(metric) is not None:
                scored = str(result.get("tested_on") or "")
                found.setdefault((row["model"], scored), []).append(float(row[metric]))
    return [
        {
            "model": model,
            "scored_on": name,
            "value": _mean_and_error(values)[0],
            "points": len(values),
        }
        for (model, name), values in found.items()
    ]


def summary(sweep: Sweep, values: list[float], private: list[bool]) -> list[dict[str, Any]]:
    """Returns the rows of `SweepOutcome`, and under "private" whether all runs of one are private.

    Args:
      values, private: the metric of each point and whether it is private, in their order.
    """
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for index, point in enumerate(sweep.points):
        kept = {name: each for name, each in point.values.items() if name != sweep.over}
        groups.setdefault(repr(kept), (kept, []))[1].append(index)
    closed = gap_closed(sweep, values) if sweep.gap is not None else None
    rows = []
    for kept, found in groups.values():
        mean, error = _mean_and_error([values[index] for index in found])
        row = {**kept, "mean": mean, "error": error, "runs": len(found)}
        if closed is not None:
            gaps = [gap for index in found if (gap := closed[index]) is not None]
            whole = len(gaps) == len(found)
            row["gap"], row["gap_error"] = _mean_and_error(gaps) if whole else (None, None)
        rows.append({**row, "private": all(private[index] for index in found)})
    return rows


def gap_closed(sweep: Sweep, values: list[float]) -> list[float | None]:
    """How much of the gap each point closes, in per cent: `from` closes 0 and `to` closes 100.

    None where both cases have the same metric at the point's other values, or a value is infinite.
    """
    assert sweep.gap is not None

    def others(point: Point) -> str:
        return repr({name: each for name, each in point.values.items() if name != CASE})

    ends: dict[str, dict[str, float]] = {}
    for point, value in zip(sweep.points, values, strict=True):
        ends.setdefault(others(point), {})[point.values[CASE]] = value
    closed: list[float | None] = []
    for point, value in zip(sweep.points, values, strict=True):
        start, end = (ends[others(point)][case] for case in sweep.gap)
        width = end - start
        found = 100 * ((value - start) / width) if width else math.nan
        closed.append(found if math.isfinite(found) else None)
    return closed


def _mean_and_error(found: list[float]) -> tuple[float, float | None]:
    """The mean and its standard error, which is None for a single value."""
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return mean, math.sqrt(variance / len(found))


def is_private(result: Mapping[str, Any]) -> bool:
    """Whether the result of a point states that it is private and has no contrary stamp."""
    return bool(result.get("private", False)) and not result.get("stamp")


@contextmanager
def _begun(directory: Path, sweep: Sweep) -> Iterator[None]:
    """Writes what the sweep is; takes it back if not even its first point could begin.

    Raises:
      InputError: the directory holds another sweep.
    """
    path = directory / "sweep.yaml"
    described = {
        "metric": sweep.metric,
        "over": sweep.over,
        "points": {point.name: to_mapping(point.config) for point in sweep.points},
    }
    text = yaml.safe_dump(files.jsonable(described), sort_keys=False, allow_unicode=True)
    if not path.exists():
        files.write_atomically(path, text)
    elif path.read_text(encoding="utf-8") != text:
        raise InputError(f"{path}: the directory holds another sweep; choose another --out")
    try:
        yield
    except BaseException:
        if not (directory / POINTS).exists():
            path.unlink()
        raise


def _write(
    directory: Path, sweep: Sweep, results: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> None:
    from jaxpfl.experiments.sweep.page import write_sweep_page

    points = [
        {
            "point": point.name,
            **point.values,
            "value": value_of(result, sweep.metric),
            "scored_on": scored_on(result, sweep.metric),
            "private": is_private(result),
            "privacy": result.get("privacy"),
            **{name: result[name] for name in ("cost", "texts") if name in result},
        }
        for point, result in zip(sweep.points, results, strict=True)
    ]
    record = {
        "note": SIMULATION,
        "metric": sweep.metric,
        "x": sweep.x,
        "line": sweep.line,
        **({"gap": dict(zip(("from", "to"), sweep.gap, strict=True))} if sweep.gap else {}),
        "rows": rows,
        "points": points,
        "baselines": baselines(results, sweep.metric),
        "cautions": of_points(results),
    }
    files.write_json(directory / "sweep.json", record)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_atomically(directory / "table.csv", buffer.getvalue())
    write_sweep_page(directory, sweep, record)
