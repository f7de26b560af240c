"""Carries out a study: its stages, its rounds, the table of its models, and its simulations.

`report.html` shows only what the run itself releases. Simulations, which the privacy statement does
not cover, have folders of their own in the run directory: `non_private/` for the same run without
privacy, and `other_candidates/NAME/` for the same run from a corpus that FreD did not choose. Each
has its own ledger, and `simulation.html` shows them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.errors import BudgetExhausted
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
from jaxpfl.experiments.systems import RESULT, SIMULATION
from jaxpfl.experiments.systems.federated_training import simulation
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.experiments.systems.federated_training.page import page
from jaxpfl.experiments.systems.federated_training.ranking import Scores, ranking
from jaxpfl.experiments.systems.federated_training.stages import Stages
from jaxpfl.experiments.systems.federated_training.study import Prepared
from jaxpfl.experiments.systems.workspace import Workspace, budget_of, ledger_path
from jaxpfl.text.metrics.baselines import unigram_baseline

VOCABULARY = "vocabulary.json"
"""The words of a language model, in the run's directory."""

TAGS = "tag_vocabulary.json"
"""The words and tags of a model that predicts tags, in the run's directory."""


def carry_out(study: Prepared, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    return _Run(study, workspace).public_record()


class _Run:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: Prepared, workspace: Workspace) -> None:
        self.study, self.config, self.workspace = study, study.config, workspace
        self.directory = workspace.directory
        if study.vocabulary is not None:
            study.vocabulary.save(self.directory / VOCABULARY)
        if study.tags is not None:
            held = {"words": study.tags.words, "tags": study.tags.tags}
            files.write_json(self.directory / TAGS, held)
        self.stages: Stages | None = None
        self.start: Fitted | None = None
        self.algorithm = study.algorithm
        if self.config.prefinetune is not None:
            self.stages = Stages.of(study, workspace)
            self.start = self.stages.prefinetuned[self.stages.winner]
            self.algorithm = study.starting_from(self.start.params)

    def public_record(self) -> dict[str, Any]:
        fred = None if self.stages is None else self.stages.fred
        # FreD was charged to this ledger, and to no other.
        prior = () if fred is None else (fred["run"],)
        try:
            result = self._run("", self.algorithm, self.start, prior=prior)
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
        directory, every = self.directory / folder, config.evaluation.every
        directory.mkdir(parents=True, exist_ok=True)
        own = ledger_path(self.config.privacy, self.directory)
        # Identifies the prefinetuned and the published parameters, where there are any.
        starts = [] if start is None else [start.record["params_sha256"]]
        starts += (self.study.published_as or {}).values()
        loop = Loop(
            algorithm,
            self.study.train,
            directory=directory,
            ledger=directory / "ledger.jsonl" if folder else own,
            budget=budget_of(config.privacy, simulated=config.simulated is not None),
            tracking=Tracking(
                evaluate=self._evaluator("validation") if every else None,
                evaluate_every=max(1, every),
                sentences=self._sentences() if every else None,
                checkpoint_every=config.run.checkpoint_every,
                progress=self.workspace.progress,
            ),
            setting=Setting(
                config=to_mapping(config),
                seed=config.run.seed,
                reproducible_noise=config.run.reproducible_noise,
                start=" ".join(starts) or None,
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

    def _sentences(self) -> Callable[[Any, int], list[str]] | None:
        """Writes sentences by the model of a round."""
        study, settings, number = self.study, self.config.model, self.config.evaluation.sentences
        if not number or not isinstance(settings, LanguageModelConfig | PublishedDecoderConfig):
            return None
        draws: dict[str, Any] = {
            "seed": self.config.run.seed,
            "number": number,
            "max_tokens": settings.sequence_length,
        }
        words = study.vocabulary or study.published
        assert words is not None
        return sentences_of(study.model, words, **draws)

    def _other_candidates(self) -> dict[str, Result]:
        """By folder, the runs from the candidates that FreD did not choose."""
        results: dict[str, Result] = {}
        for name, start in self.stages.prefinetuned.items() if self.stages else ():
            if self.stages and name != self.stages.winner:
                folder = f"{simulation.OTHER_CANDIDATES}/{name}"
                algorithm = self.study.starting_from(start.params)
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
        start = self.study.start if self.start is None else self.start.params
        algorithm = self.study.starting_from(start, private=False)
        return self._run(folder, algorithm, self.start, config=config)

    def _record(self, result: Result) -> dict[str, Any]:
        """The record with its tables, which show only what the statement covers."""
        evaluator, stages, study = self._test_evaluator, self.stages, self.study
        fred = digest = None
        if stages is not None and stages.scores is not None:
            fred = {**(stages.fred or {}), **ranking(stages.scores, {"before": self._before()})}
        if study.vocabulary is not None:
            digest = files.sha256_file(self.directory / VOCABULARY)
        return {
            **files.read_record(self.directory / RESULT),
            "tested_on": None if evaluator is None else evaluator.name,
            "table": [] if evaluator is None else self._table(result, evaluator),
            "fred": fred,
            "published_model": study.published_as,
            "language": study.model.columns == ("tokens",),
            "vocabulary_sha256": digest,
        }

    def _before(self) -> dict[str, Scores]:
        """The scores of all prefinetuned models, which read public text only: no privacy cost."""
        evaluator, stages = self._test_evaluator, self.stages
        if evaluator is None or stages is None:
            return {}
        return {name: evaluator(each.params).result() for name, each in stages.prefinetuned.items()}

    def _table(self, result: Result, evaluator: Evaluator) -> list[dict[str, Any]]:
        """Scores the models, and word frequencies, on the same declared-public test clients."""
        study, stages, untrained = self.study, self.stages, self.study.algorithm
        private = _is_private(self.directory)
        assert untrained.params is not None
        params = untrained.params(initial_state(untrained, self.config.run.seed))
        name = "untrained" if study.published is None else "the published model"
        table = [{"model": name, "private": True, **evaluator(params).result()}]
        if study.vocabulary is not None and study.valid.num_examples:
            valid = self._declared("validation")
            unigram = unigram_baseline(
                np.asarray(valid.population.numeric()["tokens"]),
                evaluator.columns["tokens"],
                vocab_size=len(study.vocabulary),
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
        declared = self.config.evaluation.declared_public and self.study.test.num_examples
        return self._evaluator("test") if declared else None

    def _evaluator(self, part: str) -> Evaluator:
        limit = self.config.evaluation.max_examples
        return Evaluator(self.study.model, self._declared(part), max_examples=limit)

    def _declared(self, part: str) -> DeclaredPublic:
        """The "validation" or "test" clients, as `evaluation.declared_public` declares them."""
        population = self.study.valid if part == "validation" else self.study.test
        held_out = f"{part} clients of {self.config.data.source}"
        return DeclaredPublic(population, self.config.evaluation.source or held_out)


def _without_privacy(config: Config) -> Config:
    fred = config.fred and dataclasses.replace(config.fred, epsilon=None, delta=None)
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
