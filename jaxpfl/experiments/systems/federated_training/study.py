"""Carries out a config: its stages, its rounds, the table of its models, and its simulations.

`report.html` shows only what the run itself releases. Simulations, which the privacy statement does
not cover, have folders of their own in the run directory: `non_private/` for the same run without
privacy, and `other_candidates/NAME/` for the same run from a corpus that FreD did not choose. Each
has its own ledger, and `simulation.html` shows them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.config.published import PublishedDecoderConfig
from jaxpfl.experiments.config.reader import to_mapping, to_yaml
from jaxpfl.experiments.config.sections import LanguageModelConfig
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.engine.rounds import Loop, initial_state
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, Result, Setting, Tracking
from jaxpfl.experiments.engine.signals import Interrupted
from jaxpfl.experiments.engine.texts import sentences_of
from jaxpfl.experiments.engine.trackers import track
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.report.page import write_page
from jaxpfl.experiments.report.run_page import page_of_run
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.base import RESULT, SIMULATION, Workspace
from jaxpfl.experiments.systems.federated_training import simulation
from jaxpfl.experiments.systems.federated_training import stages as pipeline
from jaxpfl.experiments.systems.federated_training.build import TAGS, VOCABULARY, Experiment, build
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.page import page
from jaxpfl.experiments.systems.federated_training.ranking import Scores, ranking
from jaxpfl.experiments.systems.federated_training.stages import Stages
from jaxpfl.privacy.ledger import Budget
from jaxpfl.text.metrics.baselines import unigram_baseline


@dataclass(frozen=True)
class FederatedTraining:
    """A config, built; nothing is trained or released yet."""

    experiment: Experiment

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left of the stages, the rounds and the simulations."""
        return _Progress(self.experiment, workspace).public_record()

    def shared(self) -> tuple[Algorithm, Population]:
        """The rounds, if they are all that the config consists of; see `systems.base.Shareable`."""
        config = self.experiment.config
        others = {
            "fred": config.fred is not None,
            "prefinetune": config.prefinetune is not None,
            "run.also_without_privacy": config.run.also_without_privacy,
        }
        for name in (name for name, given in others.items() if given):
            raise InputError(
                f"{name}: several processes share the rounds of a training alone, which this is "
                "more than: run it in one process, or leave it out"
            )
        return self.experiment.algorithm, self.experiment.train


def prepare(config: Config) -> FederatedTraining:
    """Reads the data, makes the vocabulary and calibrates the plans."""
    return FederatedTraining(build(config))


