"""What a config describes: clients, vocabulary, plans, model, algorithm.

A published model brings its own tokeniser and parameters. With `model.lora` its weights are the
frozen base, and the parameters that clients train, send and clip are the adapters alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.canaries import TrainingCanaries
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.algorithms.stored_rounds import PublicDraws
from jaxpfl.data import open as open_population
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.published import PublishedDecoderConfig, PublishedWeights
from jaxpfl.experiments.config.sections import CharacterModelConfig, LanguageModelConfig
from jaxpfl.experiments.engine import build
from jaxpfl.experiments.engine.description import (
    Description,
    PlannedRelease,
    Sized,
    embedding_size,
    example_columns,
    moments_release,
    published_shapes,
    shapes_of,
    tracing,
)
from jaxpfl.experiments.engine.evaluate import check_examples
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.federated_training.candidates import Candidates
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.federated.audits.rehearsal import Rehearsed, rehearse
from jaxpfl.models import adapter_trees
from jaxpfl.models.base import Model, Params, require_room
from jaxpfl.models.checkpoints import hub, pretrained, torchvision_files
from jaxpfl.models.decoder import lora
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers import characters
from jaxpfl.text.tokenisers.base import TextEncoder
from jaxpfl.text.tokenisers.public_words import of_size, public_words
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


@dataclass(frozen=True)
class Study(base.Study):
    """FreD's release, if any, and the rounds of training on `clients`, which are PRIVATE."""

    config: Config

    @cached_property
    def plans(self) -> dict[str, Plan]:
        released = () if self.fred is None else self.fred.plans(len(self.clients))
        return {"rounds": self.plan, **{f"FreD {i}": each for i, each in enumerate(released)}}

    @cached_property
    def fred(self) -> FredPlan | None:
        """The plan of FreD's release; its unit is the client."""
        settings, privacy = self.config.fred, self.config.privacy
        if settings is None:
            return None
        bounds: Any = {"clip_norm": settings.clip_norm, "max_examples": settings.max_examples}
        delta = privacy.delta if settings.delta is None else settings.delta
        if not privacy.private:
            return FredPlan.without_privacy(**bounds)
        assert settings.epsilon is not None and delta is not None, "the config checks it"
        noise = "exact" if privacy.noise.startswith("exact") else "independent"
        return FredPlan.calibrated(epsilon=settings.epsilon, delta=delta, noise=noise, **bounds)

    @cached_property
    def plan(self) -> Plan:
        """Of the rounds; `privacy.epsilon` covers FreD's release, too."""
        config, found = self.config, self.fred
        prior = found.guarantee().event if found is not None and found.private else None
        number = len(self.clients)
        return build.build_plan(config.privacy, config.training, number, prior, config.simulated)

    def describe(self) -> Description:
        models, rounds = self._describe_training()
        releases, notes, together = {}, (), {}
        found, settings = self.fred, self.config.fred
        if found is not None and settings is not None:
            releases["FreD"] = PlannedRelease.of_moments(found, len(self.clients))
            dimension, notes = embedding_size(settings.embedder)
            if dimension is not None:
                with tracing("FreD's release"):
                    rounds = {"FreD": moments_release(found, len(self.clients), dimension)} | rounds
            if found.private:
                both = Guarantee.of_events(
                    [found.guarantee().event, self.plan.event()], self.plan.delta
                )
                together["FreD and rounds"] = both
        asked, training = None, self.config.training
        # Nobody knows from which of FedBuff's models a canary starts.
        if training.algorithm.name not in ("fed_avg", "fed_buff"):
            asked = partial(TrainingCanaries, partial(build.build_algorithm, training=training))
        releases["rounds"] = PlannedRelease.of_rounds(self.plan, asked)
        candidates = {} if settings is None else settings.sources
        sources = {f"fred.candidates.{name}": source for name, source in candidates.items()}
        return Description(models, rounds, releases, sources, together, notes)

    def _describe_training(self) -> tuple[dict[str, Sized], dict[str, Rehearsed]]:
        settings, seed, trees = self.config.model, self.config.run.seed, ()
        with tracing("a round of training"):
            if isinstance(settings, PublishedDecoderConfig):
                alone = settings.lora is None
                found, shapes, sized = published_shapes(settings, "model", trained=alone)
                models: dict[str, Sized] = {"model": sized}
                if found is None:
                    return models, {}
                check_published(self.config, settings, found)
                network: Any = found.model
                parts = partial(trained_parts, network, settings=settings, seed=seed)
                trees = jax.eval_shape(lambda params: parts(params)[1:], shapes)
                if settings.lora is not None:
                    network = replace(network, lora=settings.lora)
                    about = f"adapters of rank {settings.lora.rank}"
                    models["adapters"] = Sized.of(about, trees[0])
            else:
                network = build.build_model(settings, None)
                models = {"model": Sized.of(settings.name, shapes_of(network))}
            training = partial(build.build_algorithm, network, self.config.training, self.plan)
            return models, {"rounds": rehearse(training, example_columns(settings), *trees)}


