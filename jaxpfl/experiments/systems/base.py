"""The protocol of a system: a folder that the registry names, with what `System` says.

A `Study` is made for the clients that `prepare` reads, on which it is carried out, or for made-up
ones, for a dry run or an audit: both have one description. `experiments.carry_out` does the rest
for all systems: the lock, `config.yaml`, the stamp of a run without privacy, and the page.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpfl.errors import InputError

if TYPE_CHECKING:
    from jaxpfl.data.population import Population
    from jaxpfl.experiments.engine.description import Description
    from jaxpfl.privacy.plan import Plan


@dataclass(frozen=True)
class Study:
    """What a config describes, of these training clients: PRIVATE, or made up."""

    config: Any
    clients: "Population" = field(repr=False)

    @property
    def plans(self) -> "Mapping[str, Plan]":
        """All that clients may be asked by; the stamp of a run without privacy follows from it."""
        raise NotImplementedError

    @property
    def stamp(self) -> str:
        """The warning on everything that a run writes whose clients have no guarantee; else ""."""
        from jaxpfl.experiments.engine.setting import stamp_of

        return stamp_of(self.plans.values(), reproducible=self.config.run.reproducible_noise)

    def describe(self) -> "Description":
        """Models, rounds and releases; of the clients only their number is used."""
        from jaxpfl.experiments.engine.description import Description, PlannedRelease

        plans = self.plans.items()
        return Description({}, {}, {name: PlannedRelease.of_rounds(plan) for name, plan in plans})


@dataclass(frozen=True)
class TrainedModel:
    """A model that a run made, or the public one that belongs to its adapters.

    Attributes:
      folder: where it is written, below the folder of the export; "" for that folder itself.
      model, params: with adapters, only these are written.
      words: what its token ids are of, as of `jaxpfl.Trained`, or None.
      base: of adapters, the name of their base, as PEFT looks it up.
      fields: the fields of a table that it reads, see `jaxpfl.trained`.
    """

    folder: str
    model: Any
    params: Any = field(repr=False)
    words: Any = field(default=None, repr=False)
    base: str | None = None
    fields: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """What a finished run made, to be exported; public.

    Attributes:
      models: the first is the one that the run was made for, and that has been scored.
      plan: of what the clients sent; None if they sent nothing.
      stamp: what the run's own files say of missing privacy; "" for a private run.
      trained_on: what the models were trained on, by what it was used for.
      tested_on: where the scores were measured; None if there are none.
      written: a folder with all models, which are written already; None if `models` has them.
    """

    models: tuple[TrainedModel, ...]
    plan: "Plan | None"
    stamp: str
    trained_on: Mapping[str, str]
    scores: Mapping[str, float]
    tested_on: str | None = None
    corpus: list[str] | None = field(default=None, repr=False)
    written: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """Of the models that are `written`, in their order."""
        weights = self.written.rglob("*.safetensors") if self.written else ()
        folders = {path.parent for path in weights}
        return sorted(folders, key=lambda folder: (len(folder.name), folder.name))


def require_same(where: str, model: str, found: str, expected: str) -> None:
    """Refuses another public or published `model` in a place than the run's, by its SHA-256."""
    if found != expected:
        used = f"with SHA-256 {expected[:12]}..., found {found[:12]}...: restore it"
        raise InputError(f"{where}: the {model} must be the one that the run used, {used}")


def exported_base(settings: Any, section: str, folder: str) -> "tuple[str, list[TrainedModel]]":
    """The name of the base of adapters of a section's published model.

    If adapters were merged into it, that is `folder`, and the model is to be written there.
    """
    from jaxpfl.experiments.central.published import PublishedModel
    from jaxpfl.models.checkpoints import hub

    if settings.adapters is None:
        # It is where it was.
        return hub.public_name(settings.path), []
    # As it can be saved: adapters that were trained on int8 weights fit it, too.
    plain = PublishedModel.of(replace(settings, int8=False), section).loaded()
    return folder, [TrainedModel(folder, plain.model, plain.params, plain.tokeniser)]


def last_part(source: str) -> str:
    """A source without the folders that it lies in, which concern this machine only."""
    return source.rstrip("/").rsplit("/", 1)[-1]


def trained_on(source: str) -> dict[str, str]:
    """What a card says of the clients of a source."""
    return {"private clients": f"the training clients of {last_part(source)}"}


@dataclass(frozen=True)
class System:
    """One kind of experiment. Its code is imported when it is needed: a config is read without JAX.

    Attributes:
      name: the value of `system:` in a config file.
      package: has these in modules of these names. What has none is in `run`, else in `study`, else
        in the package itself:
        config.Config: the frozen dataclass of the config file. It has the fields `system`, `data`
          (a `DataConfig`) and `run` (a `RunConfig`), and may have `metrics`, the names in the
          result's "metrics" that a sweep can compare: then others are refused before the first
          point.
        study.Study(config, clients)
        study.prepare(config): the Study of the clients that it reads; it writes nothing, and raises
          InputError for what cannot be carried out.
        run.carry_out(study, workspace): does what is left to do and returns the public record. All
          processes that share a run call it: `federated.hosts.processes.decide` says how process 0
          does what it does alone.
        page.page(directory, record): the Page, from public files alone; the record is empty for an
          interrupted run that has a `run.json`.
        export.made(directory, config, record, *, texts, progress): optional; what a finished run
          Made, with a corpus of `texts` texts, None for as many as it wrote itself.
    """

    name: str
    package: str

    def part(self, module: str) -> Any:
        """What has the members that belong into this module."""
        for name in (module, "run", "study"):
            if importlib.util.find_spec(inner := f"{self.package}.{name}") is not None:
                return importlib.import_module(inner)
        return importlib.import_module(self.package)

    def describe(self, config: Any) -> "Description":
        """`Study.describe` of made-up clients. Nothing is fetched, charged or written."""
        from jaxpfl.experiments.engine.description import Clients, made_up

        clients = made_up(Clients.of(config.data).train)
        return self.part("study").Study(config, clients).describe()
