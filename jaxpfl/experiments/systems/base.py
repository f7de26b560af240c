"""The protocol of a system, which is a folder whose module exposes an object `SYSTEM`.

`Config` reads the config file. `prepare` reads the clients and refuses what cannot be carried out.
The record that `Prepared.carry_out` returns becomes `result.json`, and the page and the lines for a
terminal are made from it. `experiments.carry_out` does the rest for all systems: the lock,
`config.yaml`, the stamp of a run without privacy, and `report.html`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxpfl import files
from jaxpfl.experiments.report.page import Page

if TYPE_CHECKING:
    from jaxpfl.algorithms.base import Algorithm
    from jaxpfl.data.population import Population
    from jaxpfl.experiments.engine.outline import Outline
    from jaxpfl.experiments.records.artifacts import Artifacts
    from jaxpfl.federated.release.releaser import Others
    from jaxpfl.privacy.ledger import Ledger
    from jaxpfl.privacy.plan import Plan

CONFIG = "config.yaml"
"""The resolved config, at the root of a run's directory; its first line shows the stamp."""

RESULT = "result.json"
"""The public record of a finished run, at the root of its directory."""

SIMULATION = "simulation.json"
"""The record of simulations, which the privacy statement does not cover, if there are any."""

ARTIFACTS = "artifacts"
"""The folder, in a run's directory, of the intermediate results."""