@dataclass(frozen=True)
class Prepared(Study):
    """A study of clients that were read; nothing is trained or released yet.

    Attributes:
      train: the training clients as the model reads them, PRIVATE.
      valid, test: held-out clients, which are scored during the rounds and at the end if they are
        declared public.
      encode: makes the columns that the model reads of texts; None where it reads none.
      candidates: the public corpora of `fred` and `prefinetune`, or None without these sections.
      published: the published model, without adapters, or None.
      start: the PUBLIC parameters that training starts from; None draws them.
      frozen: the base of the adapters that are trained, or None.
    """

    train: Population = field(repr=False)
    valid: Population = field(repr=False)
    test: Population = field(repr=False)
    model: Model
    encode: Callable[[Population], Population] | None = field(repr=False)
    vocabulary: Vocabulary | None = field(repr=False)
    candidates: Candidates | None = field(repr=False)
    published: LanguageModel | None = field(default=None, repr=False)
    start: Any = field(default=None, repr=False)
    frozen: Any = field(default=None, repr=False)

    @cached_property
    def algorithm(self) -> Algorithm:
        return self.starting_from(self.start)

    def starting_from(self, params: Params) -> Algorithm:
        """The rounds from these PUBLIC parameters."""
        return build.build_algorithm(
            self.model, self.config.training, self.plan, params, self.frozen
        )

    @cached_property
    def published_as(self) -> dict[str, str] | None:
        """What the published model is, because a config names only where it is."""
        return published_as(self.config, self.published)


def prepare(config: Config) -> Prepared:
    """Reads the data, splits it by client, makes the vocabulary, calibrates the plans."""
    clients, model = build.read_clients(config.data), config.model
    parts = build.split_clients(clients, config.data)
    if config.evaluation.source is not None:
        parts["valid"] = open_population(config.evaluation.source)
    public, private = parts["public"], PrivateContent(parts["train"])
    candidates = None
    if config.prefinetune is not None:
        candidates = Candidates(config, public, private)
        for source in candidates.sources:
            # Refuses a source that cannot be read or is private, before anything is written.
            candidates.population(source)
    vocabulary, encoder = None, characters
    if isinstance(model, LanguageModelConfig):
        encoder = vocabulary = _vocabulary(config, model, candidates, public, private)
    published, network, start, frozen = built(config, vocabulary)
    if published is None:
        # Here, because FreD is charged before the rounds draw it.
        require_room(network)
    else:
        encoder = TextEncoder(published.tokeniser)
    encode = None
    if isinstance(model, LanguageModelConfig | CharacterModelConfig | PublishedDecoderConfig):
        encode = partial(encoder.encode, sequence_length=model.sequence_length)
    read = {name: parts[name] for name in ("train", "valid", "test")}
    if encode is not None:
        read = {name: encode(part) for name, part in read.items()}
    else:
        check_examples(network, clients, "data.source")
        check_examples(network, read["valid"], "evaluation.source")
    found = Prepared(
        config,
        parts["train"],
        train=read["train"],
        valid=read["valid"],
        test=read["test"] if config.evaluation.source is None else read["valid"],
        model=network,
        encode=encode,
        vocabulary=vocabulary,
        candidates=candidates,
        published=published,
        start=start,
        frozen=frozen,
    )
    # Refuses what cannot be calibrated or shared out among the devices.
    found.algorithm  # noqa: B018
    return found


