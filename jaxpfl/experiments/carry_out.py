"""Carries out a study: its runs side by side in one directory, and one page that compares them.

    config.yaml                  the resolved config
    runs/NAME/                   a run like any other, with a report of its own
    ledger.jsonl, or worlds/W/   a ledger for each world: what happened to the same clients
    study.json, pictures/        what came out; `report.html` is drawn from these

Every part is written whole before the next one starts and is found again by a resumed study, which
ends in the same bits.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_accounting import DpEvent, GaussianDpEvent

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments.config.reader import load, to_mapping, to_yaml
from jaxpfl.experiments.config.sections import Config, PrivacyConfig
from jaxpfl.experiments.config.study_config import (
    GanInversionConfig,
    OovConcatenationConfig,
    ScaledUpConfig,
    Study,
)
from jaxpfl.experiments.engine.cost import both_statements, stamped
from jaxpfl.experiments.engine.rounds import Loop
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, REPRODUCIBLE, Result, Setting, Tracking
from jaxpfl.experiments.engine.signals import Interrupted
from jaxpfl.experiments.engine.tracking import jsonable
from jaxpfl.experiments.report.run_page import write_report
from jaxpfl.experiments.systems.federated_training.stages import load_params, save_params
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig
from jaxpfl.privacy.guarantee import Guarantee, guarantee_of
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.plan import Plan

RECORD = "study.json"


@dataclass(frozen=True)
class StudyOutcome:
    """What a study came to; public.

    Attributes:
      out: its directory.
      record: what `study.json` holds.
      lines: the same as text, for a terminal.
    """

    out: Path
    record: dict[str, Any]
    lines: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {**self.record, "out": str(self.out), "report": str(self.out / "report.html")}


def run_study(config: Study, out: str | Path, *, shown: bool = True) -> StudyOutcome:
    """Carries out a study in the new or empty directory `out`.

    Raises:
      InputError, BudgetExhausted, Interrupted: as `jaxpfl.run` does.
    """
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    with files.exclusive(directory):
        path = directory / "config.yaml"
        if path.exists():
            raise InputError(
                f"{directory}: holds a run already; go on with `jaxpfl resume {directory}` or "
                "choose another --out"
            )
        carry_out = _parts(config)[0](config)
        stamp = _stamp(config)
        heading = f"# {stamp}\n" if stamp else ""
        files.write_atomically(path, heading + to_yaml(config))
        return _finish(config, carry_out(directory, shown), directory)


def resume_study(out: str | Path, *, shown: bool = True) -> StudyOutcome:
    """Goes on with the study in `out`, to the same final bits.

    Raises:
      InputError: `out` holds no study, or what it holds was altered.
      CorruptFile, BudgetExhausted, Interrupted: as `jaxpfl.run` does.
    """
    directory = Path(out)
    config = load(directory / "config.yaml")
    if isinstance(config, Config):
        raise InputError(f"{directory}: holds no study")
    with files.exclusive(directory):
        return _finish(config, _parts(config)[0](config)(directory, shown), directory)


def write_study_report(out: str | Path) -> Path:
    """Draws the pictures and `report.html` of a finished study anew."""
    from jaxpfl.experiments.report.page import write_page

    directory = Path(out)
    if not (directory / RECORD).exists():
        raise InputError(f"{directory}: holds no finished study: there is no {RECORD}")
    record = files.read_json(directory / RECORD)
    config = load(directory / "config.yaml")
    return write_page(directory, _parts(config)[1](directory, record))


def _finish(config: Study, record: dict[str, Any], directory: Path) -> StudyOutcome:
    record = jsonable({"study": config.study, "stamp": stamp_of(directory), **record})
    files.write_atomically(directory / RECORD, json.dumps(record, indent=1) + "\n")
    write_study_report(directory)
    return StudyOutcome(directory, record, _parts(config)[2](record))


def _parts(config: Any) -> tuple[Callable, Callable, Callable]:
    """A study's three functions: prepare (then carry out), its page, its lines of text."""
    if isinstance(config, GanInversionConfig):
        from jaxpfl.experiments.systems.gan_inversion import page as gan_inversion_page
        from jaxpfl.experiments.systems.gan_inversion import study as gan_inversion

        return gan_inversion.prepare, gan_inversion_page.page, gan_inversion_page.lines
    if isinstance(config, SyntheticTextConfig):
        from jaxpfl.experiments.systems.synthetic_text import page as synthetic_text_page
        from jaxpfl.experiments.systems.synthetic_text import study as synthetic_text

        return synthetic_text.prepare, synthetic_text_page.page, synthetic_text_page.lines
    from jaxpfl.experiments.systems.oov_concatenation import page as oov_concatenation_page
    from jaxpfl.experiments.systems.oov_concatenation import study as oov_concatenation

    return oov_concatenation.prepare, oov_concatenation_page.page, oov_concatenation_page.lines


