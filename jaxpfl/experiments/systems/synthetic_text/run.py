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
from jaxpfl.experiments.systems.synthetic_text.config import ASKING, CENTRAL, FED_AVG, WRITING
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
    """Does what is left to do, and returns the public record."""
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
        own = {"public": lambda: self._public, CENTRAL: lambda: self._central}
        train = {**own, FED_AVG: self._fed_avg}.get(self.config.method, self._by_texts)()
        # By all processes, which may share the generator.
        models = self._public_models()
        return decide("the record", lambda: files.jsonable(self._record(models, *train())))

    def _record(
        self,
        models: Mapping[str, Any],
        trained: Params,
        epsilon: float | None,
        details: Mapping[str, Any],
    ) -> dict[str, Any]:
        tokens, start = self.models.rows(self._first(self.test)), self.models.downstream
        model, mesh = Static(start.model), data_mesh(16)
        batches = dealt(in_batches({"tokens": tokens}, 16), mesh)
        public, metrics = (
            score(model, placed(params, mesh), batches).result()
            for params in (start.params, trained)
        )
        held_out = self.config.evaluation.source or self.config.data.source
        private = not self.workspace.stamp or not self.sends
        table = [{"model": "the public model", "private": True, **public}, *self._unigram(tokens)]
        gains = {f"public_{name}": public[name] for name in ("accuracy", "perplexity")}
        return {
            "method": self.config.method,
            "one_look": self.config.one_look,
            "trained_on": f"training clients of {self.config.data.source}",
            "tested_on": f"test clients of {held_out} (declared public)",
            "validated_on": f"validation clients of {held_out} (declared public)",
            "private": private,
            "plan": self.plan.to_dict() if self.sends and self.config.method != CENTRAL else None,
            "language": True,
            "table": [*table, {"model": OURS, "private": private, **metrics}],
            "metrics": {**metrics, **gains, "epsilon": epsilon},
            "cost": self._cost(),
            "public_models": models,
            **details,
        }

    def _public(self) -> Trained:
        return self.models.downstream.params, 0.0, {"privacy": _FREE}

    def _central(self) -> Trained:
        """The ceiling of POPri's Table 1 (section 5): the training that a corpus would get."""
        texts = self.clients.columns["text"].to_pylist()
        settings, folder = self.config.corpus.fine_tuning, self.directory / FINE_TUNING
        params = self.models.fitted(self.models.downstream, texts, settings, folder)
        privacy = f"{self.workspace.stamp}; trained on the clients' own texts"
        return params, None, {"privacy": privacy}

    def _fed_avg(self) -> Callable[[], Trained]:
        rows = self.models.rows(self.clients.columns["text"].to_pylist())
        start = self.models.downstream
        result = self.workspace.train(
            build_algorithm(start.model, self.config.training, self.plan, start.params),
            self.clients.with_columns({"tokens": rows}),
            name=FED_AVG,
            privacy=self.config.privacy,
            tracking=Tracking(
                evaluate_every=self.plan.rounds,
                checkpoint_every=self.config.run.checkpoint_every,
                progress=self.workspace.progress,
            ),
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
            if config.method in ASKING:
                question = question_of(models, self.plan)
                run = stack.enter_context(self._run(question))
                run.begin()
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
        folder = self.directory / FINE_TUNING
        params = models.fitted(models.downstream, texts, config.corpus.fine_tuning, folder)
        details |= {"final_corpus": corpus.record} if corpus.record else {}
        details |= {"corpus_fid": self._fid(texts), "plane": self._plane(texts)}
        forms = config.corpus.cut, config.data.source, config.corpora or {}
        details["cautions"] = of_division(*forms, lambda name: models.samples([name]))
        return params, epsilon, {**details, "corpus": len(texts), "texts": texts[:_RECORD_TEXTS]}

    def _run(self, question: Question) -> Run:
        """The run of the rounds that ask the clients."""
        return self.workspace.open(
            Algorithm(self.config.algorithm, missing, missing, question.queries),
            self.clients,
            name=self.config.method,
            privacy=self.config.privacy,
            start=self.models.start,
            ask=lambda: self.embedded(question),
        )

    def _end(self, run: Run, texts: list[str], untuned: Sequence[str]) -> tuple[str, float | None]:
        """Ends the run of the releases: its statement, and its epsilon if it is private."""
        self._audit(texts, untuned)
        result = Result(
            run=run.id,
            privacy=run.cost.statement(),
            metrics={},
            rounds=run.algorithm.rounds,
            out=run.path,
            state=None,
            params=None,
            epsilons=run.cost.epsilons(),
        )
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

    def _audit(self, texts: list[str], untuned: Sequence[str]) -> None:
        """Writes what the corpus repeats of clients, beside what the untuned generator does."""
        untuned = [text for text in untuned if text]
        # The longest of more texts would be longer.
        number = min(len(texts), len(untuned))
        if not number:
            return
        published = {OURS: texts[:number], "the untuned generator": untuned[:number]}
        cut, source, other = self.models.cut, self.config.data.source, self.config.evaluation.source
        clients, _, test = map(cut.joined, self.uncut)
        sides = f"training clients of {source}", f"test clients of {other or source}"
        result, stamp = leakage(published, clients, test), self.workspace.stamp
        method, dealt = self.config.method, other is None
        write_leakage(self.directory, method, sides, result, stamp, cut=cut, dealt=dealt)

    def _unigram(self, tokens: np.ndarray) -> list[dict[str, Any]]:
        texts, size = self._first(self.valid), self.models.tokeniser.vocab_size
        if not texts:
            return []
        scores = unigram_baseline(self.models.rows(texts), tokens, vocab_size=size, words=False)
        return [{"model": "unigram", "private": True, **dataclasses.asdict(scores)}]

    def _public_models(self) -> dict[str, Any]:
        models: dict[str, Any] = dict(self.models.about)
        if any("tokeniser" not in about for about in models.values()):
            models["tokeniser"] = {"name": self.models.public.tokeniser.name}
        if self.config.method in WRITING:
            models["embedder"] = {"name": self.models.embedder.name}
        return models

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

    def _cost(self) -> dict[str, Any] | None:
        """The floats of a client in a round (POPri's Table 2), or with one look in all."""
        if self.config.method == CENTRAL:
            return None
        down, up = 0, 0
        if self.config.method == FED_AVG:
            down = up = count_parameters(self.models.downstream.params)
        elif self.config.method in ASKING:
            down, up = question_of(self.models, self.plan).floats
        return {"down": down, "up": up}


def median_to_medoid(vectors_NxD: np.ndarray) -> float:
    """POPri's Figure 4, in all dimensions: from the row whose distances add up to the least."""
    squares_N = np.sum(vectors_NxD**2, axis=1)
    squares_NxN = squares_N[:, None] + squares_N - 2 * vectors_NxD @ vectors_NxD.T
    distances_NxN = np.sqrt(np.maximum(squares_NxN, 0.0))
    return float(np.median(distances_NxN[distances_NxN.sum(axis=1).argmin()]))
