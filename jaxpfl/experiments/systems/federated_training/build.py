"""From a config to what it describes: clients, vocabulary, plans, model, algorithm.

A published model brings its own tokeniser and parameters. With `model.lora` its weights are the
frozen base, and the parameters that clients train, send and clip are the adapters alone.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.algorithms.stored_rounds import PublicDraws
from jaxpfl.data import open as open_population
from jaxpfl.data.open import expanded
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.published import PublishedModel
from jaxpfl.experiments.config.baselines import (
    CharacterModelConfig,
    FeatureModelConfig,
    ResNetConfig,
    TagModelConfig,
)
from jaxpfl.experiments.config.published import PublishedDecoderConfig
from jaxpfl.experiments.config.sections import ImageModelConfig, LanguageModelConfig
from jaxpfl.experiments.engine.build import (
    build_execution,
    build_fed_avg,
    build_model,
    build_plan,
    check_features,
    check_images,
    open_public,
    plan_without_privacy,
    read_clients,
    split_clients,
)
from jaxpfl.experiments.engine.texts import exactly
from jaxpfl.experiments.systems.federated_training.candidates import Candidates
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.models.base import Model, require_room
from jaxpfl.models.decoder import lora
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tags import TagEncoder, most_frequent
from jaxpfl.text.tokenisers import characters
from jaxpfl.text.tokenisers.base import TextEncoder
from jaxpfl.text.tokenisers.public_words import public_words
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

VOCABULARY = "vocabulary.json"
"""The words of a language model, in the run's directory."""

TAGS = "tag_vocabulary.json"
"""The words and tags of a model that predicts tags, in the run's directory."""


@dataclass(frozen=True)
class Experiment:
    """What a config describes, built.

    Attributes:
      train: the training clients, PRIVATE.
      valid: the validation clients, which are scored during the rounds if they are declared public.
      test: the test clients, which are scored at the end if they are declared public.
      sources: the training clients as they were read: with "text" if `train` has "tokens".
      candidates: the public corpora of `fred` and `prefinetune`, or None without these sections.
      fred: the plan of FreD's release on the training clients, or None.
      published: the published model, without adapters, or None.
      start: the PUBLIC parameters that training starts from; None draws them.
      frozen: the base of the adapters that are trained, or None.
      tags: the vocabularies of a model that predicts tags, or None.
    """

    config: Config
    train: Population = field(repr=False)
    valid: Population = field(repr=False)
    test: Population = field(repr=False)
    sources: Population = field(repr=False)
    vocabulary: Vocabulary | None = field(repr=False)
    candidates: Candidates | None = field(repr=False)
    model: Model
    fred: FredPlan | None
    algorithm: Algorithm = field(repr=False)
    published: LanguageModel | None = field(default=None, repr=False)
    start: Any = field(default=None, repr=False)
    frozen: Any = field(default=None, repr=False)
    tags: TagEncoder | None = field(default=None, repr=False)

    @property
    def encoder(self) -> Vocabulary | TextEncoder | None:
        """What makes tokens of texts; None for a model that reads none."""
        return self.vocabulary if self.published is None else TextEncoder(self.published.tokeniser)

    @cached_property
    def published_as(self) -> dict[str, str] | None:
        """What the published model is, because a config names only where it is."""
        if self.published is None:
            return None
        assert isinstance(self.config.model, PublishedDecoderConfig)
        return {
            "path": self.config.model.path,
            "sha256": self.published.digest(),
            "tokeniser": self.published.tokeniser.name,
        }

    def starting_from(self, params: Any) -> Self:
        """The same experiment, whose training starts from these PUBLIC parameters."""
        (query,) = self.algorithm.queries
        algorithm = build_fed_avg(self.model, self.config.training, query.plan, params, self.frozen)
        return dataclasses.replace(self, algorithm=algorithm, start=params)

    def without_privacy(self) -> Algorithm:
        """The same training, clipped alike, without noise: NOT private."""
        plan = plan_without_privacy(self.config.privacy, self.config.training, len(self.train))
        return build_fed_avg(self.model, self.config.training, plan, self.start, self.frozen)