def check_published(
    config: Config, settings: PublishedDecoderConfig, found: PublishedModel
) -> None:
    """Refuses a published model that cannot be trained; its tokeniser may not be available."""
    tokeniser: Any = found.tokeniser
    if settings.lora is not None:
        found.require_decoder("which takes no adapters (model.lora)")
    if config.evaluation.every and config.evaluation.sentences:
        found.require_decoder("which writes no sentences: set evaluation.sentences: 0")
        if tokeniser is not None and tokeniser.start is None and tokeniser.end_of_text is None:
            raise InputError(
                f"the tokeniser {tokeniser.name} has neither a start nor an end-of-text token, so "
                "no sentence can begin: set evaluation.sentences: 0"
            )
    start = tokeniser is not None and tokeniser.start is not None
    used = "model.sequence_length and a start token"
    found.require_positions(settings.sequence_length + start, used)


def built(
    config: Config, vocabulary: Vocabulary | None
) -> tuple[LanguageModel | None, Model, Any, Any]:
    """The published model, if any, and the three `trained_parts`; None starts from new ones."""
    settings = config.model
    if not isinstance(settings, PublishedDecoderConfig):
        network: Any = build.build_model(settings, vocabulary)
        if not isinstance(settings, PublishedWeights) or settings.path is None:
            return None, network, None, None
        key = PublicDraws("federated_training", config.run.seed).key("output layer")
        return None, *torchvision_files.load(hub.resolve(settings.path), network, key), None
    trained, mesh = settings.lora is None, build.build_execution(config.training).mesh
    found = PublishedModel.of(settings, "model", trained=trained)
    check_published(config, settings, found)
    published = found.loaded(trained=trained, mesh=mesh)
    return published, *trained_parts(published.model, published.params, settings, config.run.seed)


def published_as(config: Config, published: LanguageModel | None) -> dict[str, str] | None:
    """What the published model or weights of a config are; None if it names none."""
    settings = config.model
    if not isinstance(settings, PublishedWeights) or settings.path is None:
        return None
    if published is None:
        (weights,) = pretrained.weight_files(hub.resolve(settings.path))
        return {"path": settings.path, "sha256": files.sha256_file(weights)}
    tokeniser = published.tokeniser.name
    return {"path": settings.path, "sha256": published.digest(), "tokeniser": tokeniser}


def trained_parts(
    model: Any, params: Params, settings: PublishedDecoderConfig, seed: int
) -> tuple[Model, Any, Any]:
    """The model that clients compute, the parameters that they train, and the frozen ones."""
    if settings.lora is None:
        return model, params, None
    key = PublicDraws("federated_training", seed).key("adapters")
    model, params = lora.attach(model, params, settings.lora, key)
    return model, *adapter_trees.split(params)


def _vocabulary(
    config: Config,
    model: LanguageModelConfig,
    candidates: Candidates | None,
    public: Population,
    private: PrivateContent,
) -> Vocabulary:
    """The vocabulary of `data.vocabulary`, `data.public` or all candidates, which are public."""
    data, size = config.data, model.vocab_size
    if data.vocabulary is not None:
        return public_words(data.vocabulary, size)
    if data.public is not None:
        return public_words(build.open_public(data.public, public, private, "data.public"), size)
    assert config.fred is not None and candidates is not None
    texts = candidates.texts(config.fred.max_candidate_examples, config.run.seed)
    name = f"the candidates {', '.join(candidates.sources)}"
    return of_size(Vocabulary.from_texts(texts, size, source=name), size, name)
