"""`jaxpfl compare RUN RUN ...`: a page of the settings that differ, the scores and the curves.

It is made from public files of the runs alone, which others may have written. What a run with a
certificate costs is computed again, and a run is refused whose files state less.
"""

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.cost import OWN, SHARED
from jaxpfl.experiments.records.cautions import OURS, number, percent
from jaxpfl.experiments.report.page import REPORT, Cell, Page, Section, Table
from jaxpfl.experiments.report.run_page import RELEASED, RunFiles, figures_of
from jaxpfl.privacy import verify
from jaxpfl.privacy.certificate import NAME as CERTIFICATE

NOTE = (
    "What is published of several runs on the same clients costs no more than the sum of their "
    "epsilons, at the sum of their deltas: `jaxpfl verify A/certificate.json B/certificate.json "
    "--together` adds them up."
)
_ONCE = (
    "Run once: {}. Without other seeds there is no spread to compare a difference with: repeat "
    "each with another --run.seed, or all by `jaxpfl sweep --seeds 3`."
)


def compared(directories: Sequence[Path], out: Path) -> Page:
    """The page of two runs or more, finished or not, to be written to `out`, where links begin."""
    if len({each.resolve() for each in directories}) < max(2, len(directories)):
        raise InputError(
            "a comparison needs two runs or more, each in a directory of its own, found "
            f"{' and '.join(map(str, directories))}"
        )
    names = [str(each) for each in directories]
    runs = dict(zip(names, map(RunFiles.read, directories), strict=True))
    settings = {name: dict(_settings(run)) for name, run in runs.items()}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    rows = [(key, *(each.get(key, "") for each in settings.values())) for key in keys]
    rows.append(("seed", *(str(run.run["seed"]) for run in runs.values())))
    rows = [row for row in rows if len(set(row[1:])) > 1]
    alike: dict[str, list[str]] = {}
    for name, each in settings.items():
        alike.setdefault(repr(sorted(each.items())), []).append(name)
    once = [group[0] for group in alike.values() if len(group) == 1]
    scores = {name: _scores(run) for name, run in runs.items()}
    sections = [Section("Settings that differ", table=Table(("setting", *names), rows))]
    for data in dict.fromkeys(data for each in scores.values() for data in each):
        found = {name: each[data] for name, each in scores.items() if data in each}
        table = _table(found, runs, [*alike.values()], out)
        sections.append(Section(f"Scored on {data}", table=table))
    for data in dict.fromkeys(run.evaluated_on for run in runs.values()):
        same = {name: run for name, run in runs.items() if run.evaluated_on == data}
        figures = figures_of(next(iter(same.values())).kinds, same, data)
        sections.append(Section("Round by round", figures=figures))
    sections.append(Section("", figures=figures_of(RELEASED, runs)))
    costs = [(name, line) for name, run in runs.items() for line in _costs(run)]
    sections.append(Section("Each run alone", table=Table(("run", "its privacy"), costs)))
    marks = " and ".join(dict.fromkeys(run.mark for run in runs.values() if run.mark))
    return Page(
        title=f"{', '.join(names[:-1])} and {names[-1]} compared",
        lead="; ".join(dict.fromkeys(run.run["population"] for run in runs.values())),
        stamp=f"Some results are {marks}; the tables state which" if marks else "",
        privacy=NOTE,
        privacy_notes=[NOTE] if marks else [],
        facts=[(str(len(runs)), "runs"), (str(len(alike)), "different settings")],
        cautions=[_ONCE.format(", ".join(once))] if once and len(alike) > 1 else [],
        sections=sections,
    )


def _costs(run: RunFiles) -> list[str]:
    """What the releases on a run's ledgers cost, computed again; of no certificate, its words."""
    path = run.directory / CERTIFICATE
    if not path.exists():
        return [f"not checked, for it has no certificate; its files say: {run.privacy}"]
    stated = run.result.get("epsilons") or {}
    numbers = [each for each in stated.values() if each is not None]
    try:
        with verify.at(verify.shown(path)):
            certificate = verify.parsed(path.read_bytes())
            delta = min((each["delta"] for each in certificate["ledgers"]), default=0.5)
            also = [f"(epsilon = {each:.17g}, delta = {delta:.17g})" for each in numbers]
            return [line.strip() for line in verify.check(certificate, [run.privacy, *also])]
    except verify.Unfit as error:
        raise InputError(str(error)) from None


def _settings(run: RunFiles) -> Iterator[tuple[str, str]]:
    """The settings of a run except its seed: its config or, of `jaxpfl.run`, its plans."""
    config, held = run.run["config"], run.run
    if "system" not in config:
        queries = {query["label"]: query for query in held["queries"]}
        config = {"algorithm": held["label"], "clients": held["population"], **config, **queries}
    yield from ((key, value) for key, value in _flat(config) if key != "run.seed")


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "" if value is None else str(value)


def _scores(run: RunFiles) -> dict[str, Mapping[str, Any]]:
    """The scores of the run's model by the data that they were measured on."""
    rounds = [each["evaluation"] for each in run.records if each.get("evaluation")]
    last = (run.result.get("metrics") or {}).get("evaluation") or (rounds or [{}])[-1]
    ours = [row for row in run.result.get("table") or () if row["model"] == OURS]
    found = {run.evaluated_on: last} if last else {}
    return found | {run.result["tested_on"]: ours[0]} if ours else found


def _table(
    scores: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, RunFiles],
    alike: Sequence[Sequence[str]],
    out: Path,
) -> Table:
    """The scores on one data set, run by run, then over runs that differ in the seed alone."""
    known = dict.fromkeys(path for name in scores for *_, path, _ in runs[name].kinds)
    found = {name for each in scores.values() for name in each}
    metrics = [name for path in known if (name := path.partition("/")[2]) in found]
    rows: list[tuple[Any, ...]] = []
    for name in scores:
        run, cost = runs[name], runs[name].result.get("epsilons") or {}
        link = Path(os.path.relpath(run.directory, out), REPORT).as_posix()
        cell = Cell(name, link=link, stamps=[run.mark] if run.mark else [])
        done = max((record["round"] for record in run.records), default=0)
        measured = [_shown(each, [scores[name]]) for each in metrics]
        if run.mark or not (run.directory / CERTIFICATE).exists():
            cost = {}  # nobody checked it
        costing = [number(cost[of]) if of in cost else "" for of in (OWN, SHARED)]
        rows.append((cell, f"{run.run['seed']}", f"{done}", *measured, *costing))
    for group in ([name for name in names if name in scores] for names in alike):
        if len(group) > 1:
            means = [_shown(each, [scores[name] for name in group]) for each in metrics]
            cell = Cell(", ".join(group), note="mean and standard deviation over seeds")
            rows.append((cell, "", "", *means, "", ""))
    columns = ("run", "seed", "rounds", *metrics, f"epsilon of {OWN}", f"epsilon of {SHARED}")
    return Table(columns, rows, tuple(range(1, len(columns))))


def _shown(metric: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The score of one row; of several, their mean and standard deviation."""
    text = percent if metric == "accuracy" else number
    if any(metric not in row for row in rows):
        return ""
    values = [math.nan if row[metric] is None else row[metric] for row in rows]
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return text(sum(values))
    return f"{text(statistics.fmean(values))} ± {text(statistics.stdev(values))}"
