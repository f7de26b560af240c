"""`jaxpfl compare RUN RUN ...`: a page of the settings that differ, the scores and the curves.

It is made from the runs' public files. The cost of a run with a certificate is computed again, and
a run is refused whose files state less.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.cost import OWN, SHARED
from jaxpfl.experiments.records.cautions import OURS, mean_and_deviation, number, score
from jaxpfl.experiments.records.lines import leaves
from jaxpfl.experiments.report.page import REPORT, Cell, Page, Section, Table, some_are
from jaxpfl.experiments.report.run_page import RELEASED, RunFiles, figures_of
from jaxpfl.privacy import verify
from jaxpfl.privacy.certificate import NAME as CERTIFICATE

NOTE = (
    "What is published of several runs on the same clients costs no more than the sum of their "
    "epsilons, at the sum of their deltas: `jaxpfl verify A/certificate.json B/certificate.json "
    "--together` adds them up. Runs on one ledger cost what that ledger states."
)
_PYTHON = (
    "Made in Python: {}. Such runs do not record what their functions do. A difference of code is "
    "not in the table of settings, and they are repetitions of no other run."
)
_ONCE = (
    "Run once: {}. Without other seeds there is no spread to compare a difference with: repeat "
    "each with another --run.seed, or all by `jaxpfl sweep --seeds 3`."
)


def compared(directories: Sequence[Path], out: Path) -> Page:
    """The page of two runs or more, finished or not, to be written to `out`, where links begin."""
    if len({path.resolve() for path in directories}) < max(2, len(directories)):
        paths = " and ".join(map(str, directories))
        raise InputError(f"expected two runs or more, in different directories, found {paths}")
    runs = {str(path): RunFiles.read(path) for path in directories}
    settings = {name: _settings(run) for name, run in runs.items()}
    # Configs of the same settings differ in their seed alone.
    stated = [name for name, run in runs.items() if "system" in run.start["config"]]
    same: dict[str, list[str]] = {}
    for name in stated:
        same.setdefault(repr(sorted(settings[name].items())), []).append(name)
    repeated = [group for group in same.values() if len(group) > 1]
    once = [group[0] for group in same.values() if len(group) == 1]
    python = [name for name in runs if name not in stated]
    cautions = [_PYTHON.format(", ".join(python))] if python else []
    cautions += [_ONCE.format(", ".join(once))] if once and len(same) > 1 else []
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    rows = [(key, *(values.get(key, "") for values in settings.values())) for key in keys]
    rows.append(("seed", *(str(run.start["seed"]) for run in runs.values())))
    lines = [("", *runs), *(row for row in rows if len(set(row[1:])) > 1)]
    if len(runs) > len(lines):
        lines = list(zip(*lines, strict=True))  # of many runs, a line each
    sections = [Section("Settings that differ", table=Table(lines[0], lines[1:]))]
    scores = {name: _scores(run) for name, run in runs.items()}
    for data in dict.fromkeys(data for sets in scores.values() for data in sets):
        on_data = {name: sets[data] for name, sets in scores.items() if data in sets}
        sections.append(Section(f"Scored on {data}", table=_table(on_data, runs, repeated, out)))
    for data in dict.fromkeys(run.evaluated_on for run in runs.values()):
        evaluated = {name: run for name, run in runs.items() if run.evaluated_on == data}
        figures = figures_of(next(iter(evaluated.values())).kinds, evaluated, data)
        sections.append(Section("Round by round", figures=figures))
    sections.append(Section("", figures=figures_of(RELEASED, runs)))
    costs = [(name, line) for name, run in runs.items() for line in _costs(run)]
    sections.append(Section("Each run alone", table=Table(("run", "its privacy"), costs)))
    *names, last = runs
    title = f"{', '.join(names)} and {last}" if len(runs) < 7 else f"{len(runs)} runs"
    title, facts = f"{title} compared", [(str(len(runs)), "runs")]
    lead = "; ".join(dict.fromkeys(run.start["population"] for run in runs.values()))
    stamp = some_are(run.mark for run in runs.values())
    return Page(title, lead, stamp, NOTE, facts=facts, cautions=cautions, sections=sections)


def _costs(run: RunFiles) -> list[str]:
    """What the releases on a run's ledgers cost, computed again if the run has a certificate."""
    path = run.directory / CERTIFICATE
    if not path.exists():
        return [f"not checked, for it has no certificate; its files say: {run.privacy}"]
    epsilons = [e for e in (run.result.get("epsilons") or {}).values() if e is not None]
    try:
        with verify.at(verify.shown(path)):
            certificate = verify.parsed(path.read_bytes())
            delta = min((ledger["delta"] for ledger in certificate["ledgers"]), default=0.5)
            also = [f"(epsilon = {e:.17g}, delta = {delta:.17g})" for e in epsilons]
            return [line.strip() for line in verify.check(certificate, [run.privacy, *also])]
    except verify.Unfit as error:
        raise InputError(str(error)) from None


