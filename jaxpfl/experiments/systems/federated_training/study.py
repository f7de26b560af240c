"""Carries out a config: its stages, its rounds, the table of its models, and its simulations.

A run directory holds what the run releases, and `report.html` shows that alone. Beside it, in
folders of their own, lie simulations, which the statement does not cover: `non_private/`, the same
run without privacy, and `other_candidates/NAME/`, the same run from a corpus that FreD did not
choose. Each has its own ledger and says what it is; `simulation.html` shows them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.config.reader import to_mapping, to_yaml
from jaxpfl.experiments.config.sections import LanguageModelConfig
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator, numeric_columns
from jaxpfl.experiments.engine.rounds import Loop, initial_state
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, Result, Setting, Tracking
from jaxpfl.experiments.engine.signals import Interrupted
from jaxpfl.experiments.engine.study_runs import budget_of
from jaxpfl.experiments.engine.texts import sentences_of
from jaxpfl.experiments.report.page import write_page
from jaxpfl.experiments.report.run_page import write_run_page
from jaxpfl.experiments.systems.base import RESULT, SIMULATION, Workspace
from jaxpfl.experiments.systems.federated_training import simulation
from jaxpfl.experiments.systems.federated_training import stages as pipeline
from jaxpfl.experiments.systems.federated_training.build import Experiment, build
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.page import page
from jaxpfl.experiments.systems.federated_training.ranking import Scores, ranking
from jaxpfl.experiments.systems.federated_training.stages import Stages
from jaxpfl.text.metrics.baselines import unigram_baseline


@dataclass(frozen=True)
class FederatedTraining:
    """A config, built; nothing is trained or released yet."""

    experiment: Experiment

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left of the stages, the rounds and the simulations."""
        return _carry_out(self.experiment, workspace)


def prepare(config: Config) -> FederatedTraining:
    """Reads the data, makes the vocabulary and calibrates the plans."""
    return FederatedTraining(build(config))


def _carry_out(experiment: Experiment, workspace: Workspace) -> dict[str, Any]:
    config, directory = experiment.config, workspace.directory
    if experiment.vocabulary is not None:
        experiment.vocabulary.save(directory / "vocabulary.json")
    ledger = directory / "ledger.jsonl"
    if config.privacy.ledger is not None:
        ledger = Path(config.privacy.ledger)
    stages, start = None, None
    if config.prefinetune is not None:
        stages = pipeline.carry_out(experiment, workspace, ledger, budget_of(config.privacy))
        start = stages.prefinetuned[stages.winner]
        experiment = experiment.starting_from(start.params)
    run = partial(_run, progress=workspace.progress, resumed_as=directory)
    try:
        # FreD was charged to the pipeline's ledger, and to no other.
        prior = [] if stages is None or stages.fred is None else [stages.fred["run"]]
        result = run(
            experiment, config, experiment.algorithm, directory, ledger, start=start, prior=prior
        )
    except (BudgetExhausted, Interrupted):
        write_page(directory, page(directory, {}))
        raise
    evaluator = _test_evaluator(experiment)
    record = _completed(experiment, stages, result, evaluator, directory)
    # What the run releases is whole before a simulation of it begins.
    written = workspace.write_result(record)
    write_page(directory, page(directory, written))
    simulations = _other_candidates(experiment, stages, directory, run)
    if config.run.also_without_privacy:
        folder = directory / simulation.WITHOUT_PRIVACY
        folder.mkdir(exist_ok=True)
        other_config = _without_privacy(config)
        if stages is None:
            # With stages before it the run cannot be carried out from a config of its own.
            path = folder / "config.yaml"
            files.write_atomically(path, f"# {NOT_PRIVATE}\n{to_yaml(other_config)}")
        algorithm = experiment.without_privacy(None if start is None else start.params)
        simulations[simulation.WITHOUT_PRIVACY] = run(
            experiment, other_config, algorithm, folder, folder / "ledger.jsonl", start=start
        )
        write_run_page(folder)
    if simulations:
        _write_simulations(stages, evaluator, result, simulations, directory)
    return record


