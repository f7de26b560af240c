"""From a config to what it describes: clients, vocabulary, plan, model, algorithm."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import optax
from dp_accounting import DpEvent

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.data import open as open_population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.columns import text_array
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import (
    Config,
    DataConfig,
    ImageModelConfig,
    LanguageModelConfig,
    OptimizerConfig,
    PrivacyConfig,
    TrainingConfig,
)
from jaxpfl.experiments.engine.public_check import PrivateContent
from jaxpfl.experiments.engine.texts import exactly, public_vocabulary
from jaxpfl.experiments.systems.federated_training.candidates import Candidates, open_public
from jaxpfl.federated.optimizers import optimizer
from jaxpfl.federated.query import Execution
from jaxpfl.models import CIFGLanguageModel, classifier_cnn, emnist_cnn
from jaxpfl.models.base import Model
from jaxpfl.privacy import participation
from jaxpfl.privacy.clip import AdaptiveClip, Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


@dataclass(frozen=True)
class Experiment:
    """What a config describes, built. `train` is private.

    Attributes:
      valid: the validation clients, scored during the rounds where they are declared public.
      test: the test clients, scored at the end where they are declared public.
      sources: the training clients as they were read: with "text" where `train` has "tokens".
      candidates: the public corpora of `fred` and `prefinetune`, or None without these.
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
        plan = _plan_without_privacy(self.config.privacy, self.config.training, len(self.train))
        return build_fed_avg(self.model, self.config.training, plan, start)


def build(config: Config) -> Experiment:
    """Reads the data, splits it by client, makes the vocabulary, calibrates the plans.

    Raises:
      InputError: a source cannot be read, or its parts do not fit together.
    """
    clients = read_clients(config.data)
    if isinstance(config.model, ImageModelConfig):
        check_images(clients, config.model.image_shape, config.model.classes)
    # Split as they were read: the fingerprint, and so the ledger, is of the data, whatever is
    # computed from it.
    parts = clients.split(dataclasses.asdict(config.data.split), seed=config.data.split_seed)
    parts = {name: cleaned(part, config.data) for name, part in parts.items()}
    sources, public = parts["train"], parts["public"]
    private = PrivateContent(sources)
    candidates = None
    if config.prefinetune is not None:
        candidates = Candidates(config, public, private)
        for source in candidates.sources:
            # Before a run directory is touched: what cannot be read, or is private, is refused.
            candidates.population(source)
    vocabulary = None
    if isinstance(config.model, LanguageModelConfig):
        vocabulary = _vocabulary(config, candidates, public, private)
        length = config.model.sequence_length
        parts = {name: vocabulary.encode(part, length) for name, part in parts.items()}
    model = build_model(config.model, vocabulary)
    fred = build_fred_plan(config)
    released = fred.event() if fred is not None and fred.private else None
    plan = build_plan(config.privacy, config.training, len(sources), after=released)
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


def read_clients(config: DataConfig) -> Population:
    """The clients of a section `data`, before they are split.

    Raises:
      InputError: the source cannot be read, or has no clients.
    """
    clients = open_population(config.source)
    if not len(clients):
        raise InputError(f"data.source = {config.source!r} has no clients")
    if config.min_examples > 1:
        clients = clients.with_min_examples(config.min_examples)
    return clients


def cleaned(part: Population, config: DataConfig) -> Population:
    """A part of the clients without what `data.remove` matches.

    After the split: the fingerprint, and so the ledger, stays that of the data as it was read.
    """
    if config.remove is None:
        return part
    if "text" not in part.columns:
        found = ", ".join(sorted(part.columns))
        raise InputError(f"data.remove needs a column 'text' in data.source, found {found}")
    pattern = re.compile(config.remove)
    texts = [pattern.sub("", text) for text in part.columns["text"].to_pylist()]
    return part.with_columns({**part.columns, "text": text_array(texts)})


def _vocabulary(
    config: Config, candidates: Candidates | None, public: Population, private: PrivateContent
) -> Vocabulary:
    """From `data.public`; where that is null, from all candidates, which are public too."""
    assert isinstance(config.model, LanguageModelConfig)
    size = config.model.vocab_size
    if config.data.public is not None:
        corpus = open_public(config.data.public, public, private, "data.public")
        return public_vocabulary(corpus, size)
    assert config.fred is not None
    assert candidates is not None
    texts = candidates.texts(config.fred.max_candidate_examples, config.run.seed)
    name = f"the candidates {', '.join(candidates.sources)}"
    return exactly(Vocabulary.from_texts(texts, size, source=name), size)


