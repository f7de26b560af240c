"""What a config describes: clients, public corpora, plans, model, algorithm.

A published model brings its own tokeniser and parameters. With `model.lora` its weights are the
frozen base, and the parameters that clients train, send and clip are the adapters alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.canaries import TrainingCanaries
from jaxpfl.algorithms.fred import FredPlan, used_examples
from jaxpfl.algorithms.stored_rounds import PublicDraws
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedDecoderConfig, PublishedWeights
from jaxpfl.experiments.config.sections import EvaluationConfig, LanguageModelConfig, TrainingConfig
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.engine.evaluate import check_examples
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.federated_training.candidates import Candidates
from jaxpfl.experiments.systems.federated_training.config import Config, FredConfig
from jaxpfl.experiments.systems.workspace import ledger_path
from jaxpfl.federated.audits.rehearsal import Rehearsed, rehearse
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Model, Params, require_room
from jaxpfl.models.checkpoints import hub, pretrained, torchvision_files
from jaxpfl.models.decoder import lora
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.columns import text_column
from jaxpfl.text.cut import Cut
from jaxpfl.text.embed import Embedder, embed, embedder
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers import characters
from jaxpfl.text.tokenisers.base import text_rows
from jaxpfl.text.tokenisers.public_words import of_size
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

FRED = "FreD"
"""The run of FreD's release."""

VOCABULARY = "vocabulary.json"
"""The words of a language model, in the run's directory."""


@dataclass(frozen=True)
class Network:
    """The model that clients compute.

    Attributes:
      start: the PUBLIC parameters that training starts from; None draws them.
      frozen: the base of the adapters that are trained, or None.
      published: the published language model, without adapters, or None.
      path: the folder or hub name of published parameters, or None.
    """

    model: Model
    start: Any = field(default=None, repr=False)
    frozen: Any = field(default=None, repr=False)
    published: LanguageModel | None = field(default=None, repr=False)
    path: str | None = None

    @classmethod
    def of(cls, config: Config, vocabulary: Vocabulary | None) -> Self:
        """Loads or builds the model of a config; nothing is trained."""
        settings, seed = config.model, config.run.seed
        if isinstance(settings, PublishedDecoderConfig):
            trained, mesh = settings.lora is None, build.build_execution(config.training).mesh
            available = PublishedModel.of(settings, "model", trained=trained)
            _check_published(settings, available, config.evaluation)
            published = available.loaded(trained=trained, mesh=mesh)
            parts = _trained_parts(published.model, published.params, settings, seed)
            return cls(*parts, published, settings.path)
        network: Any = build.build_model(settings, vocabulary)
        if not isinstance(settings, PublishedWeights) or settings.path is None:
            return cls(network)
        key = PublicDraws("federated_training", seed).key("output layer")
        loaded = torchvision_files.load(hub.resolve(settings.path), network, key)
        return cls(*loaded, path=settings.path)

    @cached_property
    def published_as(self) -> dict[str, str] | None:
        """What published parameters are, because a config names only where they are; or None."""
        if self.path is None:
            return None
        if self.published is None:
            (weights,) = pretrained.weight_files(hub.resolve(self.path))
            return {"path": self.path, "sha256": files.sha256_file(weights)}
        tokeniser = self.published.tokeniser.name
        return {"path": self.path, "sha256": self.published.digest(), "tokeniser": tokeniser}

    @property
    def language(self) -> bool:
        """Whether the model reads texts, as tokens."""
        return self.model.columns == ("tokens",)

    def algorithm(self, training: TrainingConfig, plan: Plan, start: Params = None) -> Algorithm:
        """The rounds from these PUBLIC parameters, None for `self.start`."""
        start = self.start if start is None else start
        return build.build_algorithm(self.model, training, plan, start, self.frozen)


def _check_published(
    settings: PublishedDecoderConfig, available: PublishedModel, evaluation: EvaluationConfig
) -> None:
    """Refuses a published model that cannot be trained; its tokeniser may not be available."""
    tokeniser: Any = available.tokeniser
    if settings.lora is not None:
        available.require_decoder("which takes no adapters (model.lora)")
    if evaluation.every and evaluation.sentences:
        available.require_decoder("which writes no sentences: set evaluation.sentences: 0")
        if tokeniser is not None and tokeniser.start is None and tokeniser.end_of_text is None:
            problem = "has neither a start nor an end-of-text token to begin a sentence with"
            advice = "set evaluation.sentences: 0"
            raise InputError(f"the tokeniser {tokeniser.name} {problem}: {advice}")
    start = tokeniser is not None and tokeniser.start is not None
    used = "model.sequence_length and a start token"
    available.require_positions(settings.sequence_length + start, used)


