"""Carries out a study: its method, the training of the downstream model, and its evaluation."""

import dataclasses
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import require_affordable
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.frechet import distance
from jaxpfl.algorithms.gaussian_moments import Moments, moments
from jaxpfl.algorithms.popri import Written
from jaxpfl.algorithms.private_evolution import Evolved
from jaxpfl.data.population import Population
from jaxpfl.data.selection import at_most
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.engine.build import build_fed_avg
from jaxpfl.experiments.engine.cost import both_statements, stamped, with_larger
from jaxpfl.experiments.engine.releases import Releases, missing
from jaxpfl.experiments.engine.setting import Tracking
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.systems.synthetic_text.config import (
    FED_AVG,
    SCORING,
    WRITING,
)
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import (
    DISTANCES,
    CorpusWriter,
    json_lines,
    loaded_embedder,
    question,
)
from jaxpfl.experiments.systems.synthetic_text.look import Look
from jaxpfl.experiments.systems.synthetic_text.study import Prepared, described_config
from jaxpfl.experiments.systems.workspace import Workspace, budget_of, ledger_path
from jaxpfl.models import count_parameters
from jaxpfl.models.base import Params
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.embed import embed
from jaxpfl.text.metrics.baselines import unigram_baseline
from jaxpfl.text.metrics.prediction import evaluate
from jaxpfl.text.tokenisers.spans import in_spans

FINE_TUNING = "fine_tuning"
"""The folder of the checkpoints of the downstream model's training on the corpus."""

# The most texts of the corpus, and of a round, that the record contains.
_RECORD_TEXTS = 12
# The most texts that a Frechet distance is estimated from, and that the plot of embeddings shows.
_FID_TEXTS, _PLANE_TEXTS = 2_000, 400