def build_fred_plan(config: Config) -> FredPlan | None:
    """The plan of `config.fred`: one release on the training clients, unit = client."""
    fred = config.fred
    if fred is None:
        return None
    if not config.privacy.private:
        return FredPlan.without_privacy(clip_norm=fred.clip_norm, max_examples=fred.max_examples)
    delta = config.privacy.delta if fred.delta is None else fred.delta
    assert fred.epsilon is not None
    assert delta is not None
    return FredPlan.calibrated(
        epsilon=fred.epsilon,
        delta=delta,
        unit="client",
        clip_norm=fred.clip_norm,
        max_examples=fred.max_examples,
    )


def build_model(
    settings: LanguageModelConfig | ImageModelConfig, vocabulary: Vocabulary | None
) -> Model:
    """The network of a section `model`."""
    if isinstance(settings, LanguageModelConfig):
        prior = None
        if settings.unigram_prior and vocabulary is not None:
            prior = vocabulary.log_prior(settings.vocab_size)
        return CIFGLanguageModel(
            vocab_size=settings.vocab_size,
            embedding=settings.embedding,
            hidden=settings.hidden,
            projection=settings.projection,
            tied=settings.tied,
            output_bias_prior=prior,
        )
    makers = {"classifier_cnn": classifier_cnn, "emnist_cnn": emnist_cnn}
    return makers[settings.name](settings.image_shape, settings.classes)


def build_plan(
    privacy: PrivacyConfig,
    training: TrainingConfig,
    population: int,
    after: DpEvent | None = None,
) -> Plan:
    """The plan of the rounds for `population` training clients.

    Args:
      after: what else the run releases on them; `privacy.epsilon` is that of everything together.
    """
    if not privacy.private:
        return _plan_without_privacy(privacy, training, population)
    assert privacy.delta is not None
    adaptive = AdaptiveClip(privacy.target_quantile) if privacy.adaptive else None
    if privacy.epsilon is not None:
        return Plan.calibrated(
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            population=population,
            clients_per_round=training.clients_per_round,
            rounds=training.rounds,
            clip_norm=privacy.clip_norm,
            sampling=privacy.sampling,
            clipping=privacy.clipping,
            adaptive_clip=adaptive,
            accountant=privacy.accountant,
            noise=privacy.noise,
            after=after,
        )
    assert privacy.noise_multiplier is not None
    return Plan(
        rounds=training.rounds,
        clip=Clip(privacy.clip_norm, privacy.clipping, adaptive),
        noise=Noise(privacy.noise_multiplier, privacy.noise),
        participation=participation.of(privacy.sampling, population, training.clients_per_round),
        delta=privacy.delta,
        accountant=privacy.accountant,
    )


def _plan_without_privacy(
    privacy: PrivacyConfig, training: TrainingConfig, population: int
) -> Plan:
    return Plan.without_privacy(
        population=population,
        clients_per_round=training.clients_per_round,
        rounds=training.rounds,
        clip_norm=privacy.clip_norm,
        sampling=privacy.sampling,
        clipping=privacy.clipping,
    )


def build_fed_avg(
    model: Model, training: TrainingConfig, plan: Plan, start: Any = None
) -> Algorithm:
    """DP-FedAvg as a section `training` says; `start` as in `algorithms.fed_avg`."""
    return fed_avg(
        model,
        client=build_optimizer(training.client),
        server=build_optimizer(training.server),
        plan=plan,
        cohort=build_cohort(training),
        execution=Execution(chunk=training.chunk),
        start=start,
    )


def build_cohort(training: TrainingConfig) -> CohortSpec:
    """How a client's examples are capped and batched, on this machine's devices."""
    devices = jax.device_count()
    return CohortSpec(
        batch_size=training.batch_size,
        max_examples=training.max_examples,
        epochs=training.epochs,
        # Every device gets the same number of clients.
        clients_per_bucket=-(-training.clients_per_bucket // devices) * devices,
    )


def build_optimizer(settings: OptimizerConfig) -> optax.GradientTransformation:
    """The optax optimiser of a section `client`, `server` or `generator`."""
    return optimizer(settings.name, settings.learning_rate, settings.momentum)


def check_images(clients: Population, image_shape: tuple[int, int, int], classes: int) -> None:
    """Refuses images that the model cannot read; names shapes and columns, never values."""
    for name in ("image", "label"):
        if name not in clients.columns:
            found = ", ".join(sorted(clients.columns)) or "none"
            raise InputError(f"data.source: needs a column {name!r}, found {found}")
    shape = tuple(clients.columns["image"].shape[1:])
    if shape != image_shape:
        raise InputError(
            f"image_shape is {list(image_shape)}, the images of data.source are {list(shape)}"
        )
    label = clients.columns["label"]
    if label.dtype.kind not in "iu":
        raise InputError(f"data.source: column 'label' must hold integers, found {label.dtype}")
    if len(label) and not (label.min() >= 0 and label.max() < classes):
        raise InputError(
            f"classes is {classes}, and data.source has labels outside 0 .. {classes - 1}"
        )
