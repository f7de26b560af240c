"""The config file of the study of inverted pixels, see `study`. Every field is PUBLIC."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxpfl.algorithms.fed_avg_gan import GeneratorTraining
from jaxpfl.checked import Checked, Positive, PositiveFraction, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import sections
from jaxpfl.models.gan import GAN

SCORES = ("inverted_share", "classifier_score", "frechet", "labelled_accuracy")
"""What is measured of drawn images, see `evaluator.ImageEvaluator.score`."""


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
    """Which examples each of the GANs is trained on.

    Attributes:
      by: "client" selects all examples of clients whose own accuracy is below or above a threshold
        (task T4 of the paper). "slice" selects the examples with one value in `column`: those of
        the slice of least accuracy with the bug, and those of the slice of greatest (T4, too).
        "example" selects the wrongly or rightly classified examples of all clients that have at
        least `at_least` of them (T2). "random" selects a random `fraction` of all examples, for one
        GAN, to look at (T1) or to label (T5).
      column, values: for "slice", a column with one value for each example, such as its class or
        the client's country, and its PUBLIC values as text.
      low, high: the percentiles of users' accuracy that are the two thresholds if `by` is "client".
        They are read from a private histogram, which is released before the bug.
      epsilon: epsilon of each of the two histograms of users' accuracy, or counts of each slice's
        right and wrong examples, one before the bug and one with it; required by a private study,
        but for "random", which needs neither.
    """

    by: Literal["client", "slice", "example", "random"] = "client"
    column: str | None = None
    values: tuple[str, ...] | None = None
    fraction: PositiveFraction = 1.0
    low: float = 25.0
    high: float = 75.0
    at_least: PositiveInt = 5
    epsilon: Positive | None = None

    def check_fields(self) -> None:
        if not 0 < self.low <= self.high < 100:
            expected, pair = "percentiles with 0 < low <= high < 100", (self.low, self.high)
            raise InputError(f"selection.low and selection.high must be {expected}, found {pair}")
        given = (self.column is not None, len(set(self.values or ())) > 1)
        if given != ((self.by == "slice"),) * 2 or len(set(self.values or ())) != len(self.slices):
            expected = "selection.column and at least two different selection.values"
            given = f"by {self.by}, column {self.column} and values {self.slices}"
            raise InputError(f"selection.by: slice, and it alone, needs {expected}, found {given}")

    @property
    def slices(self) -> list[str]:
        return list(self.values or ())


@dataclass(frozen=True)
class InversionConfig(Checked):
    """The simulated bug: with a probability, the pixels of ALL images of a client are inverted.

    With `value`, one of `selection.values`, of its images only those of this slice.
    """

    probability: PositiveFraction = 0.5
    value: str | None = None


@dataclass(frozen=True)
class Config(Checked):
    """GANs that are trained on what a classifier gets wrong and right reveal inverted pixels.

    `training.clients_per_round` is the expected number of SELECTED clients in a round. It and the
    server's learning rate are divided by the share of clients that match, which comes from the
    private histograms: enough clients are sampled, and the mean is over those that match. The share
    is 1 unless `selection.by` is "client". `images` are drawn from each finished GAN and scored.
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

    metrics: ClassVar[set[str]] = {*SCORES, "epsilon"}

    def check_fields(self) -> None:
        if self.data.public != sections.PUBLIC_PART or not self.data.split.public:
            expected = f"{sections.PUBLIC_PART!r} with a positive data.split.public"
            given = f"{self.data.public!r} and {self.data.split.public:g}"
            because = "the classifier learns from clients that are declared public"
            raise InputError(f"data.public must be {expected}, found {given}: {because}")
        asks = self.privacy.private and self.selection.by != "random"
        if asks != (self.selection.epsilon is not None):
            where = "required where privacy.private is true and selection.by is not random"
            given = f"{self.selection.epsilon}: accuracies are private releases"
            raise InputError(f"selection.epsilon is {where}, and absent elsewhere, found {given}")
        if self.bug.value not in (None, *self.selection.slices):
            values = f"selection.values, {self.selection.slices}"
            raise InputError(f"bug.value must be one of {values}, found {self.bug.value!r}")
        training = self.training
        if training.algorithm.name != "fed_avg" or training.schedule != "constant":
            raise InputError("training.algorithm and training.schedule are not for a GAN")
        sections.check_study("privacy", self.privacy, self.scaled_up)
