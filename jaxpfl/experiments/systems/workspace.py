"""The directory in which a study is carried out: its runs, their ledgers, and what they cost."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from dp_accounting import DpEvent, GaussianDpEvent

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.reader import to_mapping, to_yaml
from jaxpfl.experiments.config.sections import PrivacyConfig, ScaledUpConfig
from jaxpfl.experiments.engine.cost import SHARED, both_statements, stamped
from jaxpfl.experiments.engine.rounds import Loop, final_params, planned
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, Result, Setting, Tracking
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.experiments.report.run_page import page_of_run, write_run_page
from jaxpfl.experiments.systems import ARTIFACTS, CONFIG, RESULT
from jaxpfl.experiments.systems.base import Study, System
from jaxpfl.federated.hosts.processes import decide, led
from jaxpfl.federated.mesh import leads
from jaxpfl.models.base import Model
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Budget, Ledger, guarantee_of
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.simulated import LargerPopulation


@dataclass(frozen=True)
class Workspace:
    """Where the study of a config is carried out.

    Attributes:
      directory: the run's directory, whose lock is held.
      system: prepares the `study`; None where nobody asks for it.
      memory: results that the runs of one sweep share, by keys of everything that they depend on.
        It is PRIVATE, because it may contain client data, and is never written.
    """

    config: Any
    directory: Path
    progress: bool = True
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)
    system: System | None = None

    @cached_property
    def study(self) -> Study:
        """The study of the clients that it reads; `InputError` if it cannot be carried out."""
        assert self.system is not None
        return self.system.part("study").prepare(self.config)

    @cached_property
    def stamp(self) -> str:
        """The mark on everything that a run without privacy makes; "" for a private run."""
        return self.study.stamp

    @property
    def ledgers(self) -> list[Path]:
        """The files that the sections `privacy` of the config name."""
        return list(_ledgers(self.config))

    def begin(self) -> None:
        """Writes the config of a study that can be carried out; another leaves no directory."""
        head = f"# {self.stamp}\n" if self.stamp else ""
        for ledger in self.ledgers:
            _begun(ledger)
        files.write_atomically(self.directory / CONFIG, head + to_yaml(self.config))

    @property
    def config_id(self) -> str:
        """Identifies the config: artifacts that are no release are stored under this name."""
        digest = hashlib.sha256(to_yaml(self.config).encode()).hexdigest()
        return f"{self.config.system} {digest[:12]}"

    def artifacts(self, run: str | None = None, ledger: Ledger | None = None) -> Artifacts:
        """The store of the intermediate results of a run, by default of `config_id`."""
        folder, name = self.directory / ARTIFACTS, run or self.config_id
        return RunArtifacts(folder, run=name, ledger=ledger, private=not self.stamp)

    def write_result(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes `result.json` with the system's name and the stamp, and returns its content.

        A system calls it itself only if simulations follow, which the record does not cover.
        """
        whole = files.jsonable({"system": self.config.system, "stamp": self.stamp, **record})
        files.write_json(self.directory / RESULT, whole)
        return whole

    def open(
        self,
        algorithm: Algorithm,
        population: Population,
        *,
        name: str,
        privacy: PrivacyConfig,
        ledger: Path | None = None,
        start: str | None = None,
        prior: Sequence[str] = (),
        note: str = "",
        ask: Callable[[], Population] | None = None,
    ) -> Run:
        """Begins or resumes a run of the study, which asks clients.

        Every run has its own secret. Its population keeps the fingerprint of the clients that it
        comes from, so that all runs of a world can be charged to one ledger, under the algorithm's
        name. One with a note is a simulation with a ledger of its own, in `directory`/`name`.

        Args:
          name: "" for the only run, in `directory` itself; others are in `directory`/runs/`name`.
          privacy: the section whose `budget_of` limits the ledger.
          ledger: None for the one that the section names.
          start: identifies what the run starts from, such as public parameters.
          prior: names, in the ledger, of runs that this one depends on.
          ask: as for a `Run`.
        """
        folder, run = self._folder(name, note), self.config.run
        if leads():
            folder.mkdir(parents=True, exist_ok=True)
        if ledger is None:
            ledger = folder / "ledger.jsonl" if note else ledger_path(privacy, self.directory)
        setting = Setting(
            config=self._run_config(name),
            seed=run.seed,
            reproducible_noise=run.reproducible_noise,
            start=start,
            prior=tuple(prior),
            note=note,
            resumed_as=self.directory,
        )
        simulated = algorithm.queries[0].plan.simulates is not None
        how: Any = {"ledger": ledger, "budget": budget_of(privacy, simulated=simulated), "ask": ask}
        resume = (folder / "run.json").exists()
        return Run(folder, algorithm, population, setting, resume=resume, **how)

    def train(
        self,
        algorithm: Algorithm,
        population: Population,
        *,
        name: str,
        tracking: Tracking | None = None,
        **setting: Any,
    ) -> Result:
        """Carries out the rounds of a run; one with a name gets a page of its own.

        Args:
          tracking: None evaluates and saves every `run.checkpoint_every` rounds.
          setting: the other arguments of `open`.
        """
        every = self.config.run.checkpoint_every
        usual = Tracking(evaluate_every=every, checkpoint_every=every, progress=self.progress)
        run = self.open(algorithm, population, name=name, **setting)
        with led(page_of_run(run.path)) if name else nullcontext():
            return Loop(run, tracking or usual).carry_out()

    def _folder(self, name: str, note: str = "") -> Path:
        return self.directory / "runs" / name if name and not note else self.directory / name

    def _run_config(self, name: str) -> dict[str, Any]:
        return to_mapping(self.config) | ({"run name": name} if name else {})

    def planned(self, name: str) -> Plan:
        """The plan of the finished run of that `name`, see `open`."""
        return planned(self._folder(name), self._run_config(name))

    def finished(
        self, name: str, algorithm: Callable[[Plan], Algorithm], **stated: Any
    ) -> tuple[Plan, Any]:
        """The plan of a run as `planned`, and the parameters that it ended with.

        Args:
          algorithm: makes the run's own, of its plan.
          stated: `privacy` and, unless it is that of `config.privacy`, the `ledger`, as in
            `final_params`.
        """
        plan, seed = self.planned(name), self.config.run.seed
        if "ledger" not in stated:
            stated["ledger"] = ledger_path(self.config.privacy, self.directory)
        return plan, final_params(self._folder(name), algorithm(plan), seed, **stated)

    def composed_guarantee(self, ledgers: Sequence[Path], delta: float | None) -> dict[str, Any]:
        """The cost of all releases on these ledgers: epsilon and statement."""
        if delta is None:
            return {"epsilon": None, "statement": NOT_PRIVATE}

        def composed() -> dict[str, Any]:
            charges = [charge for path in ledgers for charge in Ledger.read(path).charges]
            cost = guarantee_of(charges, delta)
            return {"epsilon": cost.epsilon(), "statement": stamped(cost.statement(), self.stamp)}

        return decide("the cost of all releases", composed)


