"""Carries out a study: its method, the training of the downstream model, and its evaluation."""

import dataclasses
import json
import math
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.frechet import distance
from jaxpfl.algorithms.gaussian_moments import moments
from jaxpfl.algorithms.popri import Written
from jaxpfl.algorithms.private_evolution import Evolved
from jaxpfl.data.population import Population
from jaxpfl.data.selection import at_most
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.engine.build import build_algorithm
from jaxpfl.experiments.engine.cost import both_statements, with_larger
from jaxpfl.experiments.engine.phases import Phases, missing
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.report.page import write_page
from jaxpfl.experiments.systems.synthetic_text import shared_generator
from jaxpfl.experiments.systems.synthetic_text.config import EVOLVING, FED_AVG, SCORING, WRITING
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import (
    DISTANCES,
    TRIED,
    CorpusWriter,
    question,
)
from jaxpfl.experiments.systems.synthetic_text.look import EMBEDDING, NEAREST, Look
from jaxpfl.experiments.systems.synthetic_text.page import REPEATS, repeats_page
from jaxpfl.experiments.systems.synthetic_text.study import Prepared
from jaxpfl.experiments.systems.workspace import Workspace
from jaxpfl.federated.hosts.shared_rounds import Asked
from jaxpfl.models import count_parameters
from jaxpfl.models.base import Params
from jaxpfl.text.embed import embed
from jaxpfl.text.metrics.baselines import unigram_baseline
from jaxpfl.text.metrics.prediction import evaluate
from jaxpfl.text.metrics.repeats import longest_repeats
from jaxpfl.text.tokenisers.spans import in_spans

FINE_TUNING = "fine_tuning"
"""The folder of the checkpoints of the downstream model's training on the corpus."""

_FREE = "(epsilon = 0): clients send nothing"
# The most texts of the corpus, and of a round, that the record contains.
_RECORD_TEXTS = 12
# The most texts that a Frechet distance is estimated from, and that the plot of embeddings shows.
_FID_TEXTS, _PLANE_TEXTS = 2_000, 400
# The most clients' texts that are searched for what the corpus repeats.
_SEARCHED_TEXTS = 50_000


