"""Carries out a study: its method, the training of the downstream model, and its evaluation."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.frechet import distance
from jaxpfl.algorithms.gaussian_moments import moments
from jaxpfl.data.population import Population
from jaxpfl.data.selection import at_most
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.central.scoring import in_batches, score
from jaxpfl.experiments.config.sections import WRITTEN
from jaxpfl.experiments.engine.build import build_algorithm
from jaxpfl.experiments.engine.phases import LateReleaser, Phases, missing
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.report.chosen import of_division
from jaxpfl.experiments.report.leakage import write_leakage
from jaxpfl.experiments.systems import CORPUS
from jaxpfl.experiments.systems.synthetic_text.methods import METHODS, Texts, Tuning
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.experiments.systems.synthetic_text.questions import Question, question_of
from jaxpfl.experiments.systems.synthetic_text.study import Study
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.federated.clients.client import Static
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.federated.mesh import leads
from jaxpfl.models import count_parameters
from jaxpfl.models.base import Params
from jaxpfl.text.embed import embed
from jaxpfl.text.metrics.baselines import unigram_baseline
from jaxpfl.text.metrics.leakage import leakage
from jaxpfl.text.microbatches import dealt, placed

FINE_TUNING = "fine_tuning"
"""The folder of the checkpoints of the downstream model's training on the corpus."""

_FREE = "(epsilon = 0): clients send nothing"
# The most texts of the corpus, and of a round, that the record contains.
_RECORD_TEXTS = 12
# The most texts that a Frechet distance is estimated from, and that the plot of embeddings shows.
_FID_TEXTS, _PLANE_TEXTS = 2_000, 400


Trained = tuple[Params, float | None, Mapping[str, Any]]
"""The downstream model's parameters by a method, epsilon (None without privacy), and the record's
"privacy" with what else the method has to say."""


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    return TextStudy(study, workspace).public_record()