def _other_candidates(
    experiment: Experiment,
    stages: Stages | None,
    directory: Path,
    run: Callable[..., Result],
) -> dict[str, Result]:
    """By folder, the runs from the candidates that were not chosen, each on a ledger of its own."""
    results: dict[str, Result] = {}
    if stages is None:
        return results
    for name, start in stages.prefinetuned.items():
        if name == stages.winner:
            continue
        folder = directory / simulation.OTHER_CANDIDATES / name
        folder.mkdir(parents=True, exist_ok=True)
        other = experiment.starting_from(start.params)
        results[f"{simulation.OTHER_CANDIDATES}/{name}"] = run(
            other,
            experiment.config,
            other.algorithm,
            folder,
            folder / "ledger.jsonl",
            start=start,
            candidate=name,
        )
        write_run_page(folder)
    return results


def _completed(
    experiment: Experiment,
    stages: Stages | None,
    result: Result,
    evaluator: Evaluator | None,
    directory: Path,
) -> dict[str, Any]:
    """The record with its tables: of what the statement covers, and of nothing else."""
    private = files.read_json(directory / "run.json")["private"]
    record = {
        **files.read_json(directory / RESULT),
        "tested_on": None if evaluator is None else evaluator.name,
        "table": [],
        "fred": None,
    }
    if evaluator is not None:
        record["table"] = _table(experiment, stages, result, evaluator, private)
    if stages is not None and stages.scores is not None:
        before = _before(stages, evaluator)
        record["fred"] = {**(stages.fred or {}), **ranking(stages.scores, {"before": before})}
    return record


def _before(stages: Stages, evaluator: Evaluator | None) -> dict[str, Scores]:
    """Of every prefinetuned candidate: from public text alone, so free of privacy cost."""
    if evaluator is None:
        return {}
    return {name: evaluator(start.params).result() for name, start in stages.prefinetuned.items()}


def _table(
    experiment: Experiment,
    stages: Stages | None,
    result: Result,
    evaluator: Evaluator,
    private: bool,
) -> list[dict[str, Any]]:
    """Scores the models, and word frequencies, on the same declared-public test clients."""
    config = experiment.config
    untrained = experiment.starting_from(None).algorithm
    params = initial_state(untrained, config.run.seed).params
    table = [{"model": "untrained", "private": True, **evaluator(params).result()}]
    if experiment.vocabulary is not None and experiment.valid.num_examples:
        valid = _declared(experiment, "validation")
        unigram = unigram_baseline(
            numeric_columns(valid.population)["tokens"],
            evaluator.columns["tokens"],
            vocab_size=len(experiment.vocabulary),
        )
        row = {"model": "unigram", "private": True, "frequencies": valid.described}
        table.append({**row, **dataclasses.asdict(unigram)})
    if stages is not None:
        scores = evaluator(stages.prefinetuned[stages.winner].params).result()
        # Which corpus it is was learned from the clients; where FreD did not choose, nothing was.
        chosen = private or stages.scores is None
        name = f"prefinetuned on {stages.winner}"
        table.append({"model": name, "private": chosen, **scores})
    table.append({"model": "this run", "private": private, **evaluator(result.params).result()})
    return table


