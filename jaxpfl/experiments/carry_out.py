"""Runs, resumes and reports any system, in a directory of its own.

    config.yaml        the resolved config; where the run is not private, its first line says so
    attempts.jsonl     when it was begun and resumed, and by which command
    result.json        the public record of the finished run
    report.html        drawn from that and the other public files
    simulation.json    results that the privacy statement does not cover, if there are any

All other files are the system's. `resume` continues from what is already stored and ends in the
same bits as an uninterrupted run.
"""

import dataclasses
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.config.published import pinned
from jaxpfl.experiments.config.reader import to_yaml
from jaxpfl.experiments.config.sections import PrivacyConfig, SimulatedConfig
from jaxpfl.experiments.engine import shared_run
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, REPRODUCIBLE
from jaxpfl.experiments.engine.signals import resumable
from jaxpfl.experiments.records.lines import FROM_PYTHON, record_attempt
from jaxpfl.experiments.records.numbers import duration
from jaxpfl.experiments.registry import load, load_run, system_of
from jaxpfl.experiments.report.page import REPORT, write_page
from jaxpfl.experiments.report.run_page import write_run_page
from jaxpfl.experiments.systems.base import (
    CONFIG,
    RESULT,
    SIMULATION,
    Prepared,
    Shareable,
    Synthesizer,
    Workspace,
)
from jaxpfl.federated.hosts.processes import Group
from jaxpfl.federated.hosts.shared_rounds import SharedRounds
from jaxpfl.privacy.ledger import Ledger

_RUN = "run.json"


@dataclass(frozen=True)
class Outcome:
    """The result of a run; public.

    Attributes:
      out: the run directory.
      record: the content of `result.json`, and under "simulation" that of `simulation.json`.
      seconds: how long this attempt took. It depends on what the clients hold, so that no privacy
        statement covers it.
      lines: the record as text, for a terminal.
    """

    out: Path
    record: dict[str, Any]
    seconds: float
    lines: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The record and where it is, and as "text" what a terminal shows."""
        report = str(self.out / REPORT)
        text = "\n".join([f"report: {report}, after {duration(self.seconds)}", "", *self.lines])
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
      config: as `registry.load` reads it.
      memory: results that several runs share, see `systems.base.Workspace`; None shares nothing.
      command: what the page says that the run was begun by.

    Raises:
      InputError: the config cannot be carried out, or `out` holds a run already.
      BudgetExhausted: the next release does not fit the budget; what was done before is kept.
      Interrupted: SIGINT or SIGTERM was received; the run can be resumed.
    """
    system, directory = system_of(config.system), Path(out)
    with shared_run.group() as group:
        if group is not None and group.index:
            return _followed(group, config, directory)
        with files.exclusive(directory):
            path = directory / CONFIG
            if path.exists() or (directory / _RUN).exists():
                raise InputError(
                    f"{directory}: holds a run already; go on with `jaxpfl resume {directory}` or "
                    "choose another --out"
                )
            # So that the config that is written names the weights, which a branch of the hub does
            # not.
            config = pinned(config)
            # Before anything is written: a config that is refused must not leave a run directory.
            prepared = system.prepare(config)
            others = _others(group, prepared)
            for ledger in _ledgers(config):
                if ledger.exists():
                    Ledger.read(ledger)
            stamp = stamp_of(config)
            files.write_atomically(path, (f"# {stamp}\n" if stamp else "") + to_yaml(config))
            with resumable(directory):
                record_attempt(directory, command)
                outcome = _carried_out(config, prepared, directory, progress, memory, others)
                shared_run.broadcast_outcome(group, outcome.record, outcome.lines)
                return outcome


def resume(
    out: str | Path,
    *,
    progress: bool = True,
    memory: dict[Any, Any] | None = None,
    command: str = FROM_PYTHON,
) -> Outcome:
    """Resumes the run in `out`; it ends in the same bits as an uninterrupted run.

    Raises:
      InputError: `out` holds no run, or its files were altered.
      CorruptFile, BudgetExhausted, Interrupted: as `run`.
    """
    directory = Path(out)
    with shared_run.group() as group:
        # Inside, so that the others hear of a process that cannot read the directory.
        config = load_run(directory)
        if group is not None and group.index:
            return _followed(group, config, directory)
        with files.exclusive(directory), resumable(directory):
            prepared = system_of(config.system).prepare(config)
            others = _others(group, prepared)
            record_attempt(directory, command)
            outcome = _carried_out(config, prepared, directory, progress, memory, others)
            shared_run.broadcast_outcome(group, outcome.record, outcome.lines)
            return outcome


