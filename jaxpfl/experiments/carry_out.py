"""Runs, resumes and reports any system, in a directory of its own.

    config.yaml        the resolved config; where the run is not private, its first line says so
    attempts.jsonl     when it was begun and resumed, and by which command
    private/begun_in   the folder where it was begun, which its relative paths mean
    result.json        the public record of the finished run
    report.html        drawn from that and the other public files
    certificate.json   the releases and what they cost, for others to check
    simulation.json    results that the privacy statement does not cover, if there are any

All other files are the system's. A resumed run ends in the same bits as an uninterrupted one.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.config.published import pinned
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine.build import with_strategy
from jaxpfl.experiments.engine.run_directory import first_attempt
from jaxpfl.experiments.records.lines import FROM_PYTHON, leaves, record_attempt, where_begun
from jaxpfl.experiments.registry import load, load_run, system_of
from jaxpfl.experiments.report.page import REPORT, page_lines, write_page
from jaxpfl.experiments.report.run_page import write_run_page
from jaxpfl.experiments.systems import CONFIG, RESULT
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.federated.hosts import processes
from jaxpfl.federated.mesh import leads
from jaxpfl.privacy.certificate import certify
from jaxpfl.signals import resumable

_RUN = "run.json"


@dataclass(frozen=True)
class Outcome:
    """The result of a run; public, but for `seconds`, which depend on what the clients hold."""

    out: Path
    record: dict[str, Any]
    seconds: float  # of this attempt
    lines: list[str]  # the page as text, for a terminal

    def to_dict(self) -> dict[str, Any]:
        """The record and where it is, and as "text" what a terminal shows."""
        report, after = str(self.out / REPORT), timedelta(seconds=round(self.seconds))
        text = "\n".join([f"report: {report}, after {after}", "", *self.lines])
        return {**self.record, "out": str(self.out), "report": report, "text": text}


def run(
    config: Any,
    out: str | Path,
    *,
    progress: bool = True,
    memory: dict[Any, Any] | None = None,
    command: str = FROM_PYTHON,
) -> Outcome:
    """Carries out a config of any system in the new or empty directory `out`.

    Args:
      memory: results that several runs share, see `systems.workspace`; None shares nothing.
      command: what the page says that the run was begun by.

    Raises:
      InputError: the config cannot be carried out, or `out` holds a run already.
      BudgetExhausted: the next release does not fit the budget; what was done before is kept.
      Interrupted: SIGINT, SIGTERM or SIGHUP was received; the run can be resumed.
    """
    directory, shared = files.user_path(out), {} if memory is None else memory

    def require_new() -> None:
        if any((directory / name).exists() for name in (CONFIG, _RUN)):
            how = f"go on with `jaxpfl resume {directory}` or choose another --out"
            raise InputError(f"{directory}: holds a run already; {how}")

    with processes.shared():
        # The config that is written names the weights, which a branch of the hub does not, and the
        # coefficients of noise, which another version might find otherwise.
        system, shown = system_of(config.system), progress and leads()
        config = pinned(config)
        _require_alike(config)
        workspace = Workspace(with_strategy(config), directory, shown, shared, system)
        with processes.led(first_attempt(directory, workspace.ledgers)):
            processes.decide("the directory", require_new)
            _ = workspace.study  # All processes read their clients at once.
            processes.decide("the beginning", workspace.begin)
            with resumable(directory):
                return _carried_out(workspace, command)


def resume(
    out: str | Path,
    *,
    progress: bool = True,
    memory: dict[Any, Any] | None = None,
    command: str = FROM_PYTHON,
) -> Outcome:
    """Resumes the run in `out`, to the same bits but for a remote model's texts. Errors: `run`.

    Relative paths of its config mean the folder in which it was begun.
    """
    shared = {} if memory is None else memory
    with where_begun(files.user_path(out)) as directory, processes.shared():
        # Inside, so that the others hear of a process that cannot read the directory.
        config, shown = load_run(directory), progress and leads()
        _require_alike(config)
        workspace = Workspace(config, directory, shown, shared, system_of(config.system))
        with processes.led(files.exclusive(directory)), resumable(directory):
            return _carried_out(workspace, command)


def _require_alike(config: Any) -> None:
    """Refuses processes with different configs before any of them reads its clients."""

    def compare(configs: list[dict[str, Any]]) -> None:
        first, *others = (leaves(config, ".") for config in configs)
        for index, other in enumerate(others, 1):
            if other != first:
                name = next(key for key in {**first, **other} if first.get(key) != other.get(key))
                what = f"process {index} has another {name} than process 0"
                raise InputError(f"{what}: give all the same config; nothing more is charged")

    processes.decide("the config", compare, to_mapping(config))


def report(out: str | Path) -> Path:
    """Redraws `report.html` and its pictures and returns the page's path."""
    directory = files.user_path(out)
    config, result = directory / CONFIG, directory / RESULT
    if config.exists() and not result.exists() and not (directory / _RUN).exists():
        raise InputError(f"{directory}: holds no finished run: there is no {RESULT}")
    system = system_of(load(config).system) if config.exists() else None
    with as_written(directory, "no page can be made"):
        if system is None:
            # A run of `jaxpfl.run`, or a single run in a system's directory.
            return write_run_page(directory)
        record = files.read_record(result) if result.exists() else {}
        return write_page(directory, system.part("page").page(directory, record))


@contextmanager
def as_written(directory: Path, failure: str) -> Iterator[None]:
    """Names the directory where something (`failure`) cannot be done with what its records hold.

    An error may be a fault of the program, too: the message has its place, and no client's value.
    """
    try:
        yield
    except InputError as error:
        if str(directory) in str(error):
            raise
        # A damaged file remains one, for whoever catches it.
        kind = CorruptFile if isinstance(error, CorruptFile) else InputError
        raise kind(f"{directory}: {failure}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = f"{type(error).__name__} in {frame.f_code.co_filename}, line {line}"
        why = f"a record is not as the run wrote it, or the program is at fault: {place}"
        raise CorruptFile(f"{directory}: {failure}: {why}") from error


def _carried_out(workspace: Workspace, command: str) -> Outcome:
    study, directory, began = workspace.study, workspace.directory, time.monotonic()
    system = system_of(workspace.config.system)
    processes.decide("the attempt", lambda: record_attempt(directory, command))
    made = system.part("run").carry_out(study, workspace)

    def end() -> tuple[dict[str, Any], list[str]]:
        record = workspace.write_result(made)
        page = system.part("page").page(directory, record)
        # Simulations have ledgers of their own in other places, which the statement is not of.
        inner = (sorted(directory.glob(f"{part}/*/ledger.jsonl")) for part in ("worlds", "runs"))
        ledgers = [*workspace.ledgers, directory / "ledger.jsonl", *chain(*inner)]
        terms: Any = {"statement": page.privacy, "stamp": workspace.stamp, "ledgers": ledgers}
        certify(directory, system.name, study.plans.values(), **terms)
        write_page(directory, page)
        return record, page_lines(page)

    record, lines = processes.decide("the page", end)
    return Outcome(directory, record, time.monotonic() - began, lines)
