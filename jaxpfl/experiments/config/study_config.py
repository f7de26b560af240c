"""What a study is: several runs that a modeller looks at side by side to find a bug.

The studies here are the experiments of Augenstein et al. 2020, "Generative models for effective ML
on private, decentralized datasets", sections 5 and 6; `synthetic_config` has POPri's. As in
`config`, every field is PUBLIC.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import (
    PUBLIC_PART,
    DataConfig,
    LanguageModelConfig,
    OptimizerConfig,
    PrivacyConfig,
    RunConfig,
    TrainingConfig,
)
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig


@dataclass(frozen=True)
class ScaledUpConfig:
    """A larger population on which the noise of the MEAN would be the same.

    With `factor` times as many clients a round, the noise multiplier is that many times as large
    while the noise of the mean stays: what was learned here would be learned there, at a far
    smaller epsilon (Augenstein et al. 2020, "Privacy at scale"). The report prints both.
    """

    factor: float
    population: int
    delta: float

    def __post_init__(self) -> None:
        if not checks.positive("scaled_up.factor", self.factor) >= 1:
            raise InputError(f"scaled_up.factor must be at least 1, found {self.factor:g}")
        checks.positive_int("scaled_up.population", self.population)
        checks.open_fraction("scaled_up.delta", self.delta)


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

    study: Literal["gan_inversion"]
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
        _check_run(self.run)
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
        _check_privacy("privacy", self.privacy, worlds=False)
        _check_scaled_up(self.scaled_up, self.privacy)


@dataclass(frozen=True)
class CharacterModelConfig:
    """A CIFG language model over bytes; the defaults are the paper's 756,738 parameters.

    `max_bytes` is a public cap: of a longer word the rest is not seen.
    """

    embedding: int = 128
    hidden: int = 256
    projection: int = 128
    layers: int = 3
    peepholes: bool = False
    max_bytes: int = 20

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden", "projection", "layers", "max_bytes"):
            checks.positive_int(f"characters.model.{name}", getattr(self, name))


@dataclass(frozen=True)
class WordsConfig:
    """The word-level language model: it shows WHERE words are out of vocabulary."""

    privacy: PrivacyConfig
    training: TrainingConfig
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)


@dataclass(frozen=True)
class CharactersConfig:
    """The character-level model, trained on out-of-vocabulary words alone: it shows WHICH.

    `prefinetune_epochs` over the PUBLIC corpus's own out-of-vocabulary words come first, which
    teach the model how words are spelt; 0 starts from letter frequencies.
    """

    privacy: PrivacyConfig
    training: TrainingConfig
    model: CharacterModelConfig = CharacterModelConfig()
    prefinetune_epochs: int = 0
    prefinetune_learning_rate: float = 0.003

    def __post_init__(self) -> None:
        checks.non_negative_int("characters.prefinetune_epochs", self.prefinetune_epochs)
        checks.positive("characters.prefinetune_learning_rate", self.prefinetune_learning_rate)


@dataclass(frozen=True)
class ConcatenationConfig:
    """The bug: in these shares of the sentences (one world each) the first two words are joined."""

    probabilities: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.probabilities:
            raise InputError("bug.probabilities must have at least one, found none")
        for probability in self.probabilities:
            if not 0 <= checks.non_negative("bug.probabilities", probability) <= 1:
                raise InputError(f"bug.probabilities must lie in [0, 1], found {probability:g}")
        # As worlds are called.
        if len({f"{p:g}" for p in self.probabilities}) != len(self.probabilities):
            raise InputError(f"bug.probabilities must differ, found {list(self.probabilities)}")
        checks.non_negative_int("bug.seed", self.seed)


@dataclass(frozen=True)
class DrawnConfig:
    """How much is generated from the finished models; costs no privacy."""

    sentences: int = 20_000
    words: int = 100_000
    top: int = 20

    def __post_init__(self) -> None:
        for name in ("sentences", "words", "top"):
            checks.positive_int(f"drawn.{name}", getattr(self, name))


@dataclass(frozen=True)
class OovConcatenationConfig:
    """Federated word and character models show that two words were joined into one."""

    study: Literal["oov_concatenation"]
    data: DataConfig
    words: WordsConfig
    characters: CharactersConfig
    bug: ConcatenationConfig = ConcatenationConfig()
    drawn: DrawnConfig = DrawnConfig()
    scaled_up: ScaledUpConfig | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        _check_run(self.run)
        if self.data.public is None:
            raise InputError(
                "data.public is required, found none: the vocabulary must come from a public corpus"
            )
        if self.data.public == PUBLIC_PART and not self.data.split.public:
            raise InputError(f"data.split.public must be positive where {PUBLIC_PART!r} is used")
        both = self.words.privacy, self.characters.privacy
        if both[0].private != both[1].private:
            raise InputError("words.privacy and characters.privacy must both be private or not")
        for name, privacy in zip(("words", "characters"), both, strict=True):
            _check_privacy(f"{name}.privacy", privacy, worlds=True)
            _check_scaled_up(self.scaled_up, privacy)
        if len({privacy.delta for privacy in both}) != 1:
            raise InputError(
                "words.privacy.delta and characters.privacy.delta must be equal: both models "
                f"have one epsilon together, found {both[0].delta} and {both[1].delta}"
            )


Study = GanInversionConfig | OovConcatenationConfig | SyntheticTextConfig

STUDIES: dict[str, type] = {
    "gan_inversion": GanInversionConfig,
    "oov_concatenation": OovConcatenationConfig,
    "synthetic_text": SyntheticTextConfig,
}


def _check_run(run: RunConfig) -> None:
    if run.also_without_privacy:
        raise InputError("run.also_without_privacy is not for studies: set privacy.private: false")


def _check_privacy(name: str, privacy: PrivacyConfig, *, worlds: bool) -> None:
    """A study has several releases; of several worlds each keeps a ledger of its own."""
    if privacy.epsilon is not None:
        raise InputError(
            f"{name}.epsilon must be absent in a study, which releases several things: give "
            "noise_multiplier, and budget_epsilon as the limit of all of them"
        )
    if worlds and privacy.ledger is not None:
        raise InputError(
            f"{name}.ledger must be absent: the study simulates several worlds on the same "
            "clients, each with a ledger of its own in the study's directory"
        )
    if privacy.sampling != "poisson":
        raise InputError(f"{name}.sampling must be poisson in a study, found {privacy.sampling!r}")


def _check_scaled_up(scaled_up: ScaledUpConfig | None, privacy: PrivacyConfig) -> None:
    if scaled_up is not None and not privacy.private:
        raise InputError("privacy.private is false, so scaled_up must be absent")