def _write_simulations(
    stages: Stages | None,
    evaluator: Evaluator | None,
    result: Result,
    simulations: Mapping[str, Result],
    directory: Path,
) -> None:
    """Writes `simulation.json`: this run again, and what its statement does not cover."""
    scores = (
        {}
        if evaluator is None
        else {
            folder: evaluator(each.params).result()
            for folder, each in {"": result, **simulations}.items()
        }
    )
    record: dict[str, Any] = {
        "note": simulation.NOTE,
        "tested_on": None if evaluator is None else evaluator.name,
        "table": [
            {
                "model": simulation.called(folder),
                "folder": folder,
                "private": files.read_json(directory / folder / "run.json")["private"],
                "privacy": each.privacy,
                **scores.get(folder, {}),
            }
            for folder, each in {"": result, **simulations}.items()
        ],
    }
    if stages is not None and stages.scores is not None and len(stages.prefinetuned) > 1:
        folders = {
            name: "" if name == stages.winner else f"{simulation.OTHER_CANDIDATES}/{name}"
            for name in stages.prefinetuned
        }
        after = {name: scores[folder] for name, folder in folders.items()}
        both = {"before": _before(stages, evaluator), "after": after}
        record["fred"] = ranking(stages.scores, both)
    files.write_json(directory / SIMULATION, record)


def _run(
    experiment: Experiment,
    config: Config,
    algorithm: Algorithm,
    directory: Path,
    ledger: Path,
    *,
    start: Fitted | None,
    progress: bool,
    resumed_as: Path,
    prior: Sequence[str] = (),
    candidate: str | None = None,
) -> Result:
    """One run in `directory`.

    Args:
      prior: runs on the same ledger that this one depends on: FreD's.
      candidate: names the corpus of a run that FreD did not choose.
    """
    evaluation = config.evaluation
    tracking = Tracking(
        evaluate_every=max(1, evaluation.every),
        checkpoint_every=config.run.checkpoint_every,
        progress=progress,
    )
    if evaluation.every:
        evaluator = Evaluator(
            experiment.model,
            _declared(experiment, "validation"),
            max_examples=evaluation.max_examples,
        )
        tracking = dataclasses.replace(tracking, evaluate=evaluator)
    if evaluation.every and evaluation.sentences and experiment.vocabulary is not None:
        assert isinstance(config.model, LanguageModelConfig)
        sentences = sentences_of(
            experiment.model,
            experiment.vocabulary,
            seed=config.run.seed,
            number=evaluation.sentences,
            max_tokens=config.model.sequence_length,
        )
        tracking = dataclasses.replace(tracking, sentences=sentences)
    return Loop(
        algorithm if candidate is None else algorithm._replace(name=f"fed_avg from {candidate}"),
        experiment.train,
        directory=directory,
        ledger=ledger,
        budget=budget_of(config.privacy),
        tracking=tracking,
        setting=Setting(
            config=to_mapping(config),
            seed=config.run.seed,
            reproducible_noise=config.run.reproducible_noise,
            start=None if start is None else start.record["params_sha256"],
            prior=tuple(prior),
            note="" if candidate is None else simulation.CANDIDATE_NOTE.format(candidate),
            resumed_as=resumed_as,
        ),
        resume=(directory / "run.json").exists(),
    ).run()


def _without_privacy(config: Config) -> Config:
    fred = config.fred
    if fred is not None:
        fred = dataclasses.replace(fred, epsilon=None, delta=None)
    return dataclasses.replace(
        config,
        fred=fred,
        privacy=dataclasses.replace(
            config.privacy,
            private=False,
            epsilon=None,
            noise_multiplier=None,
            delta=None,
            budget_epsilon=None,
            ledger=None,
            adaptive=False,
        ),
        run=dataclasses.replace(config.run, also_without_privacy=False, reproducible_noise=False),
    )


def _declared(experiment: Experiment, part: str) -> DeclaredPublic:
    """The "validation" or "test" clients, as `evaluation.declared_public` declares them."""
    population = experiment.valid if part == "validation" else experiment.test
    return DeclaredPublic(population, f"{part} clients of {experiment.config.data.source}")


def _test_evaluator(experiment: Experiment) -> Evaluator | None:
    """Scores models on the declared-public test examples; None where there are none."""
    config = experiment.config
    if not config.evaluation.declared_public or not experiment.test.num_examples:
        return None
    return Evaluator(
        experiment.model,
        _declared(experiment, "test"),
        max_examples=config.evaluation.max_examples,
    )