def report(out: str | Path) -> Path:
    """Redraws `report.html` and its pictures and returns the page's path.

    Raises:
      InputError: `out` holds no run that has begun.
      CorruptFile: a record of the run is damaged, or lacks what a run writes into it.
    """
    directory = Path(out)
    if not (directory / CONFIG).exists():
        # A run of `jaxpfl.run`, or a single run in a system's directory.
        with as_written(directory, "no page can be made"):
            return write_run_page(directory)
    result = directory / RESULT
    if not result.exists() and not (directory / _RUN).exists():
        raise InputError(f"{directory}: holds no finished run: there is no {RESULT}")
    system = system_of(load(directory / CONFIG).system)
    record = files.read_record(result) if result.exists() else {}
    with as_written(directory, "no page can be made"):
        return write_page(directory, system.page(directory, record))


@contextmanager
def as_written(directory: Path, failure: str) -> Iterator[None]:
    """Names the directory where something cannot be done with what its records hold.

    Each system has fields of its own, and takes them as they were written. Records are read, and
    models built of them, in one go, so that an error may be a fault of the program, too. The
    message therefore has the place of the error, which holds no value of a client.

    Args:
      failure: what cannot be done, for the message.

    Raises:
      CorruptFile: a field is missing, or is of another type, or the program is at fault.
      InputError: the error that was raised, which did not name the directory; CorruptFile if it
        was one.
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
        raise CorruptFile(
            f"{directory}: {failure}: a record is not as the run wrote it, or the program is at "
            f"fault: {type(error).__name__} in {frame.f_code.co_filename}, line {line}"
        ) from error


def synthesize(
    out: str | Path, file: str | Path, *, texts: int | None = None, progress: bool = True
) -> dict[str, Any]:
    """Writes the synthetic corpus of the run in `out` to the new file `file`; returns its card.

    For arguments and errors see `systems.base.Synthesizer`.
    """
    directory = Path(out)
    system = system_of(load_run(directory).system)
    if not isinstance(system, Synthesizer):
        raise InputError(
            f"{directory}: is a run of the system {system.name!r}, which makes no synthetic texts"
        )
    with as_written(directory, "no texts can be written"):
        return system.synthesize(directory, Path(file), texts=texts, progress=progress)


def stamp_of(config: Any) -> str:
    """The warning on everything that a run writes whose clients have no guarantee; else ""."""
    if not _private(config):
        return NOT_PRIVATE
    found = [REPRODUCIBLE] if config.run.reproducible_noise else []
    sections = (getattr(config, each.name) for each in dataclasses.fields(config))
    found += [
        section.larger().label(config.training.clients_per_round)
        for section in sections
        if isinstance(section, SimulatedConfig)
    ]
    return "; ".join(found)


def _private(section: Any) -> bool:
    """Whether every `PrivacyConfig` in a section, or in a whole config, is private."""
    if not dataclasses.is_dataclass(section):
        return True
    values = [getattr(section, each.name) for each in dataclasses.fields(section)]
    own = section.private if isinstance(section, PrivacyConfig) else True
    return own and all(map(_private, values))


def _ledgers(section: Any) -> list[Path]:
    """The ledgers that a section, or a whole config, names."""
    if not dataclasses.is_dataclass(section):
        return []
    values = [getattr(section, each.name) for each in dataclasses.fields(section)]
    found = [path for value in values for path in _ledgers(value)]
    named = section.ledger if isinstance(section, PrivacyConfig) else None
    return found if named is None else [*found, Path(named)]


def _others(group: Group | None, prepared: Prepared) -> SharedRounds | None:
    """The other processes that share the run, once they agree on it; None where there are none.

    Raises:
      InputError: several processes cannot share such a run, or they do not agree.
    """
    if group is None:
        return None
    if not isinstance(prepared, Shareable):
        raise InputError(
            f"this kind of run needs one process, found {group.size} processes of jax.distributed"
        )
    return shared_run.others_of(group, *prepared.shared())


def _followed(group: Group, config: Any, directory: Path) -> Outcome:
    """The run in another process than 0: it computes its share, and writes nothing."""
    began = time.monotonic()
    others = _others(group, system_of(config.system).prepare(pinned(config)))
    assert others is not None
    outcome = shared_run.share_rounds(others)
    return Outcome(directory, outcome["record"], time.monotonic() - began, outcome["lines"])


def _carried_out(
    config: Any,
    prepared: Prepared,
    directory: Path,
    progress: bool,
    memory: dict[Any, Any] | None,
    others: SharedRounds | None,
) -> Outcome:
    began = time.monotonic()
    system, shared = system_of(config.system), {} if memory is None else memory
    workspace = Workspace(directory, system.name, stamp_of(config), progress, others, shared)
    record = workspace.write_result(prepared.carry_out(workspace))
    write_page(directory, system.page(directory, record))
    simulation = directory / SIMULATION
    record["simulation"] = files.read_record(simulation) if simulation.exists() else None
    seconds = time.monotonic() - began
    return Outcome(directory, record, seconds, system.lines({**record, "out": str(directory)}))
