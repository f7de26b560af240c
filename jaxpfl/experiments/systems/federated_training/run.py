"""Carries out a study: its stages, its rounds, the table of its models, and its simulations.

`report.html` shows only what the run itself releases. Simulations are the same run from the
candidates that FreD did not choose, which the privacy statement does not cover: each has the folder
`other_candidates/NAME/` and a ledger of its own, and `simulation.html` shows them.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.errors import BudgetExhausted
from jaxpfl.experiments.config.published import PublishedDecoderConfig
from jaxpfl.experiments.config.sections import LanguageModelConfig
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.engine.signals import Interrupted
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.report.page import write_page
from jaxpfl.experiments.systems import RESULT, SIMULATION
from jaxpfl.experiments.systems.federated_training.page import Scores, page, ranking
from jaxpfl.experiments.systems.federated_training.stages import FRED, Stages, asked_by_fred
from jaxpfl.experiments.systems.federated_training.study import Prepared
from jaxpfl.experiments.systems.workspace import Workspace, restate
from jaxpfl.federated.hosts.shared_rounds import Asked
from jaxpfl.text.generation.language_model import sentences_of
from jaxpfl.text.metrics.baselines import unigram_baseline

VOCABULARY = "vocabulary.json"
"""The words of a language model, in the run's directory."""

NOTE = (
    "SIMULATION: the run from candidate {!r}, which FreD did not choose, is not covered by the "
    "privacy cost of the pipeline; do not publish it together with the pipeline's output"
)


