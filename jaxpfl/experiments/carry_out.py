"""Runs, resumes and reports any system, in a directory of its own.

    config.yaml        the resolved config; its first line says so where nothing is private
    result.json        the public record of the finished run
    report.html        drawn from that and the other public files
    simulation.json    what the privacy statement does not cover, where there is any

Everything else in the directory is the system's. Each part is written whole before the next one
starts and is found again by `resume`, which ends in the same bits.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.reader import to_yaml
from jaxpfl.experiments.config.sections import PrivacyConfig
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, REPRODUCIBLE
from jaxpfl.experiments.registry import load, system_of
from jaxpfl.experiments.report.page import REPORT, write_page
from jaxpfl.experiments.report.run_page import write_run_page
from jaxpfl.experiments.systems.base import (
    CONFIG,
    RESULT,
    SIMULATION,
    Prepared,
    Synthesizer,
    System,
    Workspace,
)

_RUN = "run.json"


@dataclass(frozen=True)
class Outcome:
    """What a run came to; public.

    Attributes:
      out: its directory.
      record: what `result.json` holds; "simulation" is what `simulation.json` holds, or None.
      lines: the same as text, for a terminal.
    """

    out: Path
    record: dict[str, Any]
    lines: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {**self.record, "out": str(self.out), "report": str(self.out / REPORT)}


def run(
    config: Any,
    out: str | Path,
    *,
    progress: bool = True,
    memory: dict[Any, Any] | None = None,
) -> Outcome:
    """Carries out a config of any system in the new or empty directory `out`.

    Args:
      config: as `registry.load` reads it.
      progress: whether progress is drawn on stderr.
      memory: what several runs share, see `systems.base.Workspace`; None shares nothing.

    Raises:
      InputError: the config cannot be carried out, or `out` holds a run already.
      BudgetExhausted: the next release does not fit the budget; the run can be looked at.
      Interrupted: SIGINT or SIGTERM came; the run can be resumed.
    """
    system, directory = system_of(config.system), Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    with files.exclusive(directory):
        path = directory / CONFIG
        if path.exists() or (directory / _RUN).exists():
            raise InputError(
                f"{directory}: holds a run already; go on with `jaxpfl resume {directory}` or "
                "choose another --out"
            )
        # First, so that a directory that cannot be run does not come to look like a run.
        prepared = system.prepare(config)
        shared = {} if memory is None else memory
        workspace = Workspace(directory, system.name, stamp_of(config), progress, shared)
        heading = f"# {workspace.stamp}\n" if workspace.stamp else ""
        files.write_atomically(path, heading + to_yaml(config))
        return _carried_out(system, prepared, workspace)


def resume(
    out: str | Path, *, progress: bool = True, memory: dict[Any, Any] | None = None
) -> Outcome:
    """Goes on with the run in `out`, to the same final bits.

    Raises:
      InputError: `out` holds no run, or what it holds was altered.
      CorruptFile, BudgetExhausted, Interrupted: as `run`.
    """
    directory = Path(out)
    config = load(directory / CONFIG)
    system = system_of(config.system)
    with files.exclusive(directory):
        shared = {} if memory is None else memory
        workspace = Workspace(directory, system.name, stamp_of(config), progress, shared)
        return _carried_out(system, system.prepare(config), workspace)


def report(out: str | Path) -> Path:
    """Draws `report.html` and its pictures anew and returns the page's path.

    Raises:
      InputError: `out` holds no run that has begun.
    """
    directory = Path(out)
    if not (directory / CONFIG).exists():
        # A run of `jaxpfl.run`, or one of the runs within a system's directory.
        return write_run_page(directory)
    result = directory / RESULT
    if not result.exists() and not (directory / _RUN).exists():
        raise InputError(f"{directory}: holds no finished run: there is no {RESULT}")
    system = system_of(load(directory / CONFIG).system)
    record = files.read_json(result) if result.exists() else {}
    return write_page(directory, system.page(directory, record))


def synthesize(
    out: str | Path, file: str | Path, *, texts: int | None = None, progress: bool = True
) -> dict[str, Any]:
    """Writes the synthetic corpus of the run in `out` to the new file `file`; returns its card.

    Args:
      texts: how many; None: as many as the run made. More of them cost the clients nothing.

    Raises:
      InputError: the run has no synthetic corpus, or is not finished; `file` exists.
      CorruptFile: a file of the run was altered, or its ledger was cut off.
    """
    directory = Path(out)
    system = system_of(load(directory / CONFIG).system)
    if not isinstance(system, Synthesizer):
        raise InputError(
            f"{directory}: is a run of the system {system.name!r}, which makes no synthetic texts"
        )
    return system.synthesize(directory, Path(file), texts=texts, progress=progress)


def stamp_of(config: Any) -> str:
    """What everything made of a run without privacy says; "" for a private one."""
    sections = list(_sections(config))
    if any(isinstance(each, PrivacyConfig) and not each.private for each in sections):
        return NOT_PRIVATE
    return REPRODUCIBLE if config.run.reproducible_noise else ""


def _sections(config: Any) -> Iterator[Any]:
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            yield value
            yield from _sections(value)


def _carried_out(system: System, prepared: Prepared, workspace: Workspace) -> Outcome:
    directory = workspace.directory
    record = workspace.write_result(prepared.carry_out(workspace))
    write_page(directory, system.page(directory, record))
    simulation = directory / SIMULATION
    record["simulation"] = files.read_json(simulation) if simulation.exists() else None
    return Outcome(directory, record, system.lines({**record, "out": str(directory)}))
