"""From a config to what it describes: clients, vocabulary, plans, model, algorithm."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.data.population import Population
from jaxpfl.experiments.config.sections import ImageModelConfig, LanguageModelConfig
from jaxpfl.experiments.engine.build import (
    build_fed_avg,
    build_model,
    build_plan,
    check_images,
    open_public,
    plan_without_privacy,
    read_clients,
    split_clients,
)
from jaxpfl.experiments.engine.public_check import PrivateContent
from jaxpfl.experiments.engine.texts import exactly
from jaxpfl.experiments.systems.federated_training.candidates import Candidates
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.models.base import Model
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


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

    def starting_from(self, params: Any) -> Self:
        """The same experiment, whose training starts from these PUBLIC parameters."""
        (query,) = self.algorithm.queries
        return dataclasses.replace(
            self, algorithm=build_fed_avg(self.model, self.config.training, query.plan, params)
        )

    def without_privacy(self, start: Any = None) -> Algorithm:
        """The same training, clipped alike, without noise: NOT private."""
        plan = plan_without_privacy(self.config.privacy, self.config.training, len(self.train))
        return build_fed_avg(self.model, self.config.training, plan, start)


def build(config: Config) -> Experiment:
    """Reads the data, splits it by client, makes the vocabulary, calibrates the plans.

    Raises:
      InputError: a source cannot be read, or its parts do not fit together.
    """
    clients = read_clients(config.data)
    if isinstance(config.model, ImageModelConfig):
        check_images(clients, config.model.image_shape, config.model.classes)
    parts = split_clients(clients, config.data)
    sources, public = parts["train"], parts["public"]
    private = PrivateContent(sources)
    candidates = None
    if config.prefinetune is not None:
        candidates = Candidates(config, public, private)
        for source in candidates.sources:
            # Refuses a source that cannot be read or is private, before anything is written.
            candidates.population(source)
    vocabulary = None
    if isinstance(config.model, LanguageModelConfig):
        vocabulary = _vocabulary(config, candidates, public, private)
        length = config.model.sequence_length
        parts = {name: vocabulary.encode(part, length) for name, part in parts.items()}
    model = build_model(config.model, vocabulary)
    fred = build_fred_plan(config)
    released = fred.event() if fred is not None and fred.private else None
    plan = build_plan(config.privacy, config.training, len(sources), prior_releases=released)
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
        algorithm=build_fed_avg(model, config.training, plan),
    )


def _vocabulary(
    config: Config, candidates: Candidates | None, public: Population, private: PrivateContent
) -> Vocabulary:
    """The vocabulary of `data.public`, or, if that is None, of all candidates, which are public."""
    assert isinstance(config.model, LanguageModelConfig)
    size = config.model.vocab_size
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