def carry_out(study: Prepared, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    return _Run(study, workspace).public_record()


def asked(study: Prepared, workspace: Workspace, stage: str, known: Any) -> Asked:
    """The queries of FreD or of the rounds, whatever they start from, and the clients."""
    if stage == FRED:
        return asked_by_fred(study, workspace)
    return study.algorithm.queries, study.train


class _Run:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: Prepared, workspace: Workspace) -> None:
        self.study, self.config, self.workspace = study, study.config, workspace
        self.directory = workspace.directory
        if study.vocabulary is not None:
            study.vocabulary.save(self.directory / VOCABULARY)
        prefinetuned = self.config.prefinetune is not None
        self.stages = Stages.of(study, workspace) if prefinetuned else None

    def public_record(self) -> dict[str, Any]:
        stages = self.stages
        try:
            result = self._train(None if stages is None else stages.winner)
        except (BudgetExhausted, Interrupted):
            self._restate_fred()
            write_page(self.directory, page(self.directory, {}))
            raise
        self._restate_fred()
        record = self._record(result)
        if stages is not None and len(stages.prefinetuned) > 1:
            # What the run releases is complete before a simulation of it begins.
            written = self.workspace.write_result(record)
            write_page(self.directory, page(self.directory, written))
            self._simulate(stages, result)
        return record

    def _restate_fred(self) -> None:
        """The rounds are on the ledger of FreD's release, too."""
        if self.study.fred is not None:
            ledger = self.study.fred_ledger(self.directory)
            restate(self.directory / "runs" / FRED, ledger)

    def _train(self, candidate: str | None) -> Result:
        """The run from a candidate, a simulation if FreD did not choose it; None: without one."""
        study, stages, every = self.study, self.stages, self.config.evaluation.every
        algorithm, prior, name, note = study.algorithm, (), "", ""
        # Identifies the prefinetuned and the published parameters, where there are any.
        starts = list((study.published_as or {}).values())
        if stages is not None and candidate is not None:
            start = stages.prefinetuned[candidate]
            starts.insert(0, start.record["params_sha256"])
            algorithm = study.starting_from(start.params)
            if candidate != stages.winner:
                name, note = f"other_candidates/{candidate}", NOTE.format(candidate)
                algorithm = algorithm._replace(name=f"fed_avg from {candidate}")
            elif stages.fred is not None:
                # FreD was charged to this ledger, and to no other.
                prior = (stages.fred["run"],)
        return self.workspace.train(
            algorithm,
            study.train,
            name=name,
            privacy=self.config.privacy,
            tracking=Tracking(
                evaluate=self._evaluator("validation") if every else None,
                evaluate_every=max(1, every),
                sentences=self._sentences() if every else None,
                checkpoint_every=self.config.run.checkpoint_every,
                progress=self.workspace.progress,
                on_round=[each for each in (self.config.keep_best,) if each is not None],
            ),
            start=" ".join(starts) or None,
            prior=prior,
            note=note,
        )

    def _sentences(self) -> Callable[[Any, int], list[str]] | None:
        study, settings, number = self.study, self.config.model, self.config.evaluation.sentences
        if not number or not isinstance(settings, LanguageModelConfig | PublishedDecoderConfig):
            return None
        words = study.vocabulary or study.published
        assert words is not None
        seed, longest = self.config.run.seed, settings.sequence_length
        return sentences_of(study.model, words, seed=seed, number=number, max_tokens=longest)

    def _record(self, result: Result) -> dict[str, Any]:
        evaluator, stages, study = self._test_evaluator, self.stages, self.study
        record = files.read_record(self.directory / RESULT)
        fred = digest = None
        if stages is not None and stages.scores is not None:
            fred = {**(stages.fred or {}), **ranking(stages.scores, {"before": self._before})}
            if study.fred is not None and study.fred.unit == "example":
                apart = f"FreD's release, on a ledger of its own: {fred['statement']}"
                record["privacy"] = f"{result.privacy}; {apart}"
            assert self.config.fred is not None
            rows = {row["candidate"]: row for row in stages.scores}
            for name, entry in (("fred", "distance"), ("fred_corrected", "corrected")):
                record["metrics"][name] = {c: rows[c][entry] for c in self.config.fred.candidates}
        if study.vocabulary is not None:
            digest = files.sha256_file(self.directory / VOCABULARY)
        return {
            **record,
            "tested_on": None if evaluator is None else evaluator.name,
            "table": [] if evaluator is None else self._table(result, evaluator),
            "fred": fred,
            "published_model": study.published_as,
            "language": study.model.columns == ("tokens",),
            "vocabulary_sha256": digest,
        }

    @cached_property
    def _before(self) -> dict[str, Scores]:
        """The scores of all prefinetuned models, which read public text only: no privacy cost."""
        evaluator, stages = self._test_evaluator, self.stages
        if evaluator is None or stages is None:
            return {}
        return {name: evaluator(each.params).result() for name, each in stages.prefinetuned.items()}

    def _table(self, result: Result, evaluator: Evaluator) -> list[dict[str, Any]]:
        """Scores the models, and word frequencies, on the same declared-public test clients."""
        study, stages, untrained = self.study, self.stages, self.study.algorithm
        private = not self.workspace.stamp
        assert untrained.params is not None
        params = untrained.params(initial_state(untrained, self.config.run.seed))
        name = "untrained" if study.published_as is None else "the published model"
        table = [{"model": name, "private": True, **evaluator(params).result()}]
        if study.vocabulary is not None and study.valid.num_examples:
            valid = self._evaluator("validation")
            unigram = unigram_baseline(
                np.asarray(valid.population.numeric()["tokens"]),
                evaluator.columns["tokens"],
                vocab_size=len(study.vocabulary),
            )
            row = {"model": "unigram", "private": True, "frequencies": valid.name}
            table.append({**row, **dataclasses.asdict(unigram)})
        if stages is not None:
            # FreD learned from the clients which corpus it is; without FreD nothing was learned.
            chosen = private or stages.scores is None
            name, scores = f"prefinetuned on {stages.winner}", self._before[stages.winner]
            table.append({"model": name, "private": chosen, **scores})
        table.append({"model": OURS, "private": private, **evaluator(result.params).result()})
        return table

    def _simulate(self, stages: Stages, result: Result) -> None:
        """Carries out the simulations and writes `simulation.json`: this run again, and they."""
        evaluator, after = self._test_evaluator, dict[str, Scores]()
        table: list[dict[str, Any]] = []
        for name in stages.prefinetuned:
            chosen = name == stages.winner
            each = result if chosen else self._train(name)
            if evaluator is not None:
                after[name] = evaluator(each.params).result()
            row = {
                "model": OURS if chosen else f"the same run from {name}",
                "folder": "" if chosen else f"other_candidates/{name}",
                "private": not self.workspace.stamp,
                "privacy": each.privacy,
            }
            table.append({**row, **after.get(name, {})})
        record: dict[str, Any] = {
            "tested_on": None if evaluator is None else evaluator.name,
            "table": table,
        }
        if stages.scores is not None:
            record["fred"] = ranking(stages.scores, {"before": self._before, "after": after})
        files.write_json(self.directory / SIMULATION, record)

    @cached_property
    def _test_evaluator(self) -> Evaluator | None:
        """Scores models on the declared-public test examples; None where there are none."""
        declared = self.config.evaluation.declared_public and self.study.test.num_examples
        return self._evaluator("test") if declared else None

    def _evaluator(self, part: str) -> Evaluator:
        population = self.study.valid if part == "validation" else self.study.test
        held_out = f"{part} clients of {self.config.data.source}"
        declared = DeclaredPublic(population, self.config.evaluation.source or held_out)
        limit = self.config.evaluation.max_examples
        return Evaluator(self.study.model, declared, max_examples=limit)
