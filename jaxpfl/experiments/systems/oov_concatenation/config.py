"""The config of the study of joined words. As in `config.sections`, every field is PUBLIC.

Source: Augenstein et al. 2020, section 5 and appendix B.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import (
    PUBLIC_PART,
    DataConfig,
    LanguageModelConfig,
    PrivacyConfig,
    RunConfig,
    ScaledUpConfig,
    TrainingConfig,
    check_release,
    check_scaled_up,
    refuse_second_run,
)


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

    system: Literal["oov_concatenation"]
    data: DataConfig
    words: WordsConfig
    characters: CharactersConfig
    bug: ConcatenationConfig = ConcatenationConfig()
    drawn: DrawnConfig = DrawnConfig()
    scaled_up: ScaledUpConfig | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        refuse_second_run(self.run)
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
            check_release(f"{name}.privacy", privacy, worlds=True)
            check_scaled_up(self.scaled_up, privacy)
        if len({privacy.delta for privacy in both}) != 1:
            raise InputError(
                "words.privacy.delta and characters.privacy.delta must be equal: both models "
                f"have one epsilon together, found {both[0].delta} and {both[1].delta}"
            )
