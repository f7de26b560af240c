"""Carries out a config: the run, the same run without privacy, the table that compares them."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments import files
from jaxpfl.experiments.build import Experiment, build
from jaxpfl.experiments.config import Config, LanguageModelConfig
from jaxpfl.experiments.config_file import load, to_mapping, to_yaml
from jaxpfl.experiments.evaluate import DeclaredPublic, Evaluator, numeric_columns
from jaxpfl.experiments.loop import Interrupted, Loop, Result, Tracking, initial_state
from jaxpfl.experiments.report import write_report
from jaxpfl.experiments.texts import sentences_of
from jaxpfl.experiments.tracking import jsonable
from jaxpfl.privacy.ledger import Budget
from jaxpfl.text.baselines import unigram_baseline

WITHOUT_PRIVACY = "non_private"
"""Folder, in the run directory, of the same run without privacy."""


@dataclass(frozen=True)
class Outcome:
    """What a carried out config came to; public.

    Attributes:
      out: the run directory.
      rounds: rounds done.
      private: whether the run is.
      privacy: the statement: (epsilon, delta), unit, adjacency, accountant.
      metrics: the last round's.
      table: models compared on the declared-public test clients: name, private, metrics.
    """

    out: Path
    rounds: int
    private: bool
    privacy: str
    metrics: dict[str, Any]
    table: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        record = {**dataclasses.asdict(self), "report": str(self.out / "report.html")}
        return jsonable({**record, "out": str(self.out)})


def run_config(config: Config, out: str | Path, *, shown: bool = True) -> Outcome:
    """Carries out `config` in the new or empty directory `out`.

    Raises:
      InputError, BudgetExhausted, Interrupted: as `jaxpfl.run` does.
    """
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    with files.exclusive(directory):
        path = directory / "config.yaml"
        if path.exists() or (directory / "run.json").exists():
            raise InputError(
                f"{directory}: holds a run already; go on with `jaxpfl resume {directory}` or "
                "choose another --out"
            )
        # Built first: a directory that cannot be run does not come to look like a run.
        experiment = build(config)
        files.write_atomically(path, _heading(config) + to_yaml(config))
        return _execute(experiment, directory, shown)


def resume_run(out: str | Path, *, shown: bool = True) -> Outcome:
    """Goes on with the run in `out`, from its last good checkpoint, to the same final bits.

    Raises:
      InputError: `out` holds no run, or what it holds was altered.
      CorruptFile, BudgetExhausted, Interrupted: as `jaxpfl.run` does.
    """
    directory = Path(out)
    config = load(directory / "config.yaml")
    with files.exclusive(directory):
        return _execute(build(config), directory, shown)


def _heading(config: Config) -> str:
    return "" if config.privacy.private else "# NOT PRIVATE: trained without privacy\n"


def _execute(experiment: Experiment, directory: Path, shown: bool) -> Outcome:
    config = experiment.config
    if experiment.vocabulary is not None:
        experiment.vocabulary.save(directory / "vocabulary.json")
    try:
        result = _run(experiment, config, experiment.algorithm, directory, shown)
    except (BudgetExhausted, Interrupted):
        write_report(directory)
        raise
    other = None
    if config.run.also_without_privacy:
        folder = directory / WITHOUT_PRIVACY
        folder.mkdir(exist_ok=True)
        other_config = _without_privacy(config)
        path = folder / "config.yaml"
        files.write_atomically(path, _heading(other_config) + to_yaml(other_config))
        other = _run(experiment, other_config, experiment.without_privacy(), folder, shown)
        write_report(folder)
    table = _compare(experiment, result, other)
    path = directory / "result.json"
    record = {**files.read_json(path), "table": table}
    files.write_atomically(path, json.dumps(jsonable(record), indent=1) + "\n")
    write_report(directory)
    return Outcome(
        out=directory,
        rounds=result.rounds,
        private=record["private"],
        privacy=result.privacy,
        metrics=result.metrics,
        table=table,
    )


def _run(
    experiment: Experiment, config: Config, algorithm: Algorithm, directory: Path, shown: bool
) -> Result:
    privacy, evaluation = config.privacy, config.evaluation
    limit = privacy.budget_epsilon if privacy.budget_epsilon is not None else privacy.epsilon
    budget = None
    if limit is not None and privacy.delta is not None:
        budget = Budget(limit, privacy.delta)
    ledger = Path(privacy.ledger) if privacy.ledger is not None else directory / "ledger.jsonl"
    tracking = Tracking(
        evaluate_every=max(1, evaluation.every),
        checkpoint_every=config.run.checkpoint_every,
        shown=shown,
    )
    if evaluation.every:
        evaluator = Evaluator(
            experiment.model,
            DeclaredPublic(experiment.valid),
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
        algorithm,
        experiment.train,
        directory=directory,
        ledger=ledger,
        budget=budget,
        seed=config.run.seed,
        reproducible_noise=config.run.reproducible_noise,
        tracking=tracking,
        resume=(directory / "run.json").exists(),
        config=to_mapping(config),
    ).run()


def _without_privacy(config: Config) -> Config:
    return dataclasses.replace(
        config,
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


def _compare(experiment: Experiment, result: Result, other: Result | None) -> list[dict[str, Any]]:
    """Scores the models, and word frequencies, on the same declared-public test examples."""
    config = experiment.config
    if not config.evaluation.declared_public or not experiment.test.num_examples:
        return []
    evaluator = Evaluator(
        experiment.model,
        DeclaredPublic(experiment.test),
        max_examples=config.evaluation.max_examples,
    )
    algorithm = experiment.algorithm
    untrained = algorithm.params(initial_state(algorithm, config.run.seed))
    private = config.privacy.private and not config.run.reproducible_noise
    table = [{"model": "untrained", "private": True, **evaluator(untrained).result()}]
    if experiment.vocabulary is not None and experiment.valid.num_examples:
        unigram = unigram_baseline(
            numeric_columns(experiment.valid)["tokens"],
            evaluator.columns["tokens"],
            vocab_size=len(experiment.vocabulary),
        )
        # The frequencies are those of the valid clients, which were declared public.
        table.append({"model": "unigram", "private": True, **dataclasses.asdict(unigram)})
    table.append({"model": "this run", "private": private, **evaluator(result.params).result()})
    if other is not None:
        scores = evaluator(other.params).result()
        table.append({"model": "the same run without privacy", "private": False, **scores})
    return table
