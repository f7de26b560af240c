"""Runs benchmarks by name and compares them with the last stored rows of this machine.

    python -m benchmarks                      # the names
    python -m benchmarks aggregate word_lm
    python -m benchmarks all --store          # appends to benchmarks/results

Each benchmark is a process of its own. The ceilings of the machine, a
matrix product and a plain read of memory, are measured before and after them, and the better of
both counts. Rows, the comparison and the picture `roofline.png` go to `--out`.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import subprocess
import sys
from typing import Annotated

import tyro

from benchmarks import comparison, harness, roofline
from benchmarks.suite import CEILINGS, SUITE, Benchmark, sentence

ROOT = pathlib.Path(__file__).parents[1]

# Processes that run or wait to, above which a machine does not count as quiet.
_MOST_LOAD = 0.3


@dataclasses.dataclass(frozen=True)
class Config:
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # of benchmarks, or "all"
    store: bool = False  # append the rows to benchmarks/results
    out: pathlib.Path = ROOT / "build" / "bench"


def main(config: Config) -> None:
    if not config.names:
        for name, benchmark in SUITE.items():
            print(f"{name:12} {sentence(benchmark)}")
        return
    names = tuple(SUITE) if "all" in config.names else config.names
    for name in names:
        if name not in SUITE:
            near = difflib.get_close_matches(name, SUITE, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected all, {', '.join(SUITE)}"
            raise SystemExit(f"there is no benchmark {name!r}: {hint}")
    config.out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    if load > _MOST_LOAD:
        print(f"caution: other programs keep {load:.1f} processors busy; figures will be too low")
    before = _run(CEILINGS, config)
    rows = {name: _run(SUITE[name], config) for name in names}
    after = _run(CEILINGS, config)
    ceilings = {
        unit: max(row[unit] for row in (*before, *after) if unit in row) for unit in roofline.UNITS
    }
    results = {
        name: comparison.compared(
            rows[name], comparison.read(harness.RESULTS / f"{SUITE[name].results}.jsonl")
        )
        for name in names
    }
    _show(results, ceilings)
    record = {
        "load average at the start": load,
        "ceilings": ceilings,
        "results": {name: [each._asdict() for each in found] for name, found in results.items()},
    }
    (config.out / "comparison.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    picture = config.out / "roofline.png"
    title = f"{before[0]['machine']}, {before[0]['device']}, {before[0]['date']} UTC"
    if roofline.draw(picture, results, ceilings, title):
        print(f"picture in {picture}")
    if config.store:
        for benchmark in (CEILINGS, *(SUITE[name] for name in names)):
            _append(config.out, benchmark)


def _run(benchmark: Benchmark, config: Config) -> list[comparison.Row]:
    """Runs a benchmark and returns the rows that it recorded."""
    path = config.out / f"{benchmark.results}.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}", *benchmark.arguments]
    environment = {**os.environ, harness.ELSEWHERE: str(config.out.resolve())}
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if status:
        raise SystemExit(f"benchmarks.{benchmark.module} ended with exit code {status}")
    return comparison.read(path)


def _show(results: dict[str, list[comparison.Compared]], ceilings: dict[str, float]) -> None:
    rows = []
    for name, found in results.items():
        for each in found:
            row = {"what": f"{name}: {each.setting}", each.unit: each.now, "unit": each.unit}
            row |= {"now": each.now, "before": each.before or "", "of": each.date or "never"}
            row["times better"] = each.better or ""
            if each.unit in ceilings:
                row["of ceiling"] = f"{each.now / ceilings[each.unit]:.0%}"
            rows.append(row)
    harness.table(rows, ["what", "unit", "now", "before", "of", "times better", "of ceiling"])
    for unit, ceiling in ceilings.items():
        print(f"ceiling, {roofline.UNITS[unit]}: {ceiling:.3g} {unit}")


def _append(folder: pathlib.Path, benchmark: Benchmark) -> None:
    name = f"{benchmark.results}.jsonl"
    with (harness.RESULTS / name).open("a", encoding="utf-8") as file:
        file.write((folder / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
