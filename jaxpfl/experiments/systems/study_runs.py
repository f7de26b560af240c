"""For systems of several runs: one of their runs, the cost of all, and the cost at scale."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from jaxpfl.experiments.engine.rounds import Loop
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, Result, Setting, Tracking
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts, tree_arrays, tree_of
from jaxpfl.experiments.report.run_page import page_of_run, write_run_page
from jaxpfl.models.base import Model
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Budget, Ledger, guarantee_of
from jaxpfl.privacy.plan import Plan
from jaxpfl.privacy.simulated import LargerPopulation


def train(
    config: Any,
    algorithm: Algorithm,
    population: Population,
    *,
    name: str,
    directory: Path,
    ledger: Path,
    privacy: PrivacyConfig,
    tracking: Tracking,
    start: str | None = None,
    prior: Sequence[str] = (),
) -> Result:
    """Starts or resumes one run of a study, in `directory`/runs/`name`.

    Every run has its own secret. Its population keeps the fingerprint of the clients that it comes
    from, so that all runs of a world can be charged to one ledger, under the algorithm's name.

    Args:
      privacy: the section whose `budget_of` limits the ledger.
      start: identifies the initial parameters, and all else that the run's data depends on besides
        the config, if there is any; a resumed run must have the same.
      prior: runs on the same ledger that this one depends on; its epsilons include theirs.
    """
    folder = directory / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(
        algorithm,
        population,
        directory=folder,
        ledger=ledger,
        budget=budget_of(privacy, simulated=algorithm.queries[0].plan.simulates is not None),
        tracking=tracking,
        setting=Setting(
            config={**to_mapping(config), "run name": name},
            seed=config.run.seed,
            reproducible_noise=config.run.reproducible_noise,
            start=start,
            prior=tuple(prior),
            resumed_as=directory,
        ),
        resume=(folder / "run.json").exists(),
    )
    with page_of_run(folder):
        return loop.run()


def restate(folder: Path, ledger: Path, prior: Sequence[str] = ()) -> str:
    """Updates the statement of the finished run in `folder` and returns it.

    The first one did not cover the study's later runs on the same ledger; `prior` as in `train`.
    """
    expected = {"run": str, "plan": dict, "stamp": str, "note": str}
    run, path = files.read_record(folder / "run.json", expected), folder / "result.json"
    plan = Plan.from_dict(run["plan"])
    runs = (run["run"], *prior)
    statement = both_statements(Ledger.read(ledger), runs, plan.delta, plan.accountant)
    record = files.read_record(path, {"epsilons": dict})
    record |= {"privacy": stamped(statement, run["stamp"], run["note"])}
    if plan.private:
        spent = Ledger.read(ledger).spent(plan.delta, plan.accountant)
        record["epsilons"] = {**record["epsilons"], SHARED: spent}
    files.write_json(path, record)
    write_run_page(folder)
    return record["privacy"]


def budget_of(privacy: PrivacyConfig, *, simulated: bool = False) -> Budget | None:
    """The hard limit of a ledger: `budget_epsilon`, or `epsilon` if that is None.

    Args:
      simulated: `epsilon` is that of a larger population, and no limit for the run's clients.
    """
    limit = privacy.budget_epsilon
    if limit is None and not simulated:
        limit = privacy.epsilon
    if limit is None or privacy.delta is None:
        return None
    return Budget(limit, privacy.delta)


def ledger_path(privacy: PrivacyConfig, directory: Path) -> Path:
    """The ledger that a run in `directory` charges."""
    return directory / "ledger.jsonl" if privacy.ledger is None else Path(privacy.ledger)


def config_id(config: Any) -> str:
    """Identifies a config: the name under which artifacts that are no release are stored."""
    return f"{config.system} {hashlib.sha256(to_yaml(config).encode()).hexdigest()[:12]}"


def stored_params(artifacts: Artifacts, name: str, model: Model, train: Callable[[], Any]) -> Any:
    """The parameters of `model` that are stored as `name`; otherwise trains and stores them."""
    found = artifacts.load_or_compute(name, lambda: Artifact(arrays=tree_arrays(train())))
    return tree_of(found.arrays, jax.eval_shape(model.init, jax.random.key(0)), name)


def params_digest(params: Any) -> str:
    """The SHA-256 of parameters."""
    return hashlib.sha256(files.npz(tree_arrays(params))).hexdigest()


def composed_guarantee(ledgers: Sequence[Path], delta: float | None, stamp: str) -> dict[str, Any]:
    """The cost of all releases on these ledgers: epsilon, statement, number of each label."""
    if delta is None:
        return {"epsilon": None, "statement": NOT_PRIVATE, "labels": {}}
    charges = [charge for path in ledgers for charge in Ledger.read(path).charges]
    found = _stated(guarantee_of(charges, delta))
    found["statement"] = stamped(found["statement"], stamp)
    return {**found, "labels": dict(Counter(charge.label for charge in charges))}


def _stated(guarantee: Guarantee) -> dict[str, Any]:
    return {"epsilon": guarantee.epsilon(), "statement": guarantee.statement()}


def at_scale(
    scaled_up: ScaledUpConfig | None,
    plans: Mapping[str, Plan],
    before: Mapping[str, Sequence[float]] = {},
) -> dict[str, Any] | None:
    """The cost of these plans, each alone and all together, on a larger population.

    Source: Augenstein et al. 2020, "Privacy at scale": with k times the clients per round, k times
    the noise multiplier leaves the noise of the mean unchanged.

    Args:
      plans: by the name of their run.
      before: by run, noise multipliers of earlier releases that it depends on and in which every
        client took part, in order. They grow by the same factor and count in that run's epsilon.

    Raises:
      InputError: `scaled_up.population` is too small.
    """
    if scaled_up is None:
        return None
    found: dict[str, Any] = {}
    rounds: list[DpEvent] = []
    # Runs share their earlier releases, which count once in the composition of all runs.
    shared: list[GaussianDpEvent] = []
    for name, plan in plans.items():
        clients_per_round = round(scaled_up.factor * plan.clients_per_round)
        if scaled_up.population < max(plan.population, clients_per_round):
            raise InputError(
                f"scaled_up.population is {scaled_up.population}, expected at least the "
                f"{plan.population} clients of the run and the {clients_per_round} a round that "
                "scaled_up.factor asks for"
            )
        size = LargerPopulation(scaled_up.population, clients_per_round, scaled_up.delta)
        larger = plan.scaled_to(size)
        rounds.append(larger.event())
        needed = [GaussianDpEvent(z * scaled_up.factor) for z in before.get(name, ())]
        shared = max(shared, needed, key=len)
        found[name] = {
            "clients_per_round": clients_per_round,
            "noise_multiplier": larger.noise_multiplier,
            **_stated(Guarantee.of_events([larger.event(), *needed], scaled_up.delta)),
        }
    return {
        **dataclasses.asdict(scaled_up),
        "runs": found,
        "composed_guarantee": _stated(Guarantee.of_events([*rounds, *shared], scaled_up.delta)),
    }