def _settings(run: RunFiles) -> dict[str, str]:
    """The settings of a run except its seed: its config or, of `jaxpfl.run`, its plans."""
    start, config = run.start, run.start["config"]
    if "system" not in config:
        queries = {query["label"]: query for query in start["queries"]}
        config = {"algorithm": start["label"], "clients": start["population"], **config, **queries}
    settings = leaves(config, ".")
    return {k: "" if v is None else str(v) for k, v in settings.items() if k != "run.seed"}


def _scores(run: RunFiles) -> dict[str, Mapping[str, Any]]:
    """The scores of the run's model by the data that they were measured on."""
    rounds = [record["evaluation"] for record in run.records if record.get("evaluation")]
    last = (run.result.get("metrics") or {}).get("evaluation") or (rounds or [{}])[-1]
    scores = {run.evaluated_on: last} if last else {}
    for row in run.result.get("table") or ():
        if row["model"] == OURS:
            scores[run.result["tested_on"]] = row
    return scores


def _table(
    scores: Mapping[str, Any], runs: Mapping[str, RunFiles], repeated: list[list[str]], out: Path
) -> Table:
    """The scores on one data set, run by run, then over runs that differ in the seed alone."""
    paths = dict.fromkeys(path for name in scores for *_, path, _ in runs[name].kinds)
    measured = {metric for values in scores.values() for metric in values}
    metrics = [metric for path in paths if (metric := path.partition("/")[2]) in measured]
    rows: list[tuple[Any, ...]] = []
    for name, values in scores.items():
        run, cost = runs[name], runs[name].result.get("epsilons") or {}
        if run.mark or not (run.directory / CERTIFICATE).exists():
            cost = {}  # nobody checked it
        link = Path(os.path.relpath(run.directory, out), REPORT).as_posix()
        cell = Cell(name, link=link, stamps=[run.mark] if run.mark else [])
        done = max((record["round"] for record in run.records), default=0)
        epsilons = [number(cost[whose]) if whose in cost else "" for whose in (OWN, SHARED)]
        texts = [_shown(metric, [values]) for metric in metrics]
        rows.append((cell, f"{run.start['seed']}", f"{done}", *texts, *epsilons))
    for group in ([name for name in names if name in scores] for names in repeated):
        if len(group) > 1:
            means = [_shown(metric, [scores[name] for name in group]) for metric in metrics]
            cell = Cell(", ".join(group), note="mean and standard deviation over runs")
            rows.append((cell, "", "", *means, "", ""))
    columns = ("run", "seed", "rounds", *metrics, f"epsilon of {OWN}", f"epsilon of {SHARED}")
    return Table(columns, rows, tuple(range(1, len(columns))))


def _shown(metric: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The score of one row; of several, their mean and standard deviation."""
    if any(metric not in row for row in rows):
        return ""
    mean, deviation = mean_and_deviation([row[metric] for row in rows])
    return score(metric, mean) + ("" if deviation is None else f" ± {score(metric, deviation)}")