class RunArtifacts(Artifacts):
    """The artifacts of process 0, which makes them alone, in all processes that share the run."""

    def load_or_compute(
        self, name: str, compute: Callable[[], Artifact], made_from: Any = None
    ) -> Artifact:
        own = partial(super().load_or_compute, name, compute, made_from)
        return Artifact(*decide(f"the artifact {name!r}", own))

    def sha256(self, name: str) -> str:
        return decide(f"the hash of the artifact {name!r}", partial(super().sha256, name))


def restate(folder: Path, ledger: Path, prior: Sequence[str] = ()) -> str:
    """Updates the statement of the finished run in `folder` and returns it.

    The first one did not cover the study's later runs on the same ledger; `prior` as in `train`.
    """

    def restated() -> str:
        expected = {"run": str, "plan": dict, "stamp": str, "note": str}
        run, charges = files.read_record(folder / "run.json", expected), Ledger.read(ledger)
        plan = Plan.from_dict(run["plan"])
        statement = both_statements(charges, (run["run"], *prior), plan.delta, plan.accountant)
        record = files.read_record(folder / RESULT, {"epsilons": dict})
        record |= {"privacy": stamped(statement, run["stamp"], run["note"])}
        if plan.private:
            record["epsilons"][SHARED] = charges.spent(plan.delta, plan.accountant)
        files.write_json(folder / RESULT, record)
        write_run_page(folder)
        return record["privacy"]

    return decide(f"the statement of {folder.name}", restated)