def carry_out(study: Prepared, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    return TextStudy(study, workspace).public_record()


def asked(study: Prepared, workspace: Workspace, stage: str, known: Any) -> Asked:
    """The queries of the method, and the clients as they are asked."""
    texts = TextStudy(study, workspace)
    if stage == FED_AVG:
        algorithm, clients = texts.training()
        return algorithm.queries, clients
    scored = question(study.config, study.plan)
    return scored.queries, texts.embedded(scored)


def take_part(workspace: Workspace, task: str, known: Any, about: Any) -> None:
    """Another process's part in what process 0 writes and tunes."""
    config, memory = workspace.config, workspace.memory
    if shared_generator.LOAD not in memory:
        memory[shared_generator.LOAD] = CorpusWriter(config).generator
    shared_generator.take_part(memory[shared_generator.LOAD], config.popri.lora, task, known, about)


class TextStudy:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: Prepared, workspace: Workspace) -> None:
        self.config, self.plan, self.workspace = study.config, study.plan, workspace
        self.sends, self.directory = study.sends, workspace.directory
        self.writer = CorpusWriter(self.config, workspace.progress, workspace.others)
        held = (study.clients, study.valid, study.test)
        if self.config.corpus.spans:
            # Each example is a span of a client's texts.
            tokeniser, tokens = self.writer.tokeniser, self.config.corpus.tokens
            held = tuple(in_spans(part, tokeniser, tokens) for part in held)
        self.clients, self.valid, self.test = held

    def public_record(self) -> dict[str, Any]:
        params, epsilon, details = self._method()
        if self.sends and not self.plan.private:
            details["privacy"], epsilon = self.plan.statement(), None
        tokens, start = self.writer.rows(self._held_out(self.test)), self.writer.downstream
        public, metrics = (
            evaluate(start.model, scored, tokens, mesh=data_mesh(16))
            for scored in (start.params, params)
        )
        held_out = self.config.evaluation.source or self.config.data.source
        private = not self.workspace.stamp or not self.sends
        return {
            "method": self.config.method,
            "one_look": self.config.one_look,
            "trained_on": f"training clients of {self.config.data.source}",
            "tested_on": f"test clients of {held_out} (declared public)",
            "validated_on": f"validation clients of {held_out} (declared public)",
            "private": private,
            "plan": self.plan.to_dict() if self.sends else None,
            "language": True,
            "table": [
                {"model": "the public model", "private": True, **public},
                *self._unigram(tokens),
                {"model": OURS, "private": private, **metrics},
            ],
            "metrics": {
                **metrics,
                "public_accuracy": public["accuracy"],
                "public_perplexity": public["perplexity"],
                "epsilon": epsilon,
            },
            "cost": self._cost(),
            "public_models": self._public_models(),
            **details,
        }

    def _unigram(self, tokens: np.ndarray) -> list[dict[str, Any]]:
        texts, size = self._held_out(self.valid), self.writer.tokeniser.vocab_size
        if not texts:
            return []
        found = unigram_baseline(self.writer.rows(texts), tokens, vocab_size=size, words=False)
        return [{"model": "unigram", "private": True, **dataclasses.asdict(found)}]

    def _public_models(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.writer.about)
        if any("tokeniser" not in about for about in found.values()):
            found["tokeniser"] = {"name": self.writer.public.tokeniser.name}
        if self.config.method in WRITING:
            found["embedder"] = {"name": self.writer.function.name}
        return found

    def _method(self) -> tuple[Params, float | None, dict[str, Any]]:
        method, writer = self.config.method, self.writer
        if method == FED_AVG:
            result = self._fed_avg()
            return result.params, result.metrics["epsilon"], {"privacy": result.privacy}
        if method == "public":
            return writer.downstream.params, 0.0, {"privacy": _FREE}
        texts, epsilon, details = self._texts()
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        files.write_atomically(self.directory / "corpus.jsonl", "".join(lines))
        folder = self.directory / FINE_TUNING
        params = writer.fitted(writer.downstream, texts, self.config.corpus.fine_tuning, folder)
        return params, epsilon, {**details, "corpus": len(texts), "texts": texts[:_RECORD_TEXTS]}

    def training(self) -> tuple[Algorithm, Population]:
        """The training of the downstream model, and its clients."""
        rows, start = (
            self.writer.rows(self.clients.columns["text"].to_pylist()),
            self.writer.downstream,
        )
        algorithm = build_algorithm(start.model, self.config.training, self.plan, start.params)
        return algorithm, self.clients.with_columns({"tokens": rows})

    def _fed_avg(self) -> Result:
        algorithm, clients = self.training()
        start, plan = self.writer.downstream, self.plan
        return self.workspace.train(
            algorithm,
            clients,
            name=FED_AVG,
            privacy=self.config.privacy,
            tracking=Tracking(
                evaluate_every=plan.rounds,
                checkpoint_every=self.config.run.checkpoint_every,
                progress=self.workspace.progress,
            ),
            start=f"{start.digest()} {self.writer.tokeniser.name}",
        )

    def _texts(self) -> tuple[list[str], float | None, dict[str, Any]]:
        config, models = self.config, self.writer
        history: list[dict[str, Any]] = []
        asked = question(config, self.plan) if config.method in SCORING else None

        def on_round(found: Written | Evolved) -> None:
            history.append(self._round(found))

        def corpus() -> dict[str, np.ndarray]:
            found = models.texts(author, config.corpus.texts)
            if not found:
                raise InputError(
                    "the generator wrote only empty texts, expected a corpus: it needs more "
                    "pretraining, or must be another model (section generator)"
                )
            return {"texts": np.array(found)}

        with ExitStack() as stack:
            run = None if asked is None else stack.enter_context(self._run(asked))
            phases = self._phases(run)
            author = models.tuned(self.directory, phases, asked, self._fid, on_round)
            chosen = self._chosen(phases) if config.method == "popri" else {}
            texts = phases.load_or_compute("corpus", corpus)["texts"].tolist()
            if asked is not None:
                self._compare_repeats(texts, phases)
            privacy, epsilon = (_FREE, 0.0) if run is None else self._end(run)
        details = {"corpus_fid": self._fid(texts), "plane": self._plane(texts)}
        return texts, epsilon, {"privacy": privacy, "history": history, **chosen, **details}

    def _compare_repeats(self, texts: list[str], phases: Phases) -> None:
        """Writes how many words in a row a text has in common with a client's, ours and untuned."""
        first = "first texts" if self.config.method in EVOLVING else "round 1 responses"
        untuned = phases.load_or_compute(first, missing)["texts"].reshape(-1).tolist()
        untuned = [text for text in untuned if text]
        # The longest of more texts would be longer.
        number = min(len(texts), len(untuned))
        held = self.clients.columns["text"].slice(0, _SEARCHED_TEXTS).to_pylist()
        found = {
            model: longest_repeats(written[:number], held).tolist()
            for model, written in ((OURS, texts), ("the untuned generator", untuned))
        }
        record, source = {"clients_texts": len(held), "words": found}, self.config.data.source
        files.write_json(self.directory / REPEATS, record)
        about = self.config.method, f"training clients of {source}", self.workspace.stamp
        write_page(self.directory, repeats_page(record, *about))

    def _end(self, run: Run) -> tuple[str, float | None]:
        """Ends the run of the releases: its statement, and its epsilon if it is private."""
        statement, plan = run.cost.statement(), self.plan
        if plan.private:
            both = both_statements(run.ledger, [run.id], plan.delta, plan.accountant)
            statement = with_larger([plan], both)
        result = run.end(
            Result(
                run=run.id,
                privacy=statement,
                metrics={},
                rounds=run.algorithm.rounds,
                out=run.path,
                state=None,
                params=None,
                epsilons=run.cost.epsilons(),
            )
        )
        return result.privacy, run.cost.epsilon() if plan.private else None

    def _chosen(self, phases: Phases) -> dict[str, Any]:
        popri, found = self.config.popri, dict[str, Any]()
        if popri.corpus == "nearest":
            scores = phases.load_or_compute(NEAREST, missing)
            found["corpora"] = {name: values.tolist() for name, values in scores.items()}
        if popri.tune is not None:
            judged, choices = phases.load_or_compute(TRIED, missing), popri.tune.choices(popri)
            names = [name for name, tried in vars(popri.tune).items() if tried]
            tried = [{name: getattr(each, name) for name in names} for each in choices]
            of_each = {name: array.tolist() for name, array in judged.items()}
            found["tried"] = {"choices": tried, **of_each}
        if popri.checkpoint == "last":
            return {**found, "checkpoint": {"round": self.config.training.rounds}}
        measured = phases.load_or_compute(DISTANCES, missing)
        by = {"round": int(measured["chosen"]), "distances": measured["distances"].tolist()}
        return {**found, "checkpoint": {"chosen": popri.checkpoint, **by}}

    def _run(self, asked: Scorer | Look) -> Run:
        """The run of the rounds that ask the clients."""
        config, method = self.config, self.config.method
        name = "one look" if config.one_look else method
        return self.workspace.open(
            Algorithm(name, missing, missing, asked.queries),
            self.clients,
            name=method,
            privacy=config.privacy,
            start=self.writer.start,
            ask=lambda: self.embedded(asked),
        )

    def _phases(self, run: Run | None) -> Phases:
        """The store of the rounds' artifacts; with a run it asks the clients."""
        if run is None:
            return Phases(self.writer.stored(self.directory))
        run.begin()
        releaser = run.releaser(others=partial(self.workspace.shared, self.config.method))
        return Phases(self.workspace.artifacts(run.id, run.ledger), releaser)

    def embedded(self, asked: Scorer | Look) -> Population:
        """The clients with the embeddings that a question reads; kept for the next run."""
        config = self.config
        kept = at_most(self.clients, config.training.max_examples, config.data.split_seed)
        few, functions = self.clients.keeping(kept), {EMBEDDING: self.writer.function}
        if isinstance(asked, Look):
            functions = asked.embedders
        names = [function.name for function in functions.values()]
        memory, key = self.workspace.memory, ("embedded", few.content, *names)
        if key not in memory:
            for old in [each for each in memory if each[0] == key[0]]:
                del memory[old]
            columns = {
                name: embed(few, function, progress=self.workspace.progress).columns["embedding"]
                for name, function in functions.items()
            }
            memory[key] = few.with_columns(columns)
        return memory[key]

    def _held_out(self, part: Population) -> list[str]:
        limit = self.config.evaluation.max_examples
        return part.columns["text"].slice(0, limit).to_pylist()

    def _round(self, found: Written | Evolved) -> dict[str, Any]:
        if isinstance(found, Evolved):
            texts, more = found.selected, {}
            best = texts[:_RECORD_TEXTS]
        else:
            texts = [text for row in found.responses for text in row]
            order = np.argsort(-found.scores_KxJ.reshape(-1), kind="stable")[:_RECORD_TEXTS]
            best = [texts[i] for i in order]
            more = {"candidates": found.candidates, "pairs": found.pairs, **found.means}
        return {"round": found.round, "fid": self._fid(texts), "texts": best, **more}

    def _fid(self, texts: list[str]) -> float:
        vectors = np.asarray(self.writer.function(texts[:_FID_TEXTS]))
        return distance(moments(vectors, math.inf), moments(self._validation, math.inf))

    @cached_property
    def _validation(self) -> np.ndarray:
        return np.asarray(self.writer.function(self._held_out(self.valid)[:_FID_TEXTS]))

    def _plane(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """The embeddings of synthetic and validation texts on their two principal axes."""
        synthetic = np.asarray(self.writer.function(texts[:_PLANE_TEXTS]))
        both = {"synthetic": synthetic, "validation": self._validation[:_PLANE_TEXTS]}
        rows = np.concatenate(list(both.values())).astype(np.float64)
        centre = rows.mean(axis=0)
        _, _, axes = np.linalg.svd(rows - centre, full_matrices=False)
        # The sign of an axis is arbitrary: its largest entry is made positive.
        axes = axes[:2] * np.sign(axes[:2][[0, 1], np.abs(axes[:2]).argmax(axis=1)])[:, None]
        return {name: np.round((part - centre) @ axes.T, 4).tolist() for name, part in both.items()}

    def _cost(self) -> dict[str, Any]:
        """The floats of a client in a round (POPri's Table 2), or with one look in all."""
        down, up = 0, 0
        if self.config.method == FED_AVG:
            down = up = count_parameters(self.writer.downstream.params)
        elif self.config.method in SCORING:
            asked, dimension = question(self.config, self.plan), self.writer.function.dimension
            if isinstance(asked, Look):
                down, up = asked.floats_per_client()
            else:
                down, up = asked.floats_per_client(*self.config.candidates, dimension)
        return {"down": down, "up": up}
