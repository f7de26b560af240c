"""The study of synthetic text: how much private clients improve a downstream model, by method.

    CACHE/                       public models, see `central.public_models`
    artifacts/                   the texts and the releases of each round, see `records.artifacts`
    ledger.jsonl                 every release
    private/                     the secret, until the corpus is written
    runs/fed_avg/                the rounds of method fed_avg, a run like any other
    corpus.jsonl                 the synthetic corpus
    fine_tuning/                 checkpoints of the downstream model's training

The comparison is that of POPri (Hou et al. 2025), Table 1: the downstream model starts from its
public checkpoint and is evaluated on test clients that are declared public; every method has the
same clients and the same plan, and is charged for what its clients send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.canaries import ScoreCanaries
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.algorithms.steering import DIFFERENCES, steering
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine import description
from jaxpfl.experiments.engine.build import build_algorithm, read_clients, split_clients
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.synthetic_text.config import Config
from jaxpfl.experiments.systems.synthetic_text.models import (
    StudyModels,
    check_published,
    loaded_embedder,
)
from jaxpfl.experiments.systems.synthetic_text.questions import fred_plan
from jaxpfl.federated.audits.rehearsal import Rehearsed, ask, column, rehearse
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Params
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.columns import text_column


@dataclass(frozen=True)
class Study(base.Study):
    """One method, and what its clients send.

    Attributes:
      held_out: "valid" and "test" clients, declared public; empty where no client was read.
    """

    config: Config
    held_out: Mapping[str, Population] = field(default_factory=dict, repr=False)

    @cached_property
    def plan(self) -> Plan:
        """The privacy plan of what the clients send, if they send anything."""
        config, number = self.config, len(self.clients)
        if config.asks_once:
            # One round of all clients, which costs what the look's releases cost together.
            look, everyone = self.look, Poisson(number, number)
            once: Any = {"rounds": 1, "clip": Clip(1.0), "participation": everyone}
            if not look.private:
                return Plan.without_privacy(**once)
            noise = Noise(1 / look.mu, look.noise)
            return Plan(**once, noise=noise, delta=look.delta, simulates=look.simulates)
        privacy, simulated = config.client_privacy, config.simulated
        return description.cached_plan(privacy, config.training, number, simulated=simulated)

    @cached_property
    def look(self) -> FredPlan:
        """What `popri.clients_send: moments` releases, and what one release of all costs."""
        return fred_plan(self.config, len(self.clients))

    @property
    def plans(self) -> dict[str, Plan]:
        return {"rounds": self.plan}

    @property
    def sends(self) -> bool:
        """Whether clients send anything in this method."""
        return self.config.asks or self.config.method in ("fed_avg", "central")

    def describe(self) -> description.Description:
        config, method = self.config, self.config.method
        shapes = {name: self._shapes(name) for name in config.models}
        models = {name: sized for name, (_, _, sized) in shapes.items()}
        if (remote := config.remote) is not None:
            models["generator"] = description.Sized(f"{remote.model} behind {remote.api}")
        rounds: dict[str, Rehearsed] = {}
        notes: Sequence[str] = ()
        of_rounds, releases = description.PlannedRelease.of_rounds, {}
        model, params, _ = shapes["downstream"]
        if model is not None:
            rounds = self._describe_downstream(model, params)
        if method == "popri" and shapes["generator"][0] is not None:
            models["adapters"] = self._describe_adapters(*shapes["generator"][:2])
        if config.one_look:
            number = len(self.clients)
            look = description.of_moments("moments", self.look, number, config.embedders)
            rounds, releases, notes = {**rounds, **look.rounds}, dict(look.releases), look.notes
        elif method == "steered":
            releases["differences"] = of_rounds(self.plan)
            if (generator := shapes["generator"][0]) is not None:
                layers = config.steering.numbers(generator.config.layers)
                size = len(layers) * generator.config.hidden_size
                origin = jax.ShapeDtypeStruct((size + 1,), np.float32)
                read = {DIFFERENCES: column(origin.shape, np.float32)}
                with description.tracing("the release of differences"):
                    shapes_of, _ = ask(steering(self.plan, size).queries[0], origin, read)
                rounds["differences"] = Rehearsed(shapes_of.up, (shapes_of,))
        elif config.asks:
            dimension, notes = description.embedding_size(config.embedder)
            if dimension is not None:
                by_text = config.client_score == "nn_histogram"
                texts = int(np.prod(config.candidates)) if by_text else dimension
                broadcast = jax.ShapeDtypeStruct((texts, dimension), np.float32)
                name = "embedding" if by_text else "mean_embedding"
                read = {name: column((dimension,), np.float32)}
                with description.tracing("a round of scores"):
                    most, kind = config.evolution.max_texts, config.client_score
                    query = Scorer(self.plan, kind=kind, max_texts=most).query
                    shapes_of, _ = ask(query, broadcast, read)
                rounds["scores"] = Rehearsed(0, (shapes_of,))
            canaries = partial(ScoreCanaries, config.client_score, config.evolution.max_texts)
            canaries = None if self.plan.sampling == "fixed" else canaries
            releases["rounds"] = of_rounds(self.plan, canaries)
        elif method == "fed_avg":
            releases["rounds"] = of_rounds(self.plan)
        elif self.sends:
            texts = replace(of_rounds(self.plan), times="trained on centrally")
            releases["the clients' own texts"] = texts
        corpora = {f"corpora.{name}": source for name, source in (config.corpora or {}).items()}
        return description.Description(models, rounds, releases, corpora, notes=notes)

    def _shapes(self, name: str) -> tuple[Any, Params, description.Sized]:
        """A public model and its parameters as shapes; None for a published one not at hand."""
        config, settings = self.config, self.config.models[name]
        if isinstance(settings, PublishedModelConfig):
            trained = name == "downstream"
            published, params, size = description.published_shapes(settings, name, trained=trained)
            if published is not None:
                check_published(config, published)
            return published and published.model, params, size
        positions = max(settings.sequence_length, config.positions[name])
        model = Decoder(settings.network(config.vocab_size, positions))
        with description.tracing(name):
            shapes = description.shapes_of(model)
        about = f"{settings.architecture}, pretrained on the corpora"
        return model, shapes, description.Sized.of(about, shapes)

    def _describe_downstream(self, model: Any, params: Params) -> dict[str, Rehearsed]:
        config = self.config
        # The longest row, with a start token.
        size, length = config.corpus.fine_tuning.batch_size, (config.corpus.tokens + 1,)
        batch = {"tokens": jax.ShapeDtypeStruct((size, *length), np.int32)}
        with description.tracing("the training of the downstream model"):
            jax.eval_shape(model.loss, params, batch, jax.ShapeDtypeStruct((size,), np.bool_))
        if config.method != "fed_avg":
            return {}
        with description.tracing("a round of fed_avg"):
            algorithm = partial(build_algorithm, model, config.training, self.plan)
            return {"fed_avg": rehearse(algorithm, {"tokens": column(length, np.int32)}, params)}

    def _describe_adapters(self, model: Any, params: Params) -> description.Sized:
        settings = self.config.popri.lora

        def attached(key: Any, params: Any) -> Any:
            return adapter_trees.split(lora.attach(model, params, settings, key)[1])[0]

        with description.tracing("POPri's tuning of the generator"):
            adapters = jax.eval_shape(attached, description.KEY, params)
        return description.Sized.of(f"of rank {settings.rank}, tuned by preference", adapters)


def prepare(config: Config) -> Study:
    clients = read_clients(config.data)
    text_column(clients)
    parts = split_clients(clients, config.data)
    if config.evaluation.source is not None:
        held_out = open_population(config.evaluation.source)
        parts |= held_out.split({"valid": 0.5, "test": 0.5}, seed=config.data.split_seed)
    study = Study(config, parts.pop("train"), parts)
    # Refuses here, before anything is charged, what cannot be calibrated or is missing.
    study.plan  # noqa: B018
    private, public = PrivateContent(study.clients), StudyModels(config).public
    for name, corpus in public.corpora.items():
        private.refuse(corpus, f"corpora.{name} = {public.sources[name]!r}")
    if config.writes:
        loaded_embedder(config.embedder)
    if config.one_look:
        for embedder in config.embedders.values():
            loaded_embedder(embedder)
    return study