def _ledgers(section: Any) -> Iterator[Path]:
    if isinstance(section, PrivacyConfig):
        if section.ledger is not None:
            yield files.user_path(section.ledger)
    elif dataclasses.is_dataclass(section):
        # Fields alone: a model, which is a section, remembers more.
        for setting in dataclasses.fields(section):
            yield from _ledgers(getattr(section, setting.name))


def budget_of(privacy: PrivacyConfig, *, simulated: bool = False) -> Budget | None:
    """The hard limit of a ledger: `budget_epsilon`, else `epsilon` if that is not simulated.

    A ledger that several runs share keeps the limit that its first run gave it, and a later one
    adds none of its own.
    """
    limit = privacy.budget_epsilon
    if limit is None and not simulated:
        shared = None if privacy.ledger is None else _begun(files.user_path(privacy.ledger))
        limited = shared is not None and shared.recorded_budget is not None
        limit = None if limited else privacy.epsilon
    return None if limit is None or privacy.delta is None else Budget(limit, privacy.delta)


def _begun(ledger: Path) -> Ledger | None:
    """A ledger; None if another process has not made it, or not written its first line, yet."""
    return Ledger.read(ledger) if ledger.exists() and ledger.stat().st_size else None


def ledger_path(privacy: PrivacyConfig, directory: Path) -> Path:
    """The ledger that a run in `directory` charges."""
    own = directory / "ledger.jsonl"
    return own if privacy.ledger is None else files.user_path(privacy.ledger)


def stored_params(artifacts: Artifacts, name: str, model: Model, train: Callable[[], Any]) -> Any:
    """The parameters of `model` that are stored as `name`; otherwise trains and stores them."""
    stored = artifacts.load_or_compute(name, lambda: Artifact(arrays=tree_arrays(train())))
    return tree_of(stored.arrays, jax.eval_shape(lambda: model.init(jax.random.key(0))), name)


def params_digest(params: Any) -> str:
    return hashlib.sha256(files.npz(tree_arrays(params))).hexdigest()


def at_scale(
    what: str,
    scaled_up: ScaledUpConfig | None,
    plans: Sequence[Plan],
    histograms: Sequence[float] = (),
) -> dict[str, Guarantee]:
    """The cost of `what`, with these plans, on a larger population; empty without `scaled_up`.

    Source: Augenstein et al. 2020, "Privacy at scale": with k times the clients per round, k times
    the noise multiplier leaves the noise of the mean unchanged. `histograms` are the multipliers of
    releases in which every client takes part.
    """
    if scaled_up is None:
        return {}
    events: list[DpEvent] = [GaussianDpEvent(z * scaled_up.factor) for z in histograms]
    for plan in plans:
        number = round(scaled_up.factor * plan.clients_per_round)
        if scaled_up.population < max(plan.population, number):
            least = f"the {plan.population} clients of the run and the {number} a round"
            given = f"scaled_up.population is {scaled_up.population}"
            by = "that scaled_up.factor asks for"
            raise InputError(f"{given}, expected at least {least} {by}")
        size = LargerPopulation(scaled_up.population, number, scaled_up.delta)
        events.append(plan.scaled_to(size).event())
    more = f"{scaled_up.factor:g} times as many in a round and the same noise of the mean"
    name = f"{what}, in a deployment of {scaled_up.population:,} clients with {more}"
    return {name: Guarantee.of_events(events, scaled_up.delta)}
