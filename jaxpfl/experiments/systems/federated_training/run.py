"""Carries out a study: FreD's choice of a public corpus, prefinetuning on it, and the rounds.

    runs/FreD/                      the release of the moments of the clients' data
    artifacts/fred_scores/          the distances of the candidates from these moments
    artifacts/prefinetuned_NAME/    the parameters that were prefinetuned on the candidate NAME
    other_candidates/NAME/          a simulation, with a ledger of its own

Each is stored before the next one is made, and a resumed run reads it. All that is computed from
FreD's release, such as the choice of the winner, is post-processing and costs no privacy.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import Any, cast

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.fred import FredPlan, fred, moments, score
from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted, CorruptFile, Interrupted
from jaxpfl.experiments.central import text_pool
from jaxpfl.experiments.central.prefinetune import prefinetune
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.config.sections import PrefinetuneConfig, PrivacyConfig
from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
from jaxpfl.experiments.engine.rounds import initial_state
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.records.artifacts import Artifact, tree_arrays, tree_of
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import write_page
from jaxpfl.experiments.systems import RESULT, SIMULATION
from jaxpfl.experiments.systems.federated_training.candidates import ALONE, Candidates
from jaxpfl.experiments.systems.federated_training.config import CHOSEN, FredConfig
from jaxpfl.experiments.systems.federated_training.page import SCORES, Scores, page, ranking
from jaxpfl.experiments.systems.federated_training.study import FRED, VOCABULARY, Study
from jaxpfl.experiments.systems.workspace import Workspace, params_digest, restate
from jaxpfl.federated.hosts.processes import alone, decide
from jaxpfl.federated.mesh import leads
from jaxpfl.privacy.ledger import Ledger, guarantee_of
from jaxpfl.text.columns import texts_of
from jaxpfl.text.cut import Cut
from jaxpfl.text.generation.language_model import sentences_of
from jaxpfl.text.metrics.baselines import unigram_baseline

NOTE = (
    "SIMULATION: the run from candidate {!r}, from which the pipeline does not start, is not "
    "covered by the pipeline's privacy cost; do not publish it together with the pipeline's output"
)


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    return FederatedTraining(study, workspace).public_record()


class FederatedTraining:
    """The study in its directory: each part is read there, or made and stored.

    Attributes:
      fred: the record of FreD's release, with the scores of all candidates, nearest first, or None.
      prefinetuned: what prefinetuning made of a candidate, by its name, the winner first; of others
        only if the config asks for them.
      winner: the candidate that the rounds start from, or None.
    """

    def __init__(self, study: Study, workspace: Workspace) -> None:
        self.study, self.config, self.workspace = study, study.config, workspace
        if (words := study.vocabulary) is not None:
            decide("the vocabulary", lambda: words.save(workspace.directory / VOCABULARY))
        run, published = workspace.config_id, study.network.published_as
        if published is not None:
            run += f" from {published['sha256'][:12]}"
        self._artifacts = workspace.artifacts(run)
        scores = None if study.fred is None else self._fred(study.fred)
        self.fred = None if scores is None else dict(scores.record)
        names = [ALONE] if self.fred is None else [row["candidate"] for row in self.fred["scores"]]
        settings, self.prefinetuned = self.config.prefinetune, dict[str, Fitted]()
        if settings is not None:
            if settings.chosen and scores is not None:
                names.insert(0, CHOSEN)
                self._chosen_rows = scores.arrays["rows"]
            for name in names if settings.other_candidates else names[:1]:
                self.prefinetuned[name] = self._prefinetuned(name, settings)
        self.winner = next(iter(self.prefinetuned), None)

    def public_record(self) -> dict[str, Any]:
        directory, simulates = self.workspace.directory, len(self.prefinetuned) > 1
        try:
            result = self._train(self.winner)
        except (BudgetExhausted, Interrupted):
            if leads():
                # By itself: of several processes, the others may be elsewhere.
                with alone():
                    self._restate_fred()
                    write_page(directory, page(directory, {}))
            raise

        def recorded() -> dict[str, Any]:
            self._restate_fred()
            record = files.jsonable(self._record(result))
            if simulates:
                # What the run releases is complete before a simulation of it begins.
                write_page(directory, page(directory, self.workspace.write_result(record)))
            return record

        record = decide("the record", recorded)
        if simulates:
            self._simulate(result)
        return record

    @cached_property
    def _cut(self) -> Candidates:
        """The candidates as FreD compares them."""
        settings = cast(FredConfig, self.config.fred)
        return cast(Candidates, self.study.candidates).cut(Cut.parse(settings.cut))

    def _fred(self, plan: FredPlan) -> Artifact:
        """The scores of all candidates, the plan and statement of the release, and what it chose.

        The array "rows" has the chosen rows of all sources' samples, one after another.
        """
        study, workspace, artifacts = self.study, self.workspace, self._artifacts
        settings = cast(FredConfig, self.config.fred)
        prefinetuning = cast(PrefinetuneConfig, self.config.prefinetune)
        corpora, embeddings, cautions = {}, {}, []
        begun = workspace.directory / "runs" / FRED / "run.json"

        def read() -> None:
            if not (artifacts.folder / SCORES).exists():
                # Candidates are read before the charge, so that an unreadable one costs no privacy.
                embeddings.update(self._cut.embeddings(study.embedder))
                corpora.update(self._cut.moments(embeddings, settings.clip_norm))
                if prefinetuning.chosen:
                    number = sum(map(len, embeddings.values()))
                    text_pool.require_larger(number, prefinetuning.examples, "prefinetune.examples")
                forms = settings.cut, self.config.data.source, settings.sources
                cautions.extend(chosen.of_division(*forms, self._texts))
            elif not begun.exists():
                scored = f"its release is scored in {artifacts.folder / SCORES}"
                advice = "restore the folder; nothing was charged"
                raise CorruptFile(f"{begun}: is missing, but {scored}: {advice}")

        decide("the candidates", read)
        ledger, privacy = study.fred_ledger(workspace.directory), self.config.privacy
        if plan.unit == "example":
            # The budget of a ledger of its own is that of one release.
            privacy = PrivacyConfig(private=False)
            if plan.private:
                privacy = PrivacyConfig(epsilon=plan.epsilon() * (1 + 1e-9), delta=plan.delta)
        query = fred(plan, units=study.fred_units, dimension=study.embedder.dimension)
        run: Any = {"name": FRED, "privacy": privacy, "ledger": ledger}
        run["ask"] = lambda: study.embedded(workspace.progress)
        result = workspace.train(query, study.clients, **run)
        released = moments(plan, result.state)
        made_from = {"run": result.run, "moments_sha256": params_digest(released.arrays())}

        def scored() -> Artifact:
            choice, rows, statement = None, {}, plan.statement()
            if plan.private:
                # A release that was made again is charged again.
                own = [charge for charge in Ledger.read(ledger).charges if charge.run == result.run]
                statement = plan.claimed(guarantee_of(own, plan.delta, plan.unit).statement())
            if prefinetuning.chosen:
                number, progress = prefinetuning.examples, workspace.progress
                picked = text_pool.choose_from(released, embeddings, number, progress=progress)
                texts = None
                if study.embedder.column == "text":
                    texts = list(chain.from_iterable(map(self._texts, embeddings))).__getitem__
                choice, rows = chosen.record_of(picked, texts), {"rows": picked.rows_M}
            record = {
                **made_from,
                "cut": settings.cut,
                "choice": choice,
                "cautions": [*cautions, *(chosen.cautions(choice) if choice else ())],
                "private": plan.private and not self.config.run.reproducible_noise,
                "statement": statement,
                "plan": plan.to_dict(),
                "embedder": study.embedder.name,
                "noise": released.noise._asdict(),
                "scores": [candidate.row() for candidate in score(released, corpora)],
            }
            return Artifact(record, rows)

        return artifacts.load_or_compute(SCORES, scored, made_from)

    def _texts(self, source: str) -> Iterator[str]:
        """The texts of a source that FreD compares."""
        return texts_of(self._cut.sample(source, "text"))

    def _prefinetuned(self, name: str, settings: PrefinetuneConfig) -> Fitted:
        """The model prefinetuned on a candidate, from the start of the rounds."""
        study, seed = self.study, self.config.run.seed
        model, candidates = study.network.model, cast(Candidates, study.candidates)
        start = jax.device_get(initial_state(study.algorithm, seed).params)
        reads = tuple(model.columns or ()), study.encode

        def compute() -> Artifact:
            if name == CHOSEN and self.fred is not None:
                shares = self.fred["choice"]["shares"]
                corpus = self._cut.chosen(self._chosen_rows, settings.valid, *reads)
            else:
                shares, corpus = candidates.shares[name], candidates.corpus(name, settings, *reads)
            how: Any = {"seed": seed, "progress": self.workspace.progress}
            fitted = prefinetune(model, start, corpus, settings, **how)
            record = {
                "candidate": name,
                "shares": dict(shares),
                "sources": {source: candidates.sources[source] for source in shares},
                "params_sha256": params_digest(fitted.params),
                **fitted.record,
            }
            return Artifact(record, tree_arrays(fitted.params))

        stored = self._artifacts.load_or_compute(f"prefinetuned_{name}", compute, made_from=name)
        return Fitted(tree_of(stored.arrays, start, name), dict(stored.record))

    def _restate_fred(self) -> None:
        """The rounds are on the ledger of FreD's release, too."""
        if self.fred is not None:
            directory = self.workspace.directory
            restate(directory / "runs" / FRED, self.study.fred_ledger(directory))

    def _train(self, candidate: str | None) -> Result:
        """The run from a candidate, a simulation if FreD did not choose it; None: without one."""
        study, config, every = self.study, self.config, self.config.evaluation.every
        algorithm, prior, name, note = study.algorithm, (), "", ""
        # Identifies the prefinetuned and the published parameters, where there are any.
        starts = list((study.network.published_as or {}).values())
        if candidate is not None:
            start = self.prefinetuned[candidate]
            starts.insert(0, start.record["params_sha256"])
            algorithm = study.network.algorithm(config.training, study.plan, start.params)
        if candidate != self.winner:
            name, note = f"other_candidates/{candidate}", NOTE.format(candidate)
            algorithm = algorithm._replace(name=f"fed_avg from {candidate}")
        elif self.fred is not None:
            # FreD was charged to this ledger, and to no other.
            prior = (self.fred["run"],)
        sentences, words = None, study.vocabulary or study.network.published
        if every and words is not None and (number := config.evaluation.sentences):
            longest = cast(Any, config.model).sequence_length
            how: Any = {"seed": config.run.seed, "number": number, "max_tokens": longest}
            sentences = sentences_of(study.network.model, words, **how)
        return self.workspace.train(
            algorithm,
            study.train,
            name=name,
            privacy=config.privacy,
            tracking=Tracking(
                evaluate=self._evaluator("validation", study.valid) if every else None,
                evaluate_every=max(1, every),
                sentences=sentences,
                checkpoint_every=config.run.checkpoint_every,
                progress=self.workspace.progress,
                on_round=[] if config.keep_best is None else [config.keep_best],
            ),
            start=" ".join(starts) or None,
            prior=prior,
            note=note,
        )

    def _record(self, result: Result) -> dict[str, Any]:
        evaluator, study, directory = self._test_evaluator, self.study, self.workspace.directory
        record = files.read_record(directory / RESULT)
        fred = digest = None
        if self.fred is not None and study.fred is not None:
            release, scores = dict(self.fred), self.fred["scores"]
            del release["scores"]
            fred = {**release, **ranking(scores, {"before": self._before})}
            if study.fred.unit == "example":
                apart = f"FreD's release, on a ledger of its own: {fred['statement']}"
                record["privacy"] = f"{result.privacy}; {apart}"
            candidates = cast(FredConfig, self.config.fred).candidates
            rows = {row["candidate"]: row for row in scores}
            for name, entry in (("fred", "distance"), ("fred_corrected", "corrected")):
                record["metrics"][name] = {c: rows[c][entry] for c in candidates}
        if study.vocabulary is not None:
            digest = files.sha256_file(directory / VOCABULARY)
        return {
            **record,
            "tested_on": evaluator and evaluator.name,
            "table": [] if evaluator is None else self._table(result, evaluator),
            "fred": fred,
            "published_model": study.network.published_as,
            "language": study.network.language,
            "vocabulary_sha256": digest,
        }

    @cached_property
    def _before(self) -> dict[str, Scores]:
        """The scores of all prefinetuned models, which read public text only: no privacy cost."""
        score = self._test_evaluator
        if score is None:
            return {}
        return {name: score(fitted.params).result() for name, fitted in self.prefinetuned.items()}

    def _table(self, result: Result, evaluator: Evaluator) -> list[dict[str, Any]]:
        """Scores the models, and word frequencies, on the same declared-public test clients."""
        study, untrained = self.study, self.study.algorithm
        private, params_of = not self.workspace.stamp, cast(Any, untrained.params)
        params = params_of(initial_state(untrained, self.config.run.seed))
        name = "untrained" if study.network.published_as is None else "the published model"
        table = [{"model": name, "private": True, **evaluator(params).result()}]
        if study.vocabulary is not None and study.valid.num_examples:
            valid, size = self._evaluator("validation", study.valid), len(study.vocabulary)
            counted = np.asarray(valid.population.numeric()["tokens"])
            unigram = unigram_baseline(counted, evaluator.columns["tokens"], vocab_size=size)
            row = {"model": "unigram", "private": True, "frequencies": valid.name}
            table.append({**row, **dataclasses.asdict(unigram)})
        if self.winner is not None:
            # FreD learned from the clients which corpus it is; without FreD nothing was learned.
            chosen = private or self.fred is None
            name, scores = f"prefinetuned on {self.winner}", self._before[self.winner]
            table.append({"model": name, "private": chosen, **scores})
        table.append({"model": OURS, "private": private, **evaluator(result.params).result()})
        return table

    def _simulate(self, result: Result) -> None:
        """Carries out the simulations and writes `simulation.json`: this run again, and they."""
        evaluator, after = self._test_evaluator, dict[str, Scores]()
        table: list[dict[str, Any]] = []
        for name in self.prefinetuned:
            chosen = name == self.winner
            trained = result if chosen else self._train(name)
            if evaluator is not None and leads():
                after[name] = evaluator(trained.params).result()
            row = {
                "model": OURS if chosen else f"the same run from {name}",
                "folder": "" if chosen else f"other_candidates/{name}",
                "private": not self.workspace.stamp,
                "privacy": trained.privacy,
            }
            table.append({**row, **after.get(name, {})})

        def write() -> None:
            record: dict[str, Any] = {"tested_on": evaluator and evaluator.name, "table": table}
            if self.fred is not None:
                stages = {"before": self._before, "after": after}
                ranked = ranking(self.fred["scores"], stages)
                record["fred"] = {"choice": self.fred["choice"], **ranked}
            files.write_json(self.workspace.directory / SIMULATION, record)

        decide("the simulations", write)

    @cached_property
    def _test_evaluator(self) -> Evaluator | None:
        """Scores models on the declared-public test examples; None where there are none."""
        declared = self.config.evaluation.declared_public and self.study.test.num_examples
        return self._evaluator("test", self.study.test) if declared else None

    def _evaluator(self, part: str, population: Population) -> Evaluator:
        held_out = f"{part} clients of {self.config.data.source}"
        declared = DeclaredPublic(population, self.config.evaluation.source or held_out)
        limit = self.config.evaluation.max_examples
        return Evaluator(self.study.network.model, declared, max_examples=limit)