class _Progress:
    """The run in its directory: each part is found there, or made and stored."""

    def __init__(self, experiment: Experiment, workspace: Workspace) -> None:
        self.config, self.workspace = experiment.config, workspace
        self.directory = workspace.directory
        self.ledger = study_runs.ledger_path(self.config.privacy, self.directory)
        self.stages: Stages | None = None
        self.start: Fitted | None = None
        self.untrained = experiment.algorithm
        if experiment.vocabulary is not None:
            experiment.vocabulary.save(self.directory / VOCABULARY)
        if experiment.tags is not None:
            held = {"words": experiment.tags.words, "tags": experiment.tags.tags}
            files.write_json(self.directory / TAGS, held)
        if self.config.prefinetune is not None:
            budget = self._budget(self.config)
            self.stages = pipeline.carry_out(experiment, workspace, self.ledger, budget)
            self.start = self.stages.prefinetuned[self.stages.winner]
            experiment = experiment.starting_from(self.start.params)
        self.experiment = experiment

    def public_record(self) -> dict[str, Any]:
        """Does what is left to do, and returns the public record."""
        fred = None if self.stages is None else self.stages.fred
        # FreD was charged to this ledger, and to no other.
        prior = () if fred is None else (fred["run"],)
        try:
            result = self._run("", self.experiment.algorithm, self.start, prior=prior)
        except (BudgetExhausted, Interrupted):
            write_page(self.directory, page(self.directory, {}))
            raise
        record = self._record(result)
        # What the run releases is complete before a simulation of it begins.
        written = self.workspace.write_result(record)
        write_page(self.directory, page(self.directory, written))
        simulations = self._other_candidates()
        if self.config.run.also_without_privacy:
            simulations[simulation.WITHOUT_PRIVACY] = self._without_privacy()
        if simulations:
            self._write_simulations({"": result, **simulations})
        return record

    def _run(
        self,
        folder: str,
        algorithm: Algorithm,
        start: Fitted | None,
        *,
        config: Config | None = None,
        prior: tuple[str, ...] = (),
        note: str = "",
    ) -> Result:
        """One run in a folder of the directory.

        Args:
          folder: "" for the run itself; a simulation has a folder, and a ledger in it.
          config: None for the run's own.
          prior: runs on the same ledger that this one depends on.
          note: a sentence that every statement of a simulation ends with.
        """
        config = self.config if config is None else config
        directory = self.directory / folder
        directory.mkdir(parents=True, exist_ok=True)
        evaluation, vocabulary = config.evaluation, self.experiment.vocabulary
        evaluator, sentences = None, None
        if evaluation.every:
            evaluator = self._evaluator("validation")
        words = self.experiment.published or vocabulary
        if evaluation.every and evaluation.sentences and words is not None:
            assert isinstance(config.model, LanguageModelConfig | PublishedDecoderConfig)
            sentences = sentences_of(
                self.experiment.model,
                words,
                seed=config.run.seed,
                number=evaluation.sentences,
                max_tokens=config.model.sequence_length,
            )
        loop = Loop(
            algorithm,
            self.experiment.train,
            directory=directory,
            ledger=directory / "ledger.jsonl" if folder else self.ledger,
            budget=self._budget(config),
            tracking=Tracking(
                evaluate=evaluator,
                evaluate_every=max(1, evaluation.every),
                sentences=sentences,
                checkpoint_every=config.run.checkpoint_every,
                progress=self.workspace.progress,
            ),
            setting=Setting(
                config=to_mapping(config),
                seed=config.run.seed,
                reproducible_noise=config.run.reproducible_noise,
                start=self._starts_from(start),
                prior=prior,
                note=note,
                resumed_as=self.directory,
            ),
            resume=(directory / "run.json").exists(),
            others=self.workspace.others,
        )
        if not folder:
            return loop.run()
        # The run's statement does not cover a simulation, so no service may receive it.
        with track(), page_of_run(directory):
            return loop.run()

    def _budget(self, config: Config) -> Budget | None:
        return study_runs.budget_of(config.privacy, simulated=config.simulated is not None)

    def _starts_from(self, start: Fitted | None) -> str | None:
        """Identifies the prefinetuned and the published parameters, where there are any."""
        parts = [] if start is None else [start.record["params_sha256"]]
        parts += (self.experiment.published_as or {}).values()
        return " ".join(parts) or None

    def _other_candidates(self) -> dict[str, Result]:
        """By folder, the runs from the candidates that FreD did not choose."""
        results: dict[str, Result] = {}
        if self.stages is None:
            return results
        for name, start in self.stages.prefinetuned.items():
            if name != self.stages.winner:
                folder = f"{simulation.OTHER_CANDIDATES}/{name}"
                algorithm = self.experiment.starting_from(start.params).algorithm
                algorithm = algorithm._replace(name=f"fed_avg from {name}")
                note = simulation.CANDIDATE_NOTE.format(name)
                results[folder] = self._run(folder, algorithm, start, note=note)
        return results

    def _without_privacy(self) -> Result:
        """The same run without privacy."""
        config, folder = _without_privacy(self.config), simulation.WITHOUT_PRIVACY
        if self.stages is None:
            # A run with stages before it cannot be repeated from a config of its own.
            path = self.directory / folder / "config.yaml"
            path.parent.mkdir(exist_ok=True)
            files.write_atomically(path, f"# {NOT_PRIVATE}\n{to_yaml(config)}")
        return self._run(folder, self.experiment.without_privacy(), self.start, config=config)

    def _record(self, result: Result) -> dict[str, Any]:
        """The record with its tables, which show only what the statement covers."""
        private = _is_private(self.directory)
        evaluator, stages = self._test_evaluator, self.stages
        fred = None
        if stages is not None and stages.scores is not None:
            fred = {**(stages.fred or {}), **ranking(stages.scores, {"before": self._before()})}
        return {
            **files.read_record(self.directory / RESULT),
            "tested_on": None if evaluator is None else evaluator.name,
            "table": [] if evaluator is None else self._table(result, evaluator, private),
            "fred": fred,
            "published_model": self.experiment.published_as,
            "language": self.experiment.model.columns == ("tokens",),
            "vocabulary_sha256": self._vocabulary_sha256(),
        }

    def _vocabulary_sha256(self) -> str | None:
        """Of the file with the words that the model's ids stand for."""
        if self.experiment.vocabulary is None:
            return None
        return files.sha256_file(self.directory / VOCABULARY)

    def _before(self) -> dict[str, Scores]:
        """The scores of all prefinetuned models, which read public text only: no privacy cost."""
        evaluator, stages = self._test_evaluator, self.stages
        if evaluator is None or stages is None:
            return {}
        return {name: evaluator(each.params).result() for name, each in stages.prefinetuned.items()}

    def _table(self, result: Result, evaluator: Evaluator, private: bool) -> list[dict[str, Any]]:
        """Scores the models, and word frequencies, on the same declared-public test clients."""
        experiment, stages = self.experiment, self.stages
        untrained = self.untrained
        assert untrained.params is not None
        params = untrained.params(initial_state(untrained, self.config.run.seed))
        name = "untrained" if experiment.published is None else "the published model"
        table = [{"model": name, "private": True, **evaluator(params).result()}]
        if experiment.vocabulary is not None and experiment.valid.num_examples:
            valid = self._declared("validation")
            unigram = unigram_baseline(
                np.asarray(valid.population.numeric()["tokens"]),
                evaluator.columns["tokens"],
                vocab_size=len(experiment.vocabulary),
            )
            row = {"model": "unigram", "private": True, "frequencies": valid.described}
            table.append({**row, **dataclasses.asdict(unigram)})
        if stages is not None:
            scores = evaluator(stages.prefinetuned[stages.winner].params).result()
            # FreD learned from the clients which corpus it is; without FreD nothing was learned.
            chosen = private or stages.scores is None
            name = f"prefinetuned on {stages.winner}"
            table.append({"model": name, "private": chosen, **scores})
        table.append({"model": OURS, "private": private, **evaluator(result.params).result()})
        return table

    def _write_simulations(self, results: Mapping[str, Result]) -> None:
        """Writes `simulation.json`: this run again, in the folder "", and its simulations."""
        evaluator, stages = self._test_evaluator, self.stages
        scores: dict[str, Scores] = {}
        if evaluator is not None:
            scores = {name: evaluator(each.params).result() for name, each in results.items()}
        record: dict[str, Any] = {
            "note": simulation.NOTE,
            "tested_on": None if evaluator is None else evaluator.name,
            "table": [
                {
                    "model": simulation.called(folder),
                    "folder": folder,
                    "private": _is_private(self.directory / folder),
                    "privacy": each.privacy,
                    **scores.get(folder, {}),
                }
                for folder, each in results.items()
            ],
        }
        if stages is not None and stages.scores is not None and len(stages.prefinetuned) > 1:
            folders = {
                name: "" if name == stages.winner else f"{simulation.OTHER_CANDIDATES}/{name}"
                for name in stages.prefinetuned
            }
            after = {name: scores[folder] for name, folder in folders.items() if folder in scores}
            record["fred"] = ranking(stages.scores, {"before": self._before(), "after": after})
        files.write_json(self.directory / SIMULATION, record)

    @cached_property
    def _test_evaluator(self) -> Evaluator | None:
        """Scores models on the declared-public test examples; None where there are none."""
        declared = self.config.evaluation.declared_public and self.experiment.test.num_examples
        return self._evaluator("test") if declared else None

    def _evaluator(self, part: str) -> Evaluator:
        limit = self.config.evaluation.max_examples
        return Evaluator(self.experiment.model, self._declared(part), max_examples=limit)

    def _declared(self, part: str) -> DeclaredPublic:
        """The "validation" or "test" clients, as `evaluation.declared_public` declares them."""
        population = self.experiment.valid if part == "validation" else self.experiment.test
        held_out = f"{part} clients of {self.config.data.source}"
        return DeclaredPublic(population, self.config.evaluation.source or held_out)


def _without_privacy(config: Config) -> Config:
    fred = config.fred
    if fred is not None:
        fred = dataclasses.replace(fred, epsilon=None, delta=None)
    privacy = dataclasses.replace(
        config.privacy,
        private=False,
        epsilon=None,
        noise_multiplier=None,
        delta=None,
        budget_epsilon=None,
        ledger=None,
        adaptive=False,
    )
    run = dataclasses.replace(config.run, also_without_privacy=False, reproducible_noise=False)
    return dataclasses.replace(config, fred=fred, privacy=privacy, run=run, simulated=None)


def _is_private(directory: Path) -> bool:
    """Whether the run in a directory has a guarantee, as it says itself."""
    return files.read_record(directory / "run.json", {"private": bool})["private"]