def build(config: Config) -> Experiment:
    """Reads the data, splits it by client, makes the vocabulary, calibrates the plans.

    Raises:
      InputError: a source cannot be read, or its parts do not fit together.
    """
    clients = read_clients(config.data)
    parts = split_clients(clients, config.data)
    if config.evaluation.source is not None:
        parts["valid"] = open_population(config.evaluation.source)
    if isinstance(config.model, ImageModelConfig | ResNetConfig):
        for part in (clients, parts["valid"]):
            check_images(part, config.model.image_shape, config.model.classes)
    if isinstance(config.model, FeatureModelConfig):
        for part in (clients, parts["valid"]):
            check_features(part, config.model.features, config.model.classes)
    sources, public = parts["train"], parts["public"]
    private = PrivateContent(sources)
    candidates = None
    if config.prefinetune is not None:
        candidates = Candidates(config, public, private)
        for source in candidates.sources:
            # Refuses a source that cannot be read or is private, before anything is written.
            candidates.population(source)
    vocabulary = published = start = frozen = tags = None
    if isinstance(config.model, PublishedDecoderConfig):
        published, length = published_model(config, config.model), config.model.sequence_length
        encoder = TextEncoder(published.tokeniser)
        parts = {name: encoder.encode(part, length) for name, part in parts.items()}
        model, start, frozen = trained_parts(published, config.model, config.run.seed)
    else:
        if isinstance(config.model, LanguageModelConfig):
            vocabulary = _vocabulary(config, candidates, public, private)
            length = config.model.sequence_length
            parts = {name: vocabulary.encode(part, length) for name, part in parts.items()}
        if isinstance(config.model, CharacterModelConfig):
            length = config.model.sequence_length
            parts = {name: characters.encode(part, length) for name, part in parts.items()}
        if isinstance(config.model, TagModelConfig):
            tags = tag_encoder(config.model)
            parts = {name: tags.encode(part) for name, part in parts.items()}
        model = build_model(config.model, vocabulary)
        # Here, because FreD is charged before the rounds draw it.
        require_room(model)
    if config.evaluation.source is not None:
        parts["test"] = parts["valid"]
    fred = build_fred_plan(config)
    released = fred.event() if fred is not None and fred.private else None
    plan = build_plan(config.privacy, config.training, len(sources), released, config.simulated)
    return Experiment(
        config=config,
        train=parts["train"],
        valid=parts["valid"],
        test=parts["test"],
        sources=sources,
        vocabulary=vocabulary,
        candidates=candidates,
        model=model,
        fred=fred,
        algorithm=build_fed_avg(model, config.training, plan, start, frozen),
        published=published,
        start=start,
        frozen=frozen,
        tags=tags,
    )


def tag_encoder(settings: TagModelConfig) -> TagEncoder:
    """The encoder of a section `model`, with its vocabularies of public counts."""
    return TagEncoder(
        words=most_frequent(expanded(settings.word_counts), settings.words, "model.words"),
        tags=most_frequent(expanded(settings.tag_counts), settings.tags, "model.tags"),
        max_words=settings.max_words,
        max_tags=settings.max_tags,
    )


def published_model(config: Config, settings: PublishedDecoderConfig) -> LanguageModel:
    """The published model of a section `model`, with its weights."""
    trained = settings.lora is None
    found = PublishedModel.found(settings, "model", trained=trained)
    tokeniser = found.tokeniser
    if not trained:
        found.require_decoder("which takes no adapters (model.lora)")
    if config.evaluation.every and config.evaluation.sentences:
        found.require_decoder("which writes no sentences: set evaluation.sentences: 0")
        if tokeniser.start is None and tokeniser.end_of_text is None:
            raise InputError(
                f"the tokeniser {tokeniser.name} has neither a start nor an end-of-text token, so "
                "no sentence can begin: set evaluation.sentences: 0"
            )
    start = tokeniser.start is not None
    used = "model.sequence_length and a start token"
    found.require_positions(settings.sequence_length + start, used)
    return found.loaded(trained=trained, mesh=build_execution(config.training).mesh)


def trained_parts(
    published: LanguageModel, settings: PublishedDecoderConfig, seed: int
) -> tuple[Model, Any, Any]:
    """The model that clients compute, the parameters that they train, and the frozen ones."""
    if settings.lora is None:
        return published.model, published.params, None
    key = PublicDraws("federated_training", seed).key("adapters")
    model, params = lora.attach(published.model, published.params, settings.lora, key)
    return model, *lora.split(params)


def _vocabulary(
    config: Config, candidates: Candidates | None, public: Population, private: PrivateContent
) -> Vocabulary:
    """The vocabulary of `data.vocabulary`, `data.public` or all candidates, which are public."""
    assert isinstance(config.model, LanguageModelConfig)
    size = config.model.vocab_size
    if config.data.vocabulary is not None:
        return public_words(config.data.vocabulary, size)
    if config.data.public is not None:
        corpus = open_public(config.data.public, public, private, "data.public")
        return exactly(Vocabulary.from_public(corpus, size), size)
    assert config.fred is not None
    assert candidates is not None
    texts = candidates.texts(config.fred.max_candidate_examples, config.run.seed)
    name = f"the candidates {', '.join(candidates.sources)}"
    return exactly(Vocabulary.from_texts(texts, size, source=name), size)


def build_fred_plan(config: Config) -> FredPlan | None:
    """The plan of FreD's release on the training clients; its unit is the client."""
    fred = config.fred
    if fred is None:
        return None
    bounds: dict[str, Any] = {"clip_norm": fred.clip_norm, "max_examples": fred.max_examples}
    if not config.privacy.private:
        return FredPlan.without_privacy(**bounds)
    delta = config.privacy.delta if fred.delta is None else fred.delta
    assert fred.epsilon is not None
    assert delta is not None
    return FredPlan.calibrated(epsilon=fred.epsilon, delta=delta, **bounds)
