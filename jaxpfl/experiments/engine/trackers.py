"""Services that follow a run while it trains, such as Weights & Biases.

A tracker gets what `metrics.jsonl` gets, after the round's releases are confirmed: public values
alone. Simulations of a run, which its statement does not cover, are not tracked. The services
record for themselves when a value arrives, and times depend on how much the sampled clients hold:
what a service shows of times is not covered by the statement, either.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.setting import mark_of


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives of a run before its first round.

    Attributes:
      id: the same when the run is resumed.
      name: the algorithm, and the name of the run directory.
      stamp: NOT PRIVATE and why, or "".
    """

    id: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    stamp: str


class Tracker(Protocol):
    """Follows runs, one after the other. A resumed run begins again with the same id.

    No round is logged twice, but a crash may leave one out.
    """

    def begin(self, run: TrackedRun) -> None:
        """A run begins, or is resumed."""
        ...

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """The numbers after a round, by names such as "evaluation/loss"."""
        ...

    def sentences(self, round: int, texts: Sequence[str]) -> None:
        """Texts drawn from the model after a round."""
        ...

    def end(self, privacy: str) -> None:
        """The run stops, with this statement."""
        ...


_CURRENT: ContextVar[tuple[Tracker, ...]] = ContextVar("trackers", default=())
current = _CURRENT.get


@contextmanager
def track(*trackers: Tracker | str) -> Iterator[None]:
    """Every run that is carried out in this context is followed by these trackers.

        with jaxpfl.track("wandb:my-project"):
            jaxpfl.run(...)

    Args:
      trackers: `Tracker`s, or "wandb:PROJECT", "mlflow:EXPERIMENT" or "trackio:PROJECT".

    Raises:
      InputError: there is no such service, or its package is not installed.
    """
    found = tuple(_named(each) if isinstance(each, str) else each for each in trackers)
    token = _CURRENT.set(found)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Trackers:
    """The trackers of one run. One that fails is left out from then on; the run continues."""

    def __init__(self, trackers: Sequence[Tracker], warn: Callable[[str], None]) -> None:
        self._trackers, self._warn = list(trackers), warn

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of `Tracker` of each of them."""
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # of a service; the run's own files have the same values
                self._trackers.remove(tracker)
                self._warn(f"{type(tracker).__name__} no longer follows this run: {error}")


class WandB:
    """Weights & Biases (tried with the interface of wandb 0.2x): `wandb.init`, `Run.log`."""

    def __init__(self, module: ModuleType, project: str) -> None:
        self._module, self._project = module, project

    def begin(self, run: TrackedRun) -> None:
        self._run = self._module.init(
            project=self._project,
            id=run.id,
            name=run.name,
            config=dict(run.config),
            tags=[mark_of(run.stamp) or "private"],
            resume="allow",
        )

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def sentences(self, round: int, texts: Sequence[str]) -> None:
        table = self._module.Table(columns=["text"], data=[[text] for text in texts])
        self._run.log({"sentences": table}, step=round)

    def end(self, privacy: str) -> None:
        self._run.summary["privacy"] = privacy
        self._run.finish()


class Trackio(WandB):
    """Trackio, which keeps runs on this machine and has the interface of wandb."""

    def begin(self, run: TrackedRun) -> None:
        config = {**run.config, "privacy": run.stamp or "private"}
        name = f"{run.name} {run.id}"
        self._run = self._module.init(
            project=self._project, name=name, config=config, resume="allow"
        )

    def sentences(self, round: int, texts: Sequence[str]) -> None:
        self._run.log({"sentences": "\n".join(texts)}, step=round)

    def end(self, privacy: str) -> None:
        self._run.log({"privacy": privacy})
        self._run.finish()


class MLflow:
    """MLflow, at the tracking address that it is set to; an experiment is made if absent."""

    def __init__(self, module: ModuleType, experiment: str) -> None:
        self._client, self._experiment = module.MlflowClient(), experiment

    def begin(self, run: TrackedRun) -> None:
        client, found = self._client, self._client.get_experiment_by_name(self._experiment)
        place = found.experiment_id if found else client.create_experiment(self._experiment)
        before = client.search_runs([place], f"tags.jaxpfl_run = '{run.id}'")
        tags = {"jaxpfl_run": run.id, "privacy": run.stamp or "private"}
        made = before[0] if before else client.create_run(place, run_name=run.name, tags=tags)
        self._id = made.info.run_id
        client.log_dict(self._id, dict(run.config), "config.json")

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=round)

    def sentences(self, round: int, texts: Sequence[str]) -> None:
        self._client.log_text(self._id, "\n".join(texts), f"sentences/round_{round:06}.txt")

    def end(self, privacy: str) -> None:
        self._client.set_tag(self._id, "privacy", privacy)
        self._client.set_terminated(self._id)


_SERVICES: dict[str, Callable[[ModuleType, str], Tracker]] = {
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _named(name: str) -> Tracker:
    package, _, project = name.partition(":")
    if package not in _SERVICES or not project:
        known = ", ".join(f"{each}:PROJECT" for each in _SERVICES)
        raise InputError(f"a tracker must be one of {known}, found {name!r}")
    try:
        module = import_module(package)
    except ImportError as error:
        raise InputError(
            f"the tracker {package} needs its package: pip install 'jaxpfl[{package}]'"
        ) from error
    return _SERVICES[package](module, project)
