"""The config file of the study of inverted pixels, see `study`. Every field is PUBLIC."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxpfl.algorithms.fed_avg_gan import GeneratorTraining
from jaxpfl.checked import Checked, OpenFraction, Positive, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import sections
from jaxpfl.models.gan import GAN


@dataclass(frozen=True)
class GanConfig:
    """The GAN, and how the server trains its generator after every round.

    `model` states the shape of an image, which is not read from the private data.
    """

    model: GAN = field(default_factory=GAN)
    generator: GeneratorTraining = field(default_factory=GeneratorTraining)
    generator_optimizer: sections.OptimizerConfig = field(
        default_factory=lambda: sections.OptimizerConfig(learning_rate=0.005)
    )


@dataclass(frozen=True)
class ClassifierConfig(Checked):
    """The primary model, whose errors are studied. It is trained centrally on PUBLIC clients.

    If it is weak, trained on few `examples`, it has different accuracies on different users.
    """

    classes: PositiveInt = 10
    epochs: PositiveInt = 3
    examples: PositiveInt = 100_000
    batch_size: PositiveInt = 32
    learning_rate: Positive = 0.001


@dataclass(frozen=True)
class SelectionConfig(Checked):
    """Which examples each of the two GANs is trained on.

    Attributes:
      by: "client" selects all examples of clients whose own accuracy is below or above a threshold
        (task T4 of the paper). "example" selects the wrongly or rightly classified examples of all
        clients that have at least `at_least` of them (task T2).
      low, high: the percentiles of users' accuracy that are the two thresholds if `by` is "client".
        They are read from a private histogram, which is released before the bug.
      epsilon: epsilon of each of the two histograms, one before the bug and one with it; required
        by a private study.
    """

    by: Literal["client", "example"] = "client"
    low: float = 25.0
    high: float = 75.0
    at_least: PositiveInt = 5
    epsilon: Positive | None = None

    def check_fields(self) -> None:
        if not 0 < self.low <= self.high < 100:
            raise InputError(
                "selection.low and selection.high must be percentiles with 0 < low <= high < 100, "
                f"found {self.low:g} and {self.high:g}"
            )


@dataclass(frozen=True)
class InversionConfig(Checked):
    """The simulated bug: with a probability, the pixels of ALL images of a client are inverted."""

    probability: OpenFraction = 0.5


@dataclass(frozen=True)
class GanInversionConfig(Checked):
    """Two GANs, trained on data that a classifier gets wrong and right, reveal inverted pixels.

    `training.clients_per_round` is the expected number of SELECTED clients in a round. It and the
    server's learning rate are divided by the share of clients that match, which comes from the
    private histograms: enough clients are sampled, and the mean is over those that match. With
    `selection.by: example` the share is 1. `images` are drawn from each finished GAN and scored.
    """

    system: Literal["gan_inversion"]
    data: sections.DataConfig
    privacy: sections.PrivacyConfig
    training: sections.TrainingConfig
    gan: GanConfig = GanConfig()
    classifier: ClassifierConfig = ClassifierConfig()
    selection: SelectionConfig = SelectionConfig()
    bug: InversionConfig = InversionConfig()
    images: PositiveInt = 1_000
    scaled_up: sections.ScaledUpConfig | None = None
    run: sections.RunConfig = field(default_factory=sections.RunConfig)

    metrics: ClassVar[set[str]] = {"inverted_share", "classifier_score", "epsilon"}

    def check_fields(self) -> None:
        if self.data.public != sections.PUBLIC_PART or not self.data.split.public:
            raise InputError(
                f"data.public must be {sections.PUBLIC_PART!r} with a positive data.split.public: "
                "the primary classifier is trained on clients that are declared public, found "
                f"{self.data.public!r} and {self.data.split.public:g}"
            )
        if self.privacy.private != (self.selection.epsilon is not None):
            raise InputError(
                "selection.epsilon is required where privacy.private is true, because the "
                "histograms of users' accuracy are private releases, and must be absent where it "
                f"is false, found {self.selection.epsilon}"
            )
        training = self.training
        if training.algorithm.name != "fed_avg" or training.schedule != "constant":
            raise InputError("training.algorithm and training.schedule are not for a GAN")
        sections.check_study("privacy", self.privacy, self.scaled_up)
