"""The study of synthetic text: how much private clients improve a downstream model, by method.

    CACHE/                       public models, see `central.public_models`
    artifacts/                   the texts and the releases of each round, see `records.artifacts`
    ledger.jsonl                 every release
    private/                     the secret, until the corpus is written
    runs/fed_avg/                the rounds of method fed_avg, a run like any other
    corpus.jsonl                 the synthetic corpus
    fine_tuning/                 checkpoints of the downstream model's training

The downstream model starts from its public checkpoint, is fine-tuned on the synthetic corpus (the
method fed_avg trains it on the clients), and is evaluated on test clients that are declared public.
The comparison is that of POPri (Hou et al. 2025), Table 1: every method has the same clients and
the same plan, and is charged for what its clients send.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.frechet import distance
from jaxpfl.algorithms.gaussian_moments import Moments, moments
from jaxpfl.algorithms.popri import Written
from jaxpfl.algorithms.private_evolution import Evolved
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.data.selection import at_most
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.engine.build import (
    build_fed_avg,
    build_plan,
    read_clients,
    split_clients,
)
from jaxpfl.experiments.engine.cost import both_statements, stamped, with_larger
from jaxpfl.experiments.engine.releases import Releases, missing
from jaxpfl.experiments.engine.setting import Tracking
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.base import Workspace
from jaxpfl.experiments.systems.synthetic_text.config import (
    EVOLVING,
    SCORING,
    WRITING,
    SyntheticTextConfig,
)
from jaxpfl.experiments.systems.synthetic_text.corpus_writer import (
    CorpusWriter,
    json_lines,
    loaded_embedder,
)
from jaxpfl.experiments.systems.synthetic_text.popri_rounds import DISTANCES
from jaxpfl.models import count_parameters
from jaxpfl.models.base import Params
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed import embed
from jaxpfl.text.metrics.baselines import unigram_baseline
from jaxpfl.text.metrics.prediction import evaluate
from jaxpfl.text.tokenisers.spans import in_spans

FED_AVG = "fed_avg"
"""The name of the run of rounds of the method fed_avg."""

FINE_TUNING = "fine_tuning"
"""The folder of the checkpoints of the downstream model's training on the corpus."""

# The most texts of the corpus, and of a round, that the record contains.
_RECORD_TEXTS = 12
# The most texts that a Frechet distance is estimated from, and that the plot of embeddings shows.
_FID_TEXTS, _PLANE_TEXTS = 2_000, 400


def prepare(config: SyntheticTextConfig) -> "SyntheticText":
    """Reads the clients of a study and refuses what cannot be carried out; releases nothing.

    Raises:
      InputError: a source cannot be read, the clients have no texts, a corpus contains their data,
        the privacy target cannot be met, or a library or model is missing.
    """
    clients = read_clients(config.data)
    if "text" not in clients.columns:
        raise InputError(
            f"data.source: {config.data.source!r} must have a column 'text', found "
            f"{', '.join(map(repr, clients.columns))}"
        )
    parts = split_clients(clients, config.data) | _held_out_elsewhere(config)
    plan = build_plan(
        config.client_privacy, config.training, len(parts["train"]), simulated=config.simulated
    )
    held = parts["train"], parts["valid"], parts["test"]
    writer = CorpusWriter(config)
    writer.public.refuse_private(parts["train"])
    study = SyntheticText(config, *held, plan, writer)
    if config.method in WRITING:
        # Refuses here, before anything is charged, if its library or its weights are missing.
        loaded_embedder(config.embedder)
    return study


def _held_out_elsewhere(config: SyntheticTextConfig) -> dict[str, Population]:
    """The halves of `evaluation.source`, if there is one."""
    if config.evaluation.source is None:
        return {}
    found = open_population(config.evaluation.source)
    return found.split({"valid": 0.5, "test": 0.5}, seed=config.data.split_seed)


def described_config(config: SyntheticTextConfig, identity: dict[str, Any]) -> str:
    """The config, and the published models, as the text that the run's artifacts belong to."""
    text = json.dumps(files.jsonable(dataclasses.asdict(config)))
    return text + json.dumps(identity) if identity else text


