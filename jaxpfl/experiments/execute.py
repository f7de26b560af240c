"""Carries out a config: its stages, its rounds, and the runs and the table they are compared with.

A run directory holds what the run releases. Beside it, in folders of their own, lie runs that are
simulation: `non_private/`, the same run without privacy, and `losers/NAME/`, the same run from a
corpus that FreD did not choose. Each has its own ledger and says what it is.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments import files, pipeline
from jaxpfl.experiments.build import Experiment, build
from jaxpfl.experiments.config import Config, LanguageModelConfig
from jaxpfl.experiments.config_file import load, to_mapping, to_yaml
from jaxpfl.experiments.evaluate import DeclaredPublic, Evaluator, numeric_columns
from jaxpfl.experiments.loop import Interrupted, Loop, Result, Tracking, initial_state
from jaxpfl.experiments.pipeline import Stages
from jaxpfl.experiments.prefinetune import Prefinetuned
from jaxpfl.experiments.ranking import ranking
from jaxpfl.experiments.report import write_report
from jaxpfl.experiments.texts import sentences_of
from jaxpfl.experiments.tracking import jsonable
from jaxpfl.privacy.ledger import Budget
from jaxpfl.text.baselines import unigram_baseline

WITHOUT_PRIVACY = "non_private"
"""Folder, in the run directory, of the same run without privacy."""

LOSERS = "losers"
"""Folder, in the run directory, of the runs from the candidates that FreD did not choose."""

COUNTERFACTUAL = (
    "COUNTERFACTUAL: a simulation outside the pipeline's privacy cost, of what the run from "
    "candidate {!r} would have come to; publish nothing of it beside the pipeline's own output"
)


SIMULATION = (
    "'after' in the rows marked counterfactual, and the rank correlation 'after', come from runs "
    "on ledgers of their own, outside the privacy stated: publish none of it"
)


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
      fred: the candidates' FreD, and how it goes with their perplexity (see `ranking`), or None.
    """

    out: Path
    rounds: int
    private: bool
    privacy: str
    metrics: dict[str, Any]
    table: list[dict[str, Any]]
    fred: dict[str, Any] | None = None

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
    if not isinstance(config, Config):
        raise InputError(f"{directory}: holds the study {config.study!r}, not a run")
    with files.exclusive(directory):
        return _execute(build(config), directory, shown)


def _heading(config: Config) -> str:
    return "" if config.privacy.private else "# NOT PRIVATE: trained without privacy\n"


def _execute(experiment: Experiment, directory: Path, shown: bool) -> Outcome:
    config = experiment.config
    if experiment.vocabulary is not None:
        experiment.vocabulary.save(directory / "vocabulary.json")
    ledger = directory / "ledger.jsonl"
    if config.privacy.ledger is not None:
        ledger = Path(config.privacy.ledger)
    stages, start = None, None
    if config.prefinetune is not None:
        stages = pipeline.carry_out(experiment, directory, ledger, _budget(config), shown=shown)
        start = stages.prefinetuned[stages.winner]
        experiment = experiment.starting_from(start.params)
    run = partial(_run, experiment, start=start, shown=shown, resumed_as=directory)
    try:
        result = run(config, experiment.algorithm, directory, ledger)
    except (BudgetExhausted, Interrupted):
        write_report(directory)
        raise
    other = None
    if config.run.also_without_privacy:
        folder = directory / WITHOUT_PRIVACY
        folder.mkdir(exist_ok=True)
        other_config = _without_privacy(config)
        if stages is None:
            # With stages before it the run cannot be carried out from a config of its own.
            path = folder / "config.yaml"
            files.write_atomically(path, _heading(other_config) + to_yaml(other_config))
        algorithm = experiment.without_privacy(None if start is None else start.params)
        other = run(other_config, algorithm, folder, folder / "ledger.jsonl")
        write_report(folder)
    losers = {} if stages is None else _run_losers(experiment, stages, directory, shown)
    table = _compare(experiment, stages, result, other)
    fred = None
    if stages is not None and stages.scores is not None:
        fred = _ranked(experiment, stages, {stages.winner: result, **losers})
    path = directory / "result.json"
    record = {**files.read_json(path), "table": table}
    if fred is not None:
        record["fred"] = fred
    files.write_atomically(path, json.dumps(jsonable(record), indent=1) + "\n")
    write_report(directory)
    return Outcome(
        out=directory,
        rounds=result.rounds,
        private=record["private"],
        privacy=result.privacy,
        metrics=result.metrics,
        table=table,
        fred=fred,
    )


