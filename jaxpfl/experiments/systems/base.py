"""What every system is: a folder whose module exposes `SYSTEM`, an object of the protocol below.

The config is read by its `Config`, the clients are read and everything that can be refused is
refused by `prepare`, and what `Prepared.carry_out` returns becomes `result.json`. A page and lines
for a terminal are made of that record. `experiments.carry_out` does the rest, for all systems
alike: the lock, `config.yaml`, the stamp of a run without privacy, and `report.html`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxpfl import files
from jaxpfl.experiments.report.page import Page

CONFIG = "config.yaml"
"""The resolved config, at the root of a run's directory; its first line shows the stamp."""

RESULT = "result.json"
"""The public record of a finished run, at the root of its directory."""

SIMULATION = "simulation.json"
"""What the privacy statement does not cover, where a system simulates that, too."""


@dataclass(frozen=True)
class Workspace:
    """Where a run is carried out.

    Attributes:
      directory: of the run; its lock is held.
      system: name of the system.
      stamp: what everything made of a run without privacy says; "" for a private one.
      progress: whether progress is drawn on stderr.
      memory: results that the runs of one sweep share, by all that they follow from. It may hold
        what clients hold: it is PRIVATE, and never written.
    """

    directory: Path
    system: str
    stamp: str = ""
    progress: bool = True
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)

    def write_result(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes `result.json` under the system's name and the stamp, and returns all of it.

        A system calls it itself only where something follows that the record does not cover.
        """
        whole = files.jsonable({"system": self.system, "stamp": self.stamp, **record})
        files.write_json(self.directory / RESULT, whole)
        return whole


class Prepared(Protocol):
    """A run whose clients were read and whose parts were built."""

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do in the directory and returns the public record.

        Raises:
          BudgetExhausted: the next release does not fit; what was released before stays.
          Interrupted: SIGINT or SIGTERM came; the run can be resumed.
        """
        ...


class System(Protocol):
    """One kind of experiment.

    Attributes:
      name: what `system:` says in a config file.
      Config: the frozen dataclass of the config file. It has the fields `system` and `run` (a
        `RunConfig`); every section of the type `PrivacyConfig` in it counts for the stamp.
    """

    name: str
    Config: type

    def prepare(self, config: Any) -> Prepared:
        """Reads the clients, builds everything and refuses what cannot be carried out.

        Touches no directory, so that one that cannot be run does not come to look like a run.

        Raises:
          InputError: a source cannot be read, or the parts of the config do not fit together.
        """
        ...

    def page(self, directory: Path, record: Mapping[str, Any]) -> Page:
        """`report.html`, from the record and the public files of `directory` alone.

        Args:
          record: what `result.json` holds; empty for a run that was interrupted and has a
            `run.json`.
        """
        ...

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The record for a terminal, with the contents of `simulation.json` as "simulation"."""
        ...


@runtime_checkable
class Synthesizer(Protocol):
    """A system whose runs have a corpus of synthetic texts."""

    def synthesize(
        self, directory: Path, out: Path, *, texts: int | None = None, progress: bool = True
    ) -> dict[str, Any]:
        """Writes the corpus of the finished run in `directory` to `out`; returns its card.

        Args:
          out: a new file.
          texts: how many; None: as many as the run made.

        Raises:
          InputError: the run is not finished or made no texts, or `out` exists.
          CorruptFile: a file of the run was altered, or its ledger was cut off.
        """
        ...


@dataclass(frozen=True)
class LazySystem:
    """A system of a folder's files, imported when they are needed: a config is read before JAX is.

    Attributes:
      name, Config: as of any system.
      package: of `study`, which has `prepare`, and of `page`, which has `page` and `lines`.
    """

    name: str
    Config: type
    package: str

    def prepare(self, config: Any) -> Prepared:
        return importlib.import_module(f"{self.package}.study").prepare(config)

    def page(self, directory: Path, record: Mapping[str, Any]) -> Page:
        return importlib.import_module(f"{self.package}.page").page(directory, record)

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        return importlib.import_module(f"{self.package}.page").lines(record)
