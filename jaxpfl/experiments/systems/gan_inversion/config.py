"""The config of the study of inverted pixels. As in `config.sections`, every field is PUBLIC.

Source: Augenstein et al. 2020, section 6 and appendix C.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import (
    PUBLIC_PART,
    DataConfig,
    OptimizerConfig,
    PrivacyConfig,
    RunConfig,
    ScaledUpConfig,
    TrainingConfig,
    check_release,
    check_scaled_up,
    refuse_second_run,
)


@dataclass(frozen=True)
class GanConfig:
    """`models.GAN`, and what the server does with it.

    Attributes:
      image_shape: height, width, channels; stated, not read from the data: data is private.
      width: scales the networks; 1.0 are the paper's.
      generator: optimiser of the generator's steps, which the server takes after every round.
    """

    image_shape: tuple[int, int, int] = (28, 28, 1)
    width: float = 1.0
    noise: int = 128
    loss: Literal["wasserstein_gp", "non_saturating"] = "wasserstein_gp"
    generator: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=0.005))
    generator_steps: int = 6
    generator_batch: int = 32

    def __post_init__(self) -> None:
        for side in self.image_shape:
            checks.positive_int("gan.image_shape", side)
        checks.positive("gan.width", self.width)
        for name in ("noise", "generator_steps", "generator_batch"):
            checks.positive_int(f"gan.{name}", getattr(self, name))


@dataclass(frozen=True)
class ClassifierConfig:
    """The primary model that the modeller has in use, trained centrally on the PUBLIC clients.

    Attributes:
      classes: number of labels, stated.
      examples: so many public examples train it; a weak model makes users' accuracies differ.
    """

    classes: int = 10
    epochs: int = 3
    examples: int = 100_000
    batch_size: int = 32
    learning_rate: float = 0.001

    def __post_init__(self) -> None:
        for name in ("classes", "epochs", "examples", "batch_size"):
            checks.positive_int(f"classifier.{name}", getattr(self, name))
        checks.positive("classifier.learning_rate", self.learning_rate)


# Narrow where a fair classifier's users are.
_EDGES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.84, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0)


@dataclass(frozen=True)
class SelectionConfig:
    """Whose data, or which of it, each of the two GANs sees.

    Attributes:
      by: "client" takes all examples of clients whose own accuracy is below or above a threshold
        (T4 of the paper); "example" takes the wrongly or rightly classified examples of everyone
        who has at least `at_least` of them (T2).
      low, high: percentiles of users' accuracy that become the two thresholds, where `by` is
        "client". They come from a private histogram, released before the bug.
      edges: of the histogram's bins, from 0 to 1: public constants.
      epsilon: of one such histogram; there are two, one before the bug and one with it. Required
        by a private study.
    """

    by: Literal["client", "example"] = "client"
    low: float = 25.0
    high: float = 75.0
    at_least: int = 5
    epsilon: float | None = None
    edges: tuple[float, ...] = _EDGES

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < 100:
            raise InputError(
                "selection.low and high must be percentiles with 0 < low <= high < 100, found "
                f"{self.low:g} and {self.high:g}"
            )
        checks.positive_int("selection.at_least", self.at_least)
        if self.epsilon is not None:
            checks.positive("selection.epsilon", self.epsilon)


@dataclass(frozen=True)
class InversionConfig:
    """The bug: with this probability, ALL images of a client have their pixels inverted."""

    probability: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        checks.open_fraction("bug.probability", self.probability)
        checks.non_negative_int("bug.seed", self.seed)


@dataclass(frozen=True)
class LookConfig:
    """How often a GAN's images are scored, and on how many."""

    every: int = 50
    images: int = 1_000

    def __post_init__(self) -> None:
        for name in ("every", "images"):
            checks.positive_int(f"look.{name}", getattr(self, name))


@dataclass(frozen=True)
class GanInversionConfig:
    """Two federated GANs, on data that a classifier gets wrong and right, show inverted pixels.

    `training.clients_per_round` counts the SELECTED clients that are wanted in a round. So many
    more are sampled as the share of clients who match asks for, and the server's rate rises with
    that; the share is known from the private histograms (or, by example, taken as 1).
    """

    system: Literal["gan_inversion"]
    data: DataConfig
    privacy: PrivacyConfig
    training: TrainingConfig
    gan: GanConfig = GanConfig()
    classifier: ClassifierConfig = ClassifierConfig()
    selection: SelectionConfig = SelectionConfig()
    bug: InversionConfig = InversionConfig()
    look: LookConfig = LookConfig()
    scaled_up: ScaledUpConfig | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        refuse_second_run(self.run)
        if self.data.public != PUBLIC_PART or not self.data.split.public:
            raise InputError(
                f"data.public must be {PUBLIC_PART!r} with a positive data.split.public: the "
                "primary classifier is trained on clients that are declared public, found "
                f"{self.data.public!r} and {self.data.split.public:g}"
            )
        if self.privacy.private and self.selection.epsilon is None:
            raise InputError("selection.epsilon is required by a private study, found none")
        if not self.privacy.private and self.selection.epsilon is not None:
            raise InputError("privacy.private is false, so selection.epsilon must be absent")
        check_release("privacy", self.privacy, worlds=False)
        check_scaled_up(self.scaled_up, self.privacy)