def stamp_of(directory: Path) -> str:
    """What everything made of a study without privacy says; "" for a private one.

    Read back from the head of its config.yaml, where it was written before anything was released.
    """
    first = (directory / "config.yaml").read_text("utf-8").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# NOT PRIVATE") else ""


def _stamp(config: Study) -> str:
    privacy = config.words.privacy if isinstance(config, OovConcatenationConfig) else config.privacy
    if not privacy.private:
        return NOT_PRIVATE
    return REPRODUCIBLE if config.run.reproducible_noise else ""


def train(
    config: Study,
    algorithm: Algorithm,
    population: Population,
    *,
    name: str,
    directory: Path,
    ledger: Path,
    budget: Budget | None,
    tracking: Tracking,
    start: str,
    prior: Sequence[str] = (),
) -> Result:
    """One run of a study, in `directory`/runs/`name`: fresh, or resumed where it was left.

    Every run has a secret of its own. Its population keeps the fingerprint of the clients it was
    derived from, so that all runs of a world are charged to one ledger, under the algorithm's name.

    Args:
      start: identifies all that the run's data was selected or encoded with and its parameters
        start from: a resumed run goes on with the same alone.
      prior: runs on the same ledger that this one depends on; its epsilons include theirs.
    """
    folder = directory / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(
        algorithm,
        population,
        directory=folder,
        ledger=ledger,
        budget=budget,
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
    try:
        result = loop.run()
    except (BudgetExhausted, Interrupted):
        write_report(folder)
        raise
    write_report(folder)
    return result


def restate(folder: Path, ledger: Path, prior: Sequence[str] = ()) -> str:
    """Writes a finished run's statement again, once its study's other runs are on the ledger.

    The statement of the first one was made when its ledger held nothing else.

    Args:
      folder: of the run.
      prior: as `train`.
    """
    run, path = files.read_json(folder / "run.json"), folder / "result.json"
    plan = Plan.from_dict(run["plan"])
    runs = (run["run"], *prior)
    statement = both_statements(Ledger.read(ledger), runs, plan.delta, plan.accountant)
    record = files.read_json(path) | {"privacy": stamped(statement, run["stamp"], run["note"])}
    files.write_atomically(path, json.dumps(record, indent=1) + "\n")
    write_report(folder)
    return record["privacy"]


def budget_of(privacy: PrivacyConfig) -> Budget | None:
    """The hard limit on a world's ledger: `budget_epsilon`, or `epsilon` where that is null."""
    limit = privacy.epsilon if privacy.budget_epsilon is None else privacy.budget_epsilon
    if limit is None or privacy.delta is None:
        return None
    return Budget(limit, privacy.delta)


def kept(path: Path, make: Callable[[], Any], like: Any) -> tuple[Any, str]:
    """Parameters that were made once: read where they are, else made and written; their SHA-256.

    Made again on another machine they may differ in their last bits, and what a run selects by
    them with it.

    Args:
      make: returns them.
      like: shapes.

    Raises:
      CorruptFile: the file was altered.
    """
    note = path.with_suffix(".json")
    if not note.exists():
        path.parent.mkdir(exist_ok=True)
        digest = save_params(path, make())
        files.write_atomically(note, json.dumps({"sha256": digest}) + "\n")
    digest = files.read_json(note)["sha256"]
    return load_params(path, like, digest), digest


def together(ledgers: Sequence[Path], delta: float | None, stamp: str) -> dict[str, Any]:
    """What all releases on these ledgers cost together: epsilon, statement, releases by label."""
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
    """What these plans would cost, alone and together, on more clients with the same mean's noise.

    Source: Augenstein et al. 2020, "Privacy at scale": k times the clients a round need k times
    the noise multiplier.

    Args:
      before: noise multipliers of what each run depends on and everyone took part in, the first
        releases first; these grow by the same factor, and are part of that run's epsilon.

    Raises:
      InputError: the larger population is not large enough.
    """
    if scaled_up is None:
        return None
    found: dict[str, Any] = {}
    rounds: list[DpEvent] = []
    # Releases that several runs depend on were made once.
    shared: list[GaussianDpEvent] = []
    for name, plan in plans.items():
        clients_per_round = round(scaled_up.factor * plan.clients_per_round)
        if scaled_up.population < max(plan.population, clients_per_round):
            raise InputError(
                f"scaled_up.population is {scaled_up.population}, expected at least the "
                f"{plan.population} clients of the run and the {clients_per_round} a round that "
                "scaled_up.factor asks for"
            )
        assert plan.noise is not None, "the config refuses scaled_up without privacy"
        larger = dataclasses.replace(
            plan,
            participation=dataclasses.replace(
                plan.participation,
                population=scaled_up.population,
                clients_per_round=clients_per_round,
            ),
            noise=dataclasses.replace(
                plan.noise, multiplier=plan.noise.multiplier * scaled_up.factor
            ),
            delta=scaled_up.delta,
        )
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
        "together": _stated(Guarantee.of_events([*rounds, *shared], scaled_up.delta)),
    }
