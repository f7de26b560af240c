"""Compares runs: scores in a table, curves over the rounds, and what each and all of them cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.cost import OWN, SHARED
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.numbers import number, percent
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, text_lines, write_page
from jaxpfl.experiments.report.run_page import RunFiles, evaluation_figures
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger

_METRICS = ("perplexity", "loss", "accuracy")
_SHARES = ("accuracy", "recall_at_5")
_NOT_PRIVATE = "NOT PRIVATE"


@dataclass(frozen=True)
class _Run:
    """A run of the comparison.

    Attributes:
      name: of its directory; unique among the runs.
      ledger: the file that it charged.
    """

    name: str
    found: RunFiles
    ledger: Path

    @property
    def privacy(self) -> str:
        run = self.found.run
        return self.found.result.get("privacy", f"{run['statement']}; the run is not finished")

    @cached_property
    def epsilons(self) -> dict[str, float]:
        """Of this run, as it stated when it stopped, and of all that is on its ledger by now."""
        if not self.found.run["private"]:
            return {}
        ledger, plan = Ledger.read(self.ledger), self.found.run["plan"]
        ledger.verify()
        whole = Guarantee.of_events(
            (charge.event for charge in ledger.charges), plan["delta"], ledger.unit
        )
        own = self.found.result.get("epsilons", {}).get(OWN)
        return {**({} if own is None else {OWN: own}), SHARED: whole.epsilon()}

    @cached_property
    def rounds(self) -> int:
        return max((record["round"] for record in self.found.records), default=0)

    @cached_property
    def scores(self) -> dict[str, dict[str, float | None]]:
        """The last scores on each data set that the run was evaluated on, by its name."""
        scores: dict[str, dict[str, float | None]] = {}
        evaluated = [record for record in self.found.records if record.get("evaluation")]
        if evaluated:
            scores[self.found.evaluated_on] = _scores(evaluated[-1]["evaluation"])
        for row in self.found.result.get("table") or ():
            if row["model"] == OURS:
                scores[self.found.result["tested_on"]] = _scores(row)
        return scores


def compare(
    directories: Sequence[str | Path], out: str | Path, *, ledger: str | Path | None = None
) -> dict[str, Any]:
    """Writes `compare.json` and `report.html` to the folder `out`, and returns the record.

    The record has one row for each run and data set, and "jointly", the guarantee of all charges on
    the runs' ledgers together. It holds whether the ledgers are of the same clients or not.

    Args:
      directories: run directories, each with a `run.json`.
      ledger: the file that runs charged which name none in their config and have none in their
        directory, such as those of `jaxpfl.run`.

    Raises:
      InputError: fewer than two runs, a directory without a run, or a ledger that is not found.
      CorruptFile: a file of a run, or a ledger, was altered.
    """
    runs = _read([Path(each) for each in directories], ledger)
    rows = [
        {
            "run": run.name,
            "rounds": run.rounds,
            "scored_on": name,
            "scores": scores,
            "private": run.found.run["private"],
            "epsilons": run.epsilons,
        }
        for run in runs
        for name, scores in (run.scores or {"": {}}).items()
    ]
    record = {
        "rows": rows,
        "privacy": {run.name: run.privacy for run in runs},
        "jointly": _jointly(runs),
    }
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    record = files.jsonable(record)
    files.write_json(directory / "compare.json", record)
    write_page(directory, _page(runs, record))
    return record


def lines(record: Mapping[str, Any]) -> list[str]:
    """The record as text for a terminal."""
    found: list[str] = []
    for name, table in _tables(record).items():
        found += [f"{_title(name)}:", *text_lines(table), ""]
    found += [f"{name}, this run: {statement}" for name, statement in record["privacy"].items()]
    return [*found, f"jointly: {record['jointly']}"]


def _read(directories: Sequence[Path], ledger: str | Path | None) -> list[_Run]:
    if len(directories) < 2:
        raise InputError(f"a comparison needs at least two runs, found {len(directories)}")
    resolved = [directory.resolve() for directory in directories]
    if len(set(resolved)) < len(resolved):
        raise InputError("a comparison needs different runs, found a directory twice")
    short = [directory.name for directory in resolved]
    runs = []
    for directory, name in zip(resolved, short, strict=True):
        found = RunFiles.read(directory)
        # A shared name, such as seed_0 of two sweeps, is told apart by the folder above.
        if short.count(name) > 1:
            name = f"{directory.parent.name}/{name}"
        runs.append(_Run(name, found, _ledger_of(found, ledger)))
    return runs


def _ledger_of(found: RunFiles, given: str | Path | None) -> Path:
    named = found.run["config"].get("privacy", {}).get("ledger")
    own = found.directory / "ledger.jsonl"
    path = Path(named) if named else own
    if not named and not own.exists() and given is not None:
        path = Path(given)
    if not path.is_file():
        raise InputError(
            f"{found.directory}: its ledger is not at {path}: name the file that the run charged, "
            "with --ledger FILE"
        )
    return path


def _jointly(runs: Sequence[_Run]) -> str:
    """The guarantee of everything on all ledgers."""
    if not all(run.found.run["private"] for run in runs):
        return f"{_NOT_PRIVATE}: not all of the runs are private"
    ledgers = [Ledger.read(path) for path in {run.ledger.resolve(): None for run in runs}]
    for each in ledgers:
        each.verify()
    kinds = sorted({f"each {each.unit} by {each.adjacency}" for each in ledgers})
    if len(kinds) > 1:
        return f"no common epsilon: the ledgers protect {' and '.join(kinds)}"
    delta = max(run.found.run["plan"]["delta"] for run in runs)
    charges = [charge.event for each in ledgers for charge in each.charges]
    statement = Guarantee.of_events(charges, delta, ledgers[0].unit).statement()
    if len(ledgers) == 1:
        return f"{statement}; all releases on the ledger of the runs"
    return (
        f"{statement}; all releases on {len(ledgers)} ledgers, if they are of the same clients, "
        "and no more than that if they are not"
    )


def _tables(record: Mapping[str, Any]) -> dict[str, Table]:
    """A table for each data set, so that no two scores on different data stand in one column."""
    tables = {}
    for name in dict.fromkeys(row["scored_on"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["scored_on"] == name]
        found = dict.fromkeys(metric for row in rows for metric in row["scores"])
        metrics = [metric for metric in _METRICS if metric in found]
        metrics += [metric for metric in found if metric not in (*_METRICS, "count")]
        cells = [
            (
                Cell(row["run"], stamps=[] if row["private"] else [_NOT_PRIVATE]),
                str(row["rounds"]),
                *(
                    _number(row["scores"][metric], metric) if metric in row["scores"] else ""
                    for metric in metrics
                ),
                *(
                    number(row["epsilons"][whose]) if whose in row["epsilons"] else ""
                    for whose in (OWN, SHARED)
                ),
            )
            for row in rows
        ]
        costs = [f"epsilon of {whose}" for whose in (OWN, SHARED)]
        columns = ("run", "rounds", *metrics, *costs)
        tables[name] = Table(columns, cells, tuple(range(1, len(columns))))
    return tables


def _title(name: str) -> str:
    return f"Scored on {name}" if name else "Not evaluated"


def _scores(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a row; None is a metric that is not finite."""
    known = (*_METRICS, *_SHARES)
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, float) or (value is None and name in known)
    }


def _number(value: Any, metric: str) -> str:
    return percent(value) if metric in _SHARES else number(value)


def _page(runs: Sequence[_Run], record: Mapping[str, Any]) -> Page:
    stamped = not all(run.found.run["private"] for run in runs)
    sections = [Section(_title(name), table=table) for name, table in _tables(record).items()]
    for name in dict.fromkeys(run.found.evaluated_on for run in runs):
        curves = {run.name: run.found for run in runs if run.found.evaluated_on == name}
        figures = evaluation_figures(next(iter(curves.values())), curves, "")
        if figures:
            sections.append(Section(f"Round by round, on {name}", figures=figures))
    privacy = Table(("run", "privacy of this run"), list(record["privacy"].items()))
    sections.append(Section("Each run alone", table=privacy))
    return Page(
        title="Comparison of " + " and ".join(run.name for run in runs),
        lead="; ".join(dict.fromkeys(run.found.run["population"] for run in runs)),
        stamp=record["jointly"] if stamped else "",
        privacy=record["jointly"],
        privacy_notes=["This is the cost of all runs together, to whoever sees all of them."],
        facts=[(str(len(runs)), "runs")],
        sections=sections,
        pictures="plots",
    )