class TextStudy:
    """The study in its directory: each part is loaded from there, or made and stored."""

    def __init__(self, study: Study, workspace: Workspace) -> None:
        self.config, self.plan, self.workspace = study.config, study.plan, workspace
        self.sends, self.directory = study.sends, workspace.directory
        self.models = StudyModels(self.config, workspace.progress)
        self.uncut = (study.clients, study.held_out["valid"], study.held_out["test"])
        self.clients, self.valid, self.test = map(self.models.cut.population, self.uncut)

    def public_record(self) -> dict[str, Any]:
        models, method = self.models, self.config.method
        own = {"public": lambda: self._public, "central": lambda: self._central}
        train = {**own, "fed_avg": self._fed_avg}.get(method, self._by_texts)()
        # By all processes, which may share the generator.
        about: dict[str, Any] = dict(models.about)
        if any("tokeniser" not in model for model in about.values()):
            about["tokeniser"] = {"name": models.public.tokeniser.name}
        if self.config.writes:
            about["embedder"] = {"name": models.embedder.name}

        def recorded() -> dict[str, Any]:
            trained, epsilon, details = train()
            return files.jsonable(
                self._record(trained, epsilon) | {"public_models": about, **details}
            )

        return decide("the record", recorded)

    def _record(self, trained: Params, epsilon: float | None) -> dict[str, Any]:
        """Scores the trained model beside the public one and word frequencies."""
        config, models, start = self.config, self.models, self.models.downstream
        tokens, mesh = models.rows(self._first(self.test)), data_mesh(16)
        model = Static(start.model)
        batches = dealt(in_batches({"tokens": tokens}, 16), mesh)
        public, metrics = (
            score(model, placed(params, mesh), batches).result()
            for params in (start.params, trained)
        )
        held_out = config.evaluation.source or config.data.source
        private = not self.workspace.stamp or not self.sends
        table = [{"model": "the public model", "private": True, **public}]
        if texts := self._first(self.valid):
            size = models.tokeniser.vocab_size
            counts = unigram_baseline(models.rows(texts), tokens, vocab_size=size, words=False)
            table.append({"model": "unigram", "private": True, **dataclasses.asdict(counts)})
        gains = {f"public_{name}": public[name] for name in ("accuracy", "perplexity")}
        # The floats of a client in a round (POPri's Table 2), or with one look in all.
        down, up = 0, 0
        if config.method == "fed_avg":
            down = up = count_parameters(start.params)
        elif config.asks:
            down, up = question_of(models, self.plan).floats
        central = config.method == "central"
        return {
            "method": config.method,
            "one_look": config.one_look,
            "trained_on": f"training clients of {config.data.source}",
            "tested_on": f"test clients of {held_out} (declared public)",
            "validated_on": f"validation clients of {held_out} (declared public)",
            "private": private,
            "plan": self.plan.to_dict() if self.sends and not central else None,
            "language": True,
            "table": [*table, {"model": OURS, "private": private, **metrics}],
            "metrics": {**metrics, **gains, "epsilon": epsilon},
            "cost": None if central else {"down": down, "up": up},
        }

    def _public(self) -> Trained:
        return self.models.downstream.params, 0.0, {"privacy": _FREE}

    def _central(self) -> Trained:
        """The ceiling of POPri's Table 1 (section 5): the training that a corpus would get."""
        params = self._fitted(self.clients.columns["text"].to_pylist())
        privacy = f"{self.workspace.stamp}; trained on the clients' own texts"
        return params, None, {"privacy": privacy}

    def _fitted(self, texts: list[str]) -> Params:
        """The downstream model after its training on texts."""
        settings, folder = self.config.corpus.fine_tuning, self.directory / FINE_TUNING
        return self.models.fitted(self.models.downstream, texts, settings, folder)

    def _fed_avg(self) -> Callable[[], Trained]:
        rows = self.models.rows(self.clients.columns["text"].to_pylist())
        start = self.models.downstream
        every, progress = self.config.run.checkpoint_every, self.workspace.progress
        usual: Any = {"checkpoint_every": every, "progress": progress}
        result = self.workspace.train(
            build_algorithm(start.model, self.config.training, self.plan, start.params),
            self.clients.with_columns({"tokens": rows}),
            name="fed_avg",
            privacy=self.config.privacy,
            tracking=Tracking(evaluate_every=self.plan.rounds, **usual),
            start=f"{start.digest()} {self.models.tokeniser.name}",
        )
        epsilon = result.metrics["epsilon"] if self.plan.private else None
        return lambda: (result.params, epsilon, {"privacy": result.privacy})

    def _by_texts(self) -> Callable[[], Trained]:
        """The methods that write a corpus, on which the downstream model is then trained."""
        config, models = self.config, self.models
        history: list[dict[str, Any]] = []

        def on_round(number: int, texts: Texts, best: list[str], more: dict[str, Any]) -> None:
            if not leads():
                return
            entry = {"round": number, "texts": best[:_RECORD_TEXTS], **more}
            used = {name: these[:_FID_TEXTS] for name, these in texts.items()}
            # The same texts are in several lists, and are embedded once.
            rows = {text: row for row, text in enumerate(dict.fromkeys(chain(*used.values())))}
            vectors = np.asarray(models.embedder(list(rows)))
            for name, these in used.items():
                entry[name] = self._distance(vectors[[rows[text] for text in these]])
            # An empty text lies in the middle of all.
            if written := [rows[text] for text in used["fid"] if text]:
                entry["spread"] = median_to_medoid(vectors[written])
            history.append(entry)

        def all_written() -> Artifact:
            written = author.texts(config.corpus.texts)
            if not written:
                advice = "it needs more pretraining, or must be another model (section generator)"
                raise InputError(f"the generator wrote only empty texts: {advice}")
            return Artifact(arrays={"texts": np.array(written)})

        with ExitStack() as stack:
            run, question, phases = None, None, Phases(models.stored(self.directory))
            if config.asks:
                question = question_of(models, self.plan)
                run = self.workspace.open(
                    Algorithm(config.algorithm, missing, missing, question.queries),
                    self.clients,
                    name=config.method,
                    privacy=config.privacy,
                    start=models.start,
                    ask=partial(self.embedded, question),
                )
                stack.enter_context(run).begin()
                artifacts = self.workspace.artifacts(run.id, run.ledger)
                phases = Phases(artifacts, LateReleaser(run.releaser))
            tuning = Tuning(models, phases, self.directory, self._fid, on_round)
            author = METHODS[config.algorithm](tuning, question and question.of)
            name = "corpus" if author.choose is None else WRITTEN
            corpus = phases.stored(name, all_written)
            if author.choose is not None:
                choose = partial(author.choose, corpus.arrays["texts"].tolist())
                corpus = phases.stored("corpus", choose)
            privacy, epsilon = _FREE, 0.0
            if run is not None:
                end = partial(self._end, run, corpus.arrays["texts"].tolist(), author.first)
                privacy, epsilon = decide("the end of the run", end)
        details = {"privacy": privacy, "history": history, **author.choices}
        return partial(self._by_corpus, corpus, epsilon, details)

    def _by_corpus(
        self, corpus: Artifact, epsilon: float | None, details: dict[str, Any]
    ) -> Trained:
        """Writes the corpus and trains the downstream model on it."""
        config, models, texts = self.config, self.models, corpus.arrays["texts"].tolist()
        columns = {"text": texts}
        if corpus.record:
            columns["source"] = corpus.arrays["sources"].tolist()
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        files.write_atomically(self.directory / CORPUS, "".join(lines))
        params = self._fitted(texts)
        details |= {"final_corpus": corpus.record} if corpus.record else {}
        details |= {"corpus_fid": self._fid(texts), "plane": self._plane(texts)}
        forms = config.corpus.cut, config.data.source, config.corpora or {}
        details["cautions"] = of_division(*forms, lambda name: models.samples([name]))
        return params, epsilon, {**details, "corpus": len(texts), "texts": texts[:_RECORD_TEXTS]}

    def _end(self, run: Run, texts: list[str], untuned: Sequence[str]) -> tuple[str, float | None]:
        """Ends the run of the releases: its statement, and its epsilon if it is private.

        Writes what the corpus repeats of clients, beside what the untuned generator does.
        """
        untuned = [text for text in untuned if text]
        # The longest of more texts would be longer.
        if number := min(len(texts), len(untuned)):
            published = {OURS: texts[:number], "the untuned generator": untuned[:number]}
            cut, config, other = self.models.cut, self.config, self.config.evaluation.source
            source, stamp = config.data.source, self.workspace.stamp
            clients, _, test = map(cut.joined, self.uncut)
            sides = f"training clients of {source}", f"test clients of {other or source}"
            repeats: Any = (config.method, sides, leakage(published, clients, test), stamp)
            write_leakage(self.directory, *repeats, cut=cut, dealt=other is None)
        cost: Any = {"privacy": run.cost.statement(), "epsilons": run.cost.epsilons()}
        ended: Any = {"run": run.id, "rounds": run.algorithm.rounds, "out": run.path}
        result = Result(**ended, **cost, metrics={}, state=None, params=None)
        return run.end(result).privacy, run.cost.epsilon() if self.plan.private else None

    def embedded(self, question: Question) -> Population:
        """The clients with what a question reads; embeddings are kept for the next run."""
        config = self.config
        used = at_most(self.clients, config.training.max_examples, config.data.split_seed)
        few, embedders = self.clients.keeping(used), question.embedders
        if question.prepare is not None:
            return question.prepare(few, progress=self.workspace.progress)
        memory, key = self.workspace.memory, (few.content, *(e.name for e in embedders.values()))
        if memory.get("embedded", (None,))[0] != key:
            # Not two populations at a time.
            memory.pop("embedded", None)
            columns = {
                column: embed(few, embedder, progress=self.workspace.progress).columns["embedding"]
                for column, embedder in embedders.items()
            }
            memory["embedded"] = key, few.with_columns(columns)
        return memory["embedded"][1]

    def _first(self, part: Population) -> list[str]:
        """The texts of held-out clients that are used."""
        limit = self.config.evaluation.max_examples
        return part.columns["text"].slice(0, limit).to_pylist()

    def _fid(self, texts: list[str]) -> float:
        return self._distance(np.asarray(self.models.embedder(texts[:_FID_TEXTS])))

    def _distance(self, vectors: np.ndarray) -> float:
        """The Frechet distance of texts' embeddings to those of validation texts."""
        return distance(moments(vectors, math.inf), moments(self._validation, math.inf))

    @cached_property
    def _validation(self) -> np.ndarray:
        return np.asarray(self.models.embedder(self._first(self.valid)[:_FID_TEXTS]))

    def _plane(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """The embeddings of synthetic and validation texts on their two principal axes."""
        synthetic = np.asarray(self.models.embedder(texts[:_PLANE_TEXTS]))
        both = {"synthetic": synthetic, "validation": self._validation[:_PLANE_TEXTS]}
        rows = np.concatenate(list(both.values())).astype(np.float64)
        centre = rows.mean(axis=0)
        _, _, axes = np.linalg.svd(rows - centre, full_matrices=False)
        # The sign of an axis is arbitrary: its largest entry is made positive.
        axes = axes[:2] * np.sign(axes[:2][[0, 1], np.abs(axes[:2]).argmax(axis=1)])[:, None]
        return {name: np.round((part - centre) @ axes.T, 4).tolist() for name, part in both.items()}


def median_to_medoid(vectors_NxD: np.ndarray) -> float:
    """POPri's Figure 4, in all dimensions: from the row whose distances add up to the least."""
    squares_N = np.sum(vectors_NxD**2, axis=1)
    squares_NxN = squares_N[:, None] + squares_N - 2 * vectors_NxD @ vectors_NxD.T
    distances_NxN = np.sqrt(np.maximum(squares_NxN, 0.0))
    return float(np.median(distances_NxN[distances_NxN.sum(axis=1).argmin()]))