def _run_losers(
    experiment: Experiment, stages: Stages, directory: Path, shown: bool
) -> dict[str, Result]:
    """The runs from the candidates that were not chosen, each in its own folder and ledger."""
    results = {}
    for name, start in stages.prefinetuned.items():
        if name == stages.winner:
            continue
        folder = directory / LOSERS / name
        folder.mkdir(parents=True, exist_ok=True)
        loser = experiment.starting_from(start.params)
        results[name] = _run(
            loser,
            experiment.config,
            loser.algorithm,
            folder,
            folder / "ledger.jsonl",
            start=start,
            shown=shown,
            resumed_as=directory,
            counterfactual=name,
        )
        write_report(folder)
    return results


def _ranked(
    experiment: Experiment, stages: Stages, results: Mapping[str, Result]
) -> dict[str, Any]:
    """FreD beside the scores of every model that there is; see `ranking`."""
    assert stages.scores is not None
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    evaluator = _test_evaluator(experiment)
    if evaluator is not None:
        for name, start in stages.prefinetuned.items():
            before[name] = evaluator(start.params).result()
        for name, result in results.items():
            after[name] = evaluator(result.params).result()
    record = {**(stages.fred or {}), **ranking(stages.scores, before, after)}
    if len(after) > 1:
        record["simulation"] = SIMULATION
    return record


def _budget(config: Config) -> Budget | None:
    privacy = config.privacy
    limit = privacy.budget_epsilon if privacy.budget_epsilon is not None else privacy.epsilon
    if limit is None or privacy.delta is None:
        return None
    return Budget(limit, privacy.delta)


def _run(
    experiment: Experiment,
    config: Config,
    algorithm: Algorithm,
    directory: Path,
    ledger: Path,
    *,
    start: Prefinetuned | None,
    shown: bool,
    resumed_as: Path,
    counterfactual: str | None = None,
) -> Result:
    evaluation = config.evaluation
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
    # FreD was charged to the pipeline's ledger, and to no other.
    pipelines_own = counterfactual is None and config.privacy.private
    fred = experiment.fred if pipelines_own else None
    return Loop(
        algorithm,
        experiment.train,
        directory=directory,
        ledger=ledger,
        budget=_budget(config),
        seed=config.run.seed,
        reproducible_noise=config.run.reproducible_noise,
        tracking=tracking,
        resume=(directory / "run.json").exists(),
        config=to_mapping(config),
        label="fed_avg" if counterfactual is None else f"fed_avg from {counterfactual}",
        before=None if fred is None else fred.event(),
        start=None if start is None else start.record["params_sha256"],
        note="" if counterfactual is None else COUNTERFACTUAL.format(counterfactual),
        resumed_as=resumed_as,
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


def _test_evaluator(experiment: Experiment) -> Evaluator | None:
    """Scores models on the declared-public test examples; None where there are none."""
    config = experiment.config
    if not config.evaluation.declared_public or not experiment.test.num_examples:
        return None
    return Evaluator(
        experiment.model,
        DeclaredPublic(experiment.test),
        max_examples=config.evaluation.max_examples,
    )


def _compare(
    experiment: Experiment, stages: Stages | None, result: Result, other: Result | None
) -> list[dict[str, Any]]:
    """Scores the models, and word frequencies, on the same declared-public test examples."""
    config = experiment.config
    evaluator = _test_evaluator(experiment)
    if evaluator is None:
        return []
    untrained = experiment.starting_from(None).algorithm
    params = untrained.params(initial_state(untrained, config.run.seed))
    private = config.privacy.private and not config.run.reproducible_noise
    table = [{"model": "untrained", "private": True, **evaluator(params).result()}]
    if experiment.vocabulary is not None and experiment.valid.num_examples:
        unigram = unigram_baseline(
            numeric_columns(experiment.valid)["tokens"],
            evaluator.columns["tokens"],
            vocab_size=len(experiment.vocabulary),
        )
        # The frequencies are those of the valid clients, which were declared public.
        table.append({"model": "unigram", "private": True, **dataclasses.asdict(unigram)})
    if stages is not None:
        scores = evaluator(stages.prefinetuned[stages.winner].params).result()
        # Which corpus it is was learned from the clients; where FreD did not choose, nothing was.
        chosen = private or stages.scores is None
        name = f"prefinetuned on {stages.winner}"
        table.append({"model": name, "private": chosen, **scores})
    table.append({"model": "this run", "private": private, **evaluator(result.params).result()})
    if other is not None:
        scores = evaluator(other.params).result()
        table.append({"model": "the same run without privacy", "private": False, **scores})
    return table