def carry_out(study: Prepared, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    return Run(study, workspace).public_record()


class Run:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: Prepared, workspace: Workspace) -> None:
        self.config, self.plan, self.workspace = study.config, study.plan, workspace
        self.sends, self.directory = study.sends, workspace.directory
        self.writer = CorpusWriter(self.config, workspace.progress)
        held = (study.clients, study.valid, study.test)
        if self.config.corpus.spans:
            # Each example is a span of a client's texts.
            tokeniser, tokens = self.writer.tokeniser, self.config.corpus.tokens
            held = tuple(in_spans(part, tokeniser, tokens) for part in held)
        self.clients, self.valid, self.test = held

    def public_record(self) -> dict[str, Any]:
        stamp = self.workspace.stamp
        began = time.monotonic()
        # As of when the attempt began, which is public; when it ended is not.
        date = datetime.now(UTC).date().isoformat()
        seconds: dict[str, float] = {}
        params, details = self._method(seconds)
        tokens = self.writer.rows(self._held_out(self.test))
        start = self.writer.downstream
        metrics = evaluate(start.model, params, tokens, mesh=data_mesh(16))
        public = evaluate(start.model, start.params, tokens, mesh=data_mesh(16))
        seconds["all"] = time.monotonic() - began
        # Private: times depend on how much the clients hold.
        folder = files.private_directory(self.directory / "private")
        files.write_json(folder / "seconds.json", seconds, mode=0o600)
        guarantee = details.pop("guarantee", None) or self._guarantee()
        held_out = self.config.evaluation.source or self.config.data.source
        return {
            "method": self.config.method,
            "one_look": self.config.one_look,
            "tested_on": f"test clients of {held_out} (declared public)",
            "validated_on": f"validation clients of {held_out} (declared public)",
            "date": date,
            "private": not stamp or not self.sends,
            "plan": self.plan.to_dict() if self.sends else None,
            "privacy": guarantee["privacy"],
            "language": True,
            "table": self._table(tokens, public, metrics),
            "metrics": {
                **metrics,
                "public_accuracy": public["accuracy"],
                "public_perplexity": public["perplexity"],
                "epsilon": guarantee["epsilon"],
            },
            "cost": self._cost(),
            "public_models": self._public_models(),
            **details,
        }

    def _table(
        self, tokens: np.ndarray, public: Mapping[str, float], metrics: Mapping[str, float]
    ) -> list[dict[str, Any]]:
        """The scores on the test clients of the public model, of token frequencies, and the run's.

        Args:
          tokens: of the test clients.
          public, metrics: the scores of the public model and the run's.
        """
        table: list[dict[str, Any]] = [{"model": "the public model", "private": True, **public}]
        texts = self._held_out(self.valid)
        if texts:
            unigram = unigram_baseline(
                self.writer.rows(texts),
                tokens,
                vocab_size=self.writer.tokeniser.vocab_size,
                words=False,
            )
            table.append({"model": "unigram", "private": True, **dataclasses.asdict(unigram)})
        private = not self.workspace.stamp or not self.sends
        return [*table, {"model": OURS, "private": private, **metrics}]

    def _public_models(self) -> dict[str, Any]:
        """The models that the run started from: names, and the SHA-256 of the parameters."""
        found: dict[str, Any] = {name: self.writer.about(name) for name in self.config.models}
        if any("tokeniser" not in about for about in found.values()):
            found["tokeniser"] = {"name": self.writer.public.tokeniser.name}
        if self.config.method in WRITING:
            found["embedder"] = {"name": self.writer.function.name}
        return found

    def _guarantee(self, ledger: Ledger | None = None, run: str = "") -> dict[str, Any]:
        """The statement and the epsilon of what `run` charged; without a ledger, of the plan."""
        if not self.sends:
            return {"privacy": "(epsilon = 0): clients send nothing", "epsilon": 0.0}
        plan = self.plan
        statement = plan.statement()
        if not plan.private:
            return {"privacy": statement, "epsilon": None}
        epsilon = plan.epsilon()
        if ledger is not None:
            events = [charge.event for charge in ledger.charges if charge.run == run]
            epsilon = Guarantee.of_events(events, plan.delta, plan.unit, plan.accountant).epsilon()
            statement = both_statements(ledger, [run], plan.delta, plan.accountant)
            statement = with_larger([plan], statement)
        return {"privacy": stamped(statement, self.workspace.stamp), "epsilon": epsilon}

    def _method(self, seconds: dict[str, float]) -> tuple[Params, dict[str, Any]]:
        """The trained downstream model's parameters, and the record's entries on the method."""
        method, directory = self.config.method, self.directory
        if method == "public":
            return self.writer.downstream.params, {}
        if method == FED_AVG:
            return self._fed_avg()
        began = time.monotonic()
        texts, details = self._texts()
        seconds["method"] = time.monotonic() - began
        files.write_atomically(directory / "corpus.jsonl", json_lines(texts))
        params = self.writer.fitted(
            self.writer.downstream,
            texts,
            self.config.corpus.fine_tuning,
            directory / FINE_TUNING,
        )
        return params, {**details, "corpus": len(texts), "texts": texts[:_RECORD_TEXTS]}

    def _fed_avg(self) -> tuple[Params, dict[str, Any]]:
        rows = self.writer.rows(self.clients.columns["text"].to_pylist())
        population = self.clients.with_columns({"tokens": rows})
        start = self.writer.downstream
        algorithm = build_fed_avg(start.model, self.config.training, self.plan, start.params)
        result = self.workspace.train(
            algorithm,
            population,
            name=FED_AVG,
            privacy=self.config.privacy,
            tracking=Tracking(
                evaluate_every=self.plan.rounds,
                checkpoint_every=self.config.run.checkpoint_every,
                progress=self.workspace.progress,
            ),
            start=f"{start.digest()} {self.writer.tokeniser.name}",
        )
        guarantee = {"privacy": result.privacy, "epsilon": result.metrics["epsilon"]}
        return result.params, {"guarantee": guarantee if self.plan.private else None}

    def _texts(self) -> tuple[list[str], dict[str, Any]]:
        """The synthetic corpus, and the record's entries on how it was written."""
        config, models, directory = self.config, self.writer, self.directory
        history: list[dict[str, Any]] = []
        asked = question(config, self.plan) if config.method in SCORING else None
        releases = self.releases(asked)

        def on_round(found: Written | Evolved) -> None:
            if isinstance(found, Written):
                history.append(self._written(found))
            else:
                history.append(self._selected(found))

        def corpus() -> dict[str, np.ndarray]:
            found = models.texts(writer, samples, config.corpus.texts)
            if not found:
                raise InputError(
                    "the generator wrote only empty texts, expected a corpus: it needs more "
                    "pretraining, or must be another model (section generator)"
                )
            return {"texts": np.array(found)}

        with releases:
            writer, samples = models.tuned(
                directory, releases.load_or_compute, asked, releases.ask, self._fid, on_round
            )
            chosen = self._chosen(releases) if config.method == "popri" else {}
            texts = releases.load_or_compute("corpus", corpus)["texts"].tolist()
            releases.end()
        details: dict[str, Any] = {
            "history": history,
            **chosen,
            "corpus_fid": self._fid(texts),
            "plane": self._plane(texts),
        }
        if releases.ledger is not None:
            details["guarantee"] = self._guarantee(releases.ledger, releases.run)
        return texts, details

    def _chosen(self, releases: Releases) -> dict[str, Any]:
        """The record of how the round was chosen whose adapters write the corpus."""
        if self.config.popri.checkpoint == "last":
            return {"checkpoint": {"round": self.config.training.rounds}}
        distances = releases.load_or_compute(DISTANCES, missing)["distances"]
        return {"checkpoint": {"round": int(distances.argmin()), "distances": distances.tolist()}}

    def releases(self, asked: Scorer | Look | None) -> Releases:
        """The store of the rounds' artifacts; with a question it can ask the clients."""
        config, directory = self.config, self.directory
        described = described_config(config, self.writer.identity)
        if asked is None:
            return Releases.without_clients(directory, described)
        limit, seed = config.training.max_examples, config.data.split_seed
        made_by = (config.data.remove, f"at most {limit} by {seed}")
        if config.corpus.spans:
            cut = f"{self.writer.tokeniser.name} {config.corpus.tokens}"
            made_by = (*made_by, cut)
        few = self.clients.keeping(at_most(self.clients, limit, seed))
        found = Releases.of_clients(
            directory,
            described,
            self.embedded(few, made_by),
            name="one look" if config.one_look else config.method,
            queries=asked.queries,
            ledger=Ledger(
                ledger_path(config.privacy, directory),
                self.clients,
                budget=budget_of(config.privacy, simulated=config.simulated is not None),
            ),
            reproducible_seed=self.workspace.reproducible_seed,
        )
        if isinstance(asked, Look) and found.ledger is not None:
            # All three releases, or none.
            require_affordable(asked.algorithm, found.ledger, found.run)
        return found

    def embedded(self, clients: Population, made_by: tuple[str | None, ...]) -> Population:
        """The clients with the embeddings of their texts, from `memory` if they are there.

        Args:
          made_by: how the texts were made from the source, as a part of the key in `memory`.
        """
        function, memory = loaded_embedder(self.config.embedder), self.workspace.memory
        key = ("embedded", clients.content, function.name, *made_by)
        if key not in memory:
            memory.clear()
            memory[key] = embed(clients, function, progress=self.workspace.progress)
        return memory[key]

    def _held_out(self, part: Population) -> list[str]:
        """The first texts of held-out clients, as many as the evaluation uses."""
        limit = self.config.evaluation.max_examples
        return part.columns["text"].slice(0, limit).to_pylist()

    def _selected(self, evolved: Evolved) -> dict[str, Any]:
        """The record of a round of private evolution."""
        return {
            "round": evolved.round,
            "fid": self._fid(evolved.selected),
            "texts": evolved.selected[:_RECORD_TEXTS],
        }

    def _written(self, written: Written) -> dict[str, Any]:
        """The record of a round of POPri."""
        texts = [text for row in written.responses for text in row]
        best = np.argsort(-written.scores_KxJ.reshape(-1), kind="stable")[:_RECORD_TEXTS]
        return {
            "round": written.round,
            "fid": self._fid(texts),
            "candidates": written.candidates,
            "pairs": written.pairs,
            "texts": [texts[i] for i in best],
            **written.means,
        }

    def _fid(self, texts: list[str]) -> float:
        """The Frechet distance of the texts' embeddings to those of the validation clients."""
        vectors = np.asarray(self.writer.function(texts[:_FID_TEXTS]))
        return distance(moments(vectors, math.inf), self._validation_moments)

    @cached_property
    def _validation(self) -> np.ndarray:
        return np.asarray(self.writer.function(self._held_out(self.valid)[:_FID_TEXTS]))

    @cached_property
    def _validation_moments(self) -> Moments:
        return moments(self._validation, math.inf)

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
        """The floats that a client receives and sends in a round, as in POPri's Table 2.

        With one look, in all.
        """
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