@dataclass(frozen=True)
class SyntheticText:
    """The study, ready to be carried out.

    Attributes:
      clients: the training clients, PRIVATE.
      valid, test: held-out clients, declared public.
      plan: the privacy plan of what the clients send.
      models: the public models, and the method that writes a corpus with them.
      memory: of the workspace, PRIVATE: embeddings of clients, which the points of a sweep share.
    """

    config: SyntheticTextConfig
    clients: Population = field(repr=False)
    valid: Population = field(repr=False)
    test: Population = field(repr=False)
    plan: Plan
    models: CorpusWriter
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do in the directory, and returns the public record."""
        models = CorpusWriter(self.config, workspace.progress)
        study = dataclasses.replace(self, models=models, memory=workspace.memory)
        if self.config.corpus.spans:
            study = study.in_spans()
        return study._carried_out(workspace)

    def in_spans(self) -> Self:
        """The same study, in which each example is a span of a client's texts."""
        tokeniser, tokens = self.models.tokeniser, self.config.corpus.tokens
        held = (self.clients, self.valid, self.test)
        clients, valid, test = (in_spans(part, tokeniser, tokens) for part in held)
        return dataclasses.replace(self, clients=clients, valid=valid, test=test)

    def _carried_out(self, workspace: Workspace) -> dict[str, Any]:
        directory, stamp = workspace.directory, workspace.stamp
        began = time.monotonic()
        # As of when the attempt began, which is public; when it ended is not.
        date = datetime.now(UTC).date().isoformat()
        seconds: dict[str, float] = {}
        params, details = self._method(workspace, seconds)
        tokens = self.models.rows(self._held_out(self.test))
        start = self.models.downstream
        metrics = evaluate(start.model, params, tokens, mesh=data_mesh(16))
        public = evaluate(start.model, start.params, tokens, mesh=data_mesh(16))
        seconds["all"] = time.monotonic() - began
        # Private: times depend on how much the clients hold.
        folder = files.private_directory(directory / "private")
        files.write_json(folder / "seconds.json", seconds, mode=0o600)
        guarantee = details.pop("guarantee", None) or self._guarantee(stamp)
        held_out = self.config.evaluation.source or self.config.data.source
        return {
            "method": self.config.method,
            "tested_on": f"test clients of {held_out} (declared public)",
            "validated_on": f"validation clients of {held_out} (declared public)",
            "date": date,
            "private": not stamp or not self._sends(),
            "plan": self.plan.to_dict() if self._sends() else None,
            "privacy": guarantee["privacy"],
            "language": True,
            "table": self._table(tokens, public, metrics, stamp),
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
        self,
        tokens: np.ndarray,
        public: Mapping[str, float],
        metrics: Mapping[str, float],
        stamp: str,
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
                self.models.rows(texts),
                tokens,
                vocab_size=self.models.tokeniser.vocab_size,
                words=False,
            )
            table.append({"model": "unigram", "private": True, **dataclasses.asdict(unigram)})
        private = not stamp or not self._sends()
        return [*table, {"model": OURS, "private": private, **metrics}]

    def _public_models(self) -> dict[str, Any]:
        """The models that the run started from: names, and the SHA-256 of the parameters."""
        found: dict[str, Any] = {name: self.models.about(name) for name in self.config.models}
        if any("tokeniser" not in about for about in found.values()):
            found["tokeniser"] = {"name": self.models.public.tokeniser.name}
        if self.config.method in WRITING:
            found["embedder"] = {"name": self.models.function.name}
        return found

    def _sends(self) -> bool:
        """Whether clients send anything in this method."""
        return self.config.method in (*SCORING, "fed_avg")

    def _guarantee(self, stamp: str, ledger: Ledger | None = None, run: str = "") -> dict[str, Any]:
        """The statement and the epsilon of what `run` charged; without a ledger, of the plan."""
        if not self._sends():
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
        return {"privacy": stamped(statement, stamp), "epsilon": epsilon}

    def _method(
        self, workspace: Workspace, seconds: dict[str, float]
    ) -> tuple[Params, dict[str, Any]]:
        """The trained downstream model's parameters, and the record's entries on the method."""
        method, directory = self.config.method, workspace.directory
        if method == "public":
            return self.models.downstream.params, {}
        if method == "fed_avg":
            return self._fed_avg(directory)
        began = time.monotonic()
        texts, details = self._texts(workspace)
        seconds["method"] = time.monotonic() - began
        files.write_atomically(directory / "corpus.jsonl", json_lines(texts))
        params = self.models.fitted(
            self.models.downstream,
            texts,
            self.config.corpus.fine_tuning,
            directory / FINE_TUNING,
        )
        return params, {**details, "corpus": len(texts), "texts": texts[:_RECORD_TEXTS]}

    def _fed_avg(self, directory: Path) -> tuple[Params, dict[str, Any]]:
        rows = self.models.rows(self.clients.columns["text"].to_pylist())
        population = self.clients.with_columns({"tokens": rows})
        start = self.models.downstream
        algorithm = build_fed_avg(start.model, self.config.training, self.plan, start.params)
        result = study_runs.train(
            self.config,
            algorithm,
            population,
            name=FED_AVG,
            directory=directory,
            ledger=study_runs.ledger_path(self.config.privacy, directory),
            privacy=self.config.privacy,
            tracking=Tracking(
                evaluate_every=self.plan.rounds,
                checkpoint_every=self.config.run.checkpoint_every,
                progress=self.models.progress,
            ),
            start=f"{start.digest()} {self.models.tokeniser.name}",
        )
        guarantee = {"privacy": result.privacy, "epsilon": result.metrics["epsilon"]}
        return result.params, {"guarantee": guarantee if self.plan.private else None}

    def _texts(self, workspace: Workspace) -> tuple[list[str], dict[str, Any]]:
        """The synthetic corpus, and the record's entries on how it was written."""
        config, models, directory = self.config, self.models, workspace.directory
        history: list[dict[str, Any]] = []
        scorer = models.scorer(self.plan) if config.method in SCORING else None
        releases = self._releases(directory, scorer)

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
                directory, releases.load_or_compute, scorer, releases.ask, self._fid, on_round
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
            details["guarantee"] = self._guarantee(workspace.stamp, releases.ledger, releases.run)
        return texts, details

    def _chosen(self, releases: Releases) -> dict[str, Any]:
        """The record of how the round was chosen whose adapters write the corpus."""
        if self.config.popri.checkpoint == "last":
            return {"checkpoint": {"round": self.plan.rounds}}
        distances = releases.load_or_compute(DISTANCES, missing)["distances"]
        return {"checkpoint": {"round": int(distances.argmin()), "distances": distances.tolist()}}

    def _releases(self, directory: Path, scorer: Scorer | None) -> Releases:
        """The store of the rounds' artifacts; with a `scorer` it can ask the clients."""
        config = self.config
        described = described_config(config, self.models.identity)
        if scorer is None:
            return Releases.without_clients(directory, described)
        limit, seed = config.training.max_examples, config.data.split_seed
        made_by = (config.data.remove, f"at most {limit} by {seed}")
        if config.corpus.spans:
            cut = f"{self.models.tokeniser.name} {config.corpus.tokens}"
            made_by = (*made_by, cut)
        few = self.clients.keeping(at_most(self.clients, limit, seed))
        return Releases.of_clients(
            directory,
            described,
            self._embedded(few, made_by),
            name=config.method,
            query=scorer.query,
            ledger=Ledger(
                study_runs.ledger_path(config.privacy, directory),
                self.clients,
                budget=study_runs.budget_of(config.privacy, simulated=config.simulated is not None),
            ),
            reproducible_seed=config.run.seed if config.run.reproducible_noise else None,
        )

    def _embedded(self, clients: Population, made_by: tuple[str | None, ...]) -> Population:
        """The clients with the embeddings of their texts, from `memory` if they are there.

        Args:
          made_by: how the texts were made from the source, as a part of the key in `memory`.
        """
        function = loaded_embedder(self.config.embedder)
        key = ("embedded", clients.content, function.name, *made_by)
        if key not in self.memory:
            self.memory.clear()
            self.memory[key] = embed(clients, function, progress=self.models.progress)
        return self.memory[key]

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
            "pairs": written.pairs,
            "texts": [texts[i] for i in best],
            **written.means,
        }

    def _fid(self, texts: list[str]) -> float:
        """The Frechet distance of the texts' embeddings to those of the validation clients."""
        vectors = np.asarray(self.models.function(texts[:_FID_TEXTS]))
        return distance(moments(vectors, math.inf), self._validation_moments)

    @cached_property
    def _validation(self) -> np.ndarray:
        return np.asarray(self.models.function(self._held_out(self.valid)[:_FID_TEXTS]))

    @cached_property
    def _validation_moments(self) -> Moments:
        return moments(self._validation, math.inf)

    def _plane(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """The embeddings of synthetic and validation texts on their two principal axes."""
        synthetic = np.asarray(self.models.function(texts[:_PLANE_TEXTS]))
        both = {"synthetic": synthetic, "validation": self._validation[:_PLANE_TEXTS]}
        rows = np.concatenate(list(both.values())).astype(np.float64)
        centre = rows.mean(axis=0)
        _, _, axes = np.linalg.svd(rows - centre, full_matrices=False)
        # The sign of an axis is arbitrary: its largest entry is made positive.
        axes = axes[:2] * np.sign(axes[:2][[0, 1], np.abs(axes[:2]).argmax(axis=1)])[:, None]
        return {name: np.round((part - centre) @ axes.T, 4).tolist() for name, part in both.items()}

    def _cost(self) -> dict[str, Any]:
        """The floats that a client receives and sends in a round, as in POPri's Table 2."""
        config, down, up = self.config, 0, 0
        if config.method == "fed_avg":
            down = up = count_parameters(self.models.downstream.params)
        elif config.method in SCORING:
            popri, dimension = config.popri, self.models.function.dimension
            shape = (popri.prompts, popri.responses)
            if config.method in EVOLVING:
                shape = (config.evolution.population, 1)
            down, up = self.models.scorer(self.plan).floats_per_client(*shape, dimension)
        return {"down": down, "up": up}