def _trained_parts(
    model: Any, params: Params, settings: PublishedDecoderConfig, seed: int
) -> tuple[Model, Any, Any]:
    """The model that clients compute, the parameters that they train, and the frozen ones."""
    if settings.lora is None:
        return model, params, None
    key = PublicDraws("federated_training", seed).key("adapters")
    model, params = lora.attach(model, params, settings.lora, key)
    return model, *adapter_trees.split(params)


@dataclass(frozen=True)
class Study(base.Study):
    """FreD's release, if any, and the rounds of training on `clients`, which are PRIVATE.

    Attributes:
      held_out: the clients "valid" and "test" as they were read, who are scored during the rounds
        and at the end if they are declared public; empty for made-up clients.
      candidates: the public corpora of `fred` and `prefinetune`, or None without these sections.
      vocabulary: the public words of a language model of words, or None.
    """

    config: Config
    held_out: Mapping[str, Population] = field(default_factory=dict, repr=False)
    candidates: Candidates | None = field(default=None, repr=False)
    vocabulary: Vocabulary | None = field(default=None, repr=False)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        released = () if self.fred is None else self.fred.plans(self.fred_units)
        return {"rounds": self.plan, **{f"FreD {i}": plan for i, plan in enumerate(released)}}

    @property
    def fred_units(self) -> int:
        """The units of FreD's release; made-up clients have as many examples as are used."""
        number, settings = len(self.clients), cast(FredConfig, self.config.fred)
        examples = self.fred_clients.num_examples or number * settings.max_examples
        return examples if settings.unit == "example" else number

    @cached_property
    def fred_clients(self) -> Population:
        """The training clients, PRIVATE, with their texts cut as FreD compares them."""
        return Cut.parse(cast(FredConfig, self.config.fred).cut).population(self.clients)

    def fred_ledger(self, directory: Path) -> Path:
        """The ledger of FreD's release: its own where its unit is not that of the rounds."""
        apart = self.fred is not None and self.fred.unit == "example"
        own = directory / "runs" / FRED / "ledger.jsonl"
        return own if apart else ledger_path(self.config.privacy, directory)

    @cached_property
    def fred(self) -> FredPlan | None:
        settings, privacy = self.config.fred, self.config.privacy
        if settings is None:
            return None
        bounds: Any = {"clip_norm": settings.clip_norm, "max_examples": settings.max_examples}
        bounds["unit"] = settings.unit
        if settings.epsilon is None:
            return FredPlan.without_privacy(**bounds)
        cost: Any = {"epsilon": settings.epsilon, "delta": settings.delta or privacy.delta}
        if settings.mode == "paper":
            cost |= {"examples": self.fred_units, "clients": len(self.clients)}
            return FredPlan.as_printed(**cost, clip_norm=settings.clip_norm)
        if settings.unit == "example":
            return FredPlan.calibrated(**cost, **bounds, population=self.fred_units)
        noise = "exact" if privacy.noise.startswith("exact") else "independent"
        return FredPlan.calibrated(**cost, **bounds, noise=noise)

    @cached_property
    def embedder(self) -> Embedder:
        return embedder(cast(FredConfig, self.config.fred).embedder)

    def embedded(self, progress: bool) -> Population:
        """The clients with the embeddings that FreD's release reads, which may take long."""
        plan = cast(FredPlan, self.fred)
        used = used_examples(self.fred_clients, plan, self.config.data.split_seed)
        return embed(used, self.embedder, progress=progress)

    @cached_property
    def plan(self) -> Plan:
        """The plan of the rounds; `privacy.epsilon` covers FreD's release for clients, too."""
        config, fred = self.config, self.fred
        if fred is not None and not (fred.private and fred.unit == "client"):
            fred = None
        prior, number = fred and fred.guarantee().event, len(self.clients)
        return build.build_plan(config.privacy, config.training, number, prior, config.simulated)

    @cached_property
    def network(self) -> Network:
        return Network.of(self.config, self.vocabulary)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The rounds from the parameters that the config names, or from new ones."""
        return self.network.algorithm(self.config.training, self.plan)

    @cached_property
    def train(self) -> Population:
        """The training clients as the model reads them, PRIVATE."""
        return self.encode(self.clients)

    @cached_property
    def valid(self) -> Population:
        return self.encode(self.held_out["valid"])

    @cached_property
    def test(self) -> Population:
        return self.encode(self.held_out["test"]) if "test" in self.held_out else self.valid

    def encode(self, examples: Population) -> Population:
        """The columns that the model reads: tokens of texts, or the examples as they are."""
        if not self.network.language:
            return examples
        settings: Any = self.config.model
        if self.network.published is not None:
            texts, tokeniser = text_column(examples).to_pylist(), self.network.published.tokeniser
            tokens = text_rows(tokeniser, texts, settings.sequence_length)
            return examples.with_columns({"tokens": tokens})
        encoder = characters if self.vocabulary is None else self.vocabulary
        return encoder.encode(examples, settings.sequence_length)

    def describe(self) -> description.Description:
        models, rounds = self._describe_training()
        releases, notes, together, sources = {}, (), {}, {}
        if (fred := self.fred) is not None:
            settings, units = cast(FredConfig, self.config.fred), self.fred_units
            sources = {f"fred.candidates.{name}": path for name, path in settings.sources.items()}
            look = description.of_moments("FreD", fred, units, {"embedding": settings.embedder})
            rounds, releases, notes = {**look.rounds, **rounds}, dict(look.releases), look.notes
            if fred.unit == "example":
                assumed = "" if self.clients.num_examples else f"ASSUMED {units:,} examples. "
                notes = (*notes, f"{assumed}FreD has a ledger of its own: {fred.statement()}")
            elif fred.private:
                events = [fred.guarantee().event, self.plan.event()]
                together["FreD and rounds"] = Guarantee.of_events(events, self.plan.delta)
        questions, training = None, self.config.training
        # Nobody knows from which of FedBuff's models a canary starts.
        if training.algorithm.name not in ("fed_avg", "fed_buff"):
            algorithm = partial(build.build_algorithm, training=training)
            questions = partial(TrainingCanaries, algorithm)
        releases["rounds"] = description.PlannedRelease.of_rounds(self.plan, questions)
        return description.Description(models, rounds, releases, sources, together, notes)

    def _describe_training(self) -> tuple[dict[str, description.Sized], dict[str, Rehearsed]]:
        settings, seed, trees = self.config.model, self.config.run.seed, ()
        with description.tracing("a round of training"):
            if isinstance(settings, PublishedDecoderConfig):
                shapes_of = partial(description.published_shapes, settings, "model")
                available, shapes, sized = shapes_of(trained=settings.lora is None)
                models = {"model": sized}
                if available is None:
                    return models, {}
                _check_published(settings, available, self.config.evaluation)
                network: Any = available.model
                parts = partial(_trained_parts, network, settings=settings, seed=seed)
                trees = jax.eval_shape(lambda params: parts(params)[1:], shapes)
                if settings.lora is not None:
                    network = replace(network, lora=settings.lora)
                    about = f"adapters of rank {settings.lora.rank}"
                    models["adapters"] = description.Sized.of(about, trees[0])
            else:
                network = build.build_model(settings, None)
                shapes = description.shapes_of(network)
                models = {"model": description.Sized.of(settings.name, shapes)}
            training = partial(build.build_algorithm, network, self.config.training, self.plan)
            columns = description.example_columns(settings)
            return models, {"rounds": rehearse(training, columns, *trees)}


def prepare(config: Config) -> Study:
    clients = build.read_clients(config.data)
    parts = build.split_clients(clients, config.data)
    train, public, candidates, vocabulary = parts["train"], parts["public"], None, None
    held_out = {name: parts[name] for name in ("valid", "test")}
    if config.evaluation.source is not None:
        held_out = {"valid": open_population(config.evaluation.source)}
    private = PrivateContent(train)
    if config.prefinetune is not None:
        candidates = Candidates.of(config, public, private)
    if isinstance(config.model, LanguageModelConfig):
        # Of `data.vocabulary`, of `data.public` or of all candidates, which are public.
        size, source = config.model.vocab_size, config.data.vocabulary
        if source is None and config.data.public is not None:
            source = build.open_public(config.data.public, public, private, "data.public")
        if source is not None:
            vocabulary = build.public_vocabulary(source, public, private, size)
        elif candidates is not None:
            name = f"the candidates {', '.join(candidates.sources)}"
            samples = (candidates.sample(source, "text") for source in candidates.sources)
            texts = chain.from_iterable(sample.columns["text"].to_pylist() for sample in samples)
            vocabulary = of_size(Vocabulary.from_texts(texts, size, source=name), size, name)
    study = Study(config, train, held_out, candidates, vocabulary)
    model = study.network.model
    if study.network.published is None:
        # Here, because FreD is charged before the rounds draw it.
        require_room(model)
    if not study.network.language:
        check_examples(model, clients, "data.source")
        check_examples(model, study.valid, "evaluation.source")
    settings = config.prefinetune
    if candidates is not None and settings and (settings.other_candidates or not settings.chosen):
        for name in candidates.shares:
            # FreD, which is charged, may choose any of them.
            candidates.parts(name, settings)
    # Each refuses what cannot be read, calibrated, or shared out among the devices.
    _ = study.train, study.valid, study.test, study.algorithm
    return study
