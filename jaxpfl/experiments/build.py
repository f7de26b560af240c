"""From a config to what it describes: clients, vocabulary, plan, model, algorithm."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import optax

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.data import open as open_population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import (
    Config,
    ImageModelConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from jaxpfl.experiments.texts import public_vocabulary
from jaxpfl.federated.optimizers import optimizer
from jaxpfl.models import CIFGLanguageModel, classifier_cnn, emnist_cnn
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import AdaptiveClip, Plan
from jaxpfl.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Experiment:
    """What a config describes, built. `train` is private; `valid` and `test` are held out."""

    config: Config
    train: Population = field(repr=False)
    valid: Population = field(repr=False)
    test: Population = field(repr=False)
    vocabulary: Vocabulary | None = field(repr=False)
    model: Model
    algorithm: Algorithm = field(repr=False)

    def without_privacy(self) -> Algorithm:
        """The same training, clipped alike, without noise: NOT private."""
        return _algorithm(
            self.config, self.model, _plan_without_privacy(self.config, len(self.train))
        )


def build(config: Config) -> Experiment:
    """Reads the data, splits it by client, makes the vocabulary, calibrates the plan.

    Raises:
      InputError: a source cannot be read, or its parts do not fit together.
    """
    clients = open_population(config.data.source)
    if config.data.min_examples > 1:
        clients = clients.with_min_examples(config.data.min_examples)
    if not len(clients):
        raise InputError(
            f"data.source: no client has data.min_examples = {config.data.min_examples} examples"
        )
    vocabulary = None
    if isinstance(config.model, LanguageModelConfig):
        assert config.data.public is not None
        vocabulary = public_vocabulary(config.data.public, config.model.vocab_size)
        clients = vocabulary.encode(clients, config.model.sequence_length)
    else:
        _check_images(clients, config.model)
    parts: Mapping[str, Population] = clients.split(
        dataclasses.asdict(config.data.split), seed=config.data.split_seed
    )
    train = parts["train"]
    model = build_model(config, vocabulary)
    plan = build_plan(config, len(train))
    return Experiment(
        config=config,
        train=train,
        valid=parts["valid"],
        test=parts["test"],
        vocabulary=vocabulary,
        model=model,
        algorithm=_algorithm(config, model, plan),
    )


def build_model(config: Config, vocabulary: Vocabulary | None) -> Model:
    """The network of `config.model`."""
    settings = config.model
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


def build_plan(config: Config, population: int) -> Plan:
    """The plan of `config.privacy` for `population` training clients."""
    privacy, training = config.privacy, config.training
    if not privacy.private:
        return _plan_without_privacy(config, population)
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
        )
    assert privacy.noise_multiplier is not None
    return Plan(
        population=population,
        clients_per_round=training.clients_per_round,
        rounds=training.rounds,
        clip_norm=privacy.clip_norm,
        noise_multiplier=privacy.noise_multiplier,
        delta=privacy.delta,
        sampling=privacy.sampling,
        clipping=privacy.clipping,
        adaptive_clip=adaptive,
        accountant=privacy.accountant,
    )


def _plan_without_privacy(config: Config, population: int) -> Plan:
    return Plan.without_privacy(
        population=population,
        clients_per_round=config.training.clients_per_round,
        rounds=config.training.rounds,
        clip_norm=config.privacy.clip_norm,
        sampling=config.privacy.sampling,
        clipping=config.privacy.clipping,
    )


def _algorithm(config: Config, model: Model, plan: Plan) -> Algorithm:
    training: TrainingConfig = config.training
    devices = jax.device_count()
    return fed_avg(
        model,
        client=_optimizer(training.client),
        server=_optimizer(training.server),
        plan=plan,
        cohort=CohortSpec(
            batch_size=training.batch_size,
            max_examples=training.max_examples,
            epochs=training.epochs,
            # Every device gets the same number of clients.
            clients_per_bucket=-(-training.clients_per_bucket // devices) * devices,
        ),
        chunk=training.chunk,
    )


def _optimizer(settings: OptimizerConfig) -> optax.GradientTransformation:
    return optimizer(settings.name, settings.learning_rate, settings.momentum)


def _check_images(clients: Population, settings: ImageModelConfig) -> None:
    """Refuses images that the model cannot read; names shapes and columns, never values."""
    for name in ("image", "label"):
        if name not in clients.columns:
            found = ", ".join(sorted(clients.columns)) or "none"
            raise InputError(f"data.source: needs a column {name!r}, found {found}")
    shape = tuple(clients.columns["image"].shape[1:])
    if shape != settings.image_shape:
        raise InputError(
            f"model.image_shape is {list(settings.image_shape)}, the images of data.source are "
            f"{list(shape)}"
        )
    label = clients.columns["label"]
    if label.dtype.kind not in "iu":
        raise InputError(f"data.source: column 'label' must hold integers, found {label.dtype}")
    if len(label) and not (label.min() >= 0 and label.max() < settings.classes):
        raise InputError(
            f"model.classes is {settings.classes}, and data.source has labels outside "
            f"0 .. {settings.classes - 1}"
        )