@dataclass(frozen=True)
class Workspace:
    """Where a run is carried out.

    Attributes:
      directory: the run's directory, whose lock is held.
      system: name of the system.
      stamp: the mark on everything that a run without privacy makes; "" for a private run.
      progress: whether progress is drawn on stderr.
      others: the other processes that share the run's rounds; None where there are none.
      memory: results that the runs of one sweep share, by keys of everything that they depend on.
        It is PRIVATE, because it may contain client data, and is never written.
    """

    directory: Path
    system: str
    stamp: str = ""
    progress: bool = True
    others: "Others | None" = field(default=None, repr=False)
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)

    def artifacts(self, run: str, ledger: "Ledger | None" = None) -> "Artifacts":
        """The store of the intermediate results, as `Artifacts` describes it."""
        from jaxpfl.experiments.records.artifacts import Artifacts

        folder = self.directory / ARTIFACTS
        return Artifacts(folder, run=run, ledger=ledger, private=not self.stamp)

    def write_result(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes `result.json` with the system's name and the stamp, and returns its content.

        A system calls it itself only if simulations follow, which the record does not cover.
        """
        whole = files.jsonable({"system": self.system, "stamp": self.stamp, **record})
        files.write_json(self.directory / RESULT, whole)
        return whole


class Prepared(Protocol):
    """A run that is ready to be carried out."""

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do in the directory and returns the public record.

        Raises:
          BudgetExhausted: the next release does not fit the budget; earlier ones remain.
          Interrupted: SIGINT or SIGTERM came; the run can be resumed.
        """
        ...


@runtime_checkable
class Shareable(Protocol):
    """A `Prepared` run whose clients are asked by one algorithm, which several processes share."""

    def shared(self) -> "tuple[Algorithm, Population]":
        """The algorithm and its clients.

        Raises:
          InputError: this config asks clients besides the algorithm's rounds.
        """
        ...


class System(Protocol):
    """One kind of experiment.

    Attributes:
      name: the value of `system:` in a config file.
      Config: the frozen dataclass of the config file. It has the fields `system` and `run` (a
        `RunConfig`). A `PrivacyConfig` in it that is not private puts the stamp on the run.
    """

    name: str
    Config: type

    def prepare(self, config: Any) -> Prepared:
        """Reads the clients, builds everything and refuses what cannot be carried out.

        Writes nothing, so that a refused config leaves no directory that looks like a run.

        Raises:
          InputError: a source cannot be read, or the parts of the config do not fit together.
        """
        ...

    def page(self, directory: Path, record: Mapping[str, Any]) -> Page:
        """`report.html`, from the record and the public files of `directory` alone.

        Args:
          record: the content of `result.json`; empty for an interrupted run that has a `run.json`.
        """
        ...

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The record for a terminal, with the contents of `simulation.json` as "simulation"."""
        ...


@runtime_checkable
class Outliner(Protocol):
    """A system whose configs can be checked without their clients, by `jaxpfl run --dry-run`."""

    def outline(self, config: Any) -> "Outline":
        """What the config describes; no client is read, and nothing charged, fetched or written.

        Raises:
          InputError: the parts of the config do not fit together.
        """
        ...


@runtime_checkable
class Synthesizer(Protocol):
    """A system whose runs write a corpus of synthetic texts."""

    def synthesize(
        self, directory: Path, out: Path, *, texts: int | None = None, progress: bool = True
    ) -> dict[str, Any]:
        """Writes the corpus of the finished run in `directory` to `out`; returns its card.

        Args:
          texts: the number of texts; None: as many as the run wrote.

        Raises:
          InputError: the run is not finished or wrote no texts, or `out` exists.
          CorruptFile: a file of the run was altered, or its ledger was cut off.
        """
        ...


@dataclass(frozen=True)
class TrainedModel:
    """A model that a run made, or the public one that belongs to its adapters.

    Attributes:
      folder: where it is written, below the folder of the export; "" for that folder itself.
      model, params: with adapters, only these are written.
      words: the `FastTokeniser` or `Vocabulary` that its token ids are of, or None.
      base: of adapters, the name of their base, as PEFT looks it up.
    """

    folder: str
    model: Any
    params: Any = field(repr=False)
    words: Any = field(default=None, repr=False)
    base: str | None = None


@dataclass(frozen=True)
class Made:
    """What a finished run made, to be exported; public.

    Attributes:
      models: the first is the one that the run was made for, and that has been scored.
      plan: of what the clients sent; None if they sent nothing.
      stamp: what the run's own files say of missing privacy; "" for a private run.
      trained_on: what the models were trained on, by what it was used for.
      scores: of the first model, by metric.
      tested_on: where the scores were measured; None if there are none.
      corpus: the synthetic texts, or None.
    """

    models: tuple[TrainedModel, ...]
    plan: "Plan | None"
    stamp: str
    trained_on: Mapping[str, str]
    scores: Mapping[str, float]
    tested_on: str | None = None
    corpus: list[str] | None = field(default=None, repr=False)


@runtime_checkable
class Exporter(Protocol):
    """A system whose runs make models that can be exported."""

    def made(
        self, directory: Path, config: Any, record: Mapping[str, Any], *, progress: bool = True
    ) -> Made:
        """What the finished run in `directory` made; no client's data is read.

        Args:
          config, record: the content of `config.yaml` and of `result.json`.

        Raises:
          InputError: the run is not finished, or its files are of different runs.
          CorruptFile: a file of the run was altered, or its ledger was cut off.
        """
        ...


def last_part(source: str) -> str:
    """A source without the folders that it lies in, which concern this machine only."""
    return source.rstrip("/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class LazySystem:
    """A system that imports its code when it is needed, so that a config is read without JAX.

    Attributes:
      name, Config: see `System`.
      package: contains the modules `study`, with `prepare`, `outline`, with `outline`, and `page`,
        with `page` and `lines`. An `ExportingSystem`'s also contains `export`, with `made`.
    """

    name: str
    Config: type
    package: str

    def prepare(self, config: Any) -> Prepared:
        return importlib.import_module(f"{self.package}.study").prepare(config)

    def outline(self, config: Any) -> "Outline":
        return importlib.import_module(f"{self.package}.outline").outline(config)

    def page(self, directory: Path, record: Mapping[str, Any]) -> Page:
        return importlib.import_module(f"{self.package}.page").page(directory, record)

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        return importlib.import_module(f"{self.package}.page").lines(record)


class ExportingSystem(LazySystem):
    """The same, of a system that is an `Exporter`."""

    def made(
        self, directory: Path, config: Any, record: Mapping[str, Any], *, progress: bool = True
    ) -> Made:
        module = importlib.import_module(f"{self.package}.export")
        return module.made(directory, config, record, progress=progress)
