"""The config file of the study of joined words. Every field is PUBLIC.

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
    check_study,
)


@dataclass(frozen=True)
class CharacterModelConfig:
    """A CIFG language model over bytes; by default it has the paper's 756,738 parameters.

    Longer words are cut to `max_bytes` bytes.
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
    """The word-level model, which shows WHERE in sentences words are out of vocabulary."""

    privacy: PrivacyConfig
    training: TrainingConfig
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)


@dataclass(frozen=True)
class CharactersConfig:
    """The character-level model of out-of-vocabulary words, which shows WHICH words these are.

    Before the rounds it is trained for `prefinetune_epochs` on the out-of-vocabulary words of the
    PUBLIC corpus, which teach it spelling. With 0 epochs only its output bias is initialised, to
    the letter frequencies of these words.
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
    """The simulated bug, which joins the first two words of some sentences.

    Attributes:
      probabilities: the shares of sentences with the bug; each of them is a world of its own.
      seed: seed of the choice of the sentences.
    """

    probabilities: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.probabilities:
            raise InputError("bug.probabilities must have at least one entry, found none")
        for probability in self.probabilities:
            if not 0 <= checks.non_negative("bug.probabilities", probability) <= 1:
                raise InputError(f"bug.probabilities must lie in [0, 1], found {probability:g}")
        # Worlds are named by their probabilities.
        if len({f"{p:g}" for p in self.probabilities}) != len(self.probabilities):
            raise InputError(f"bug.probabilities must differ, found {list(self.probabilities)}")
        checks.non_negative_int("bug.seed", self.seed)


@dataclass(frozen=True)
class DrawnConfig:
    """How many sentences and words the finished models generate, which costs no privacy.

    The page lists the `top` most probable words.
    """

    sentences: int = 20_000
    words: int = 100_000
    top: int = 20

    def __post_init__(self) -> None:
        for name in ("sentences", "words", "top"):
            checks.positive_int(f"drawn.{name}", getattr(self, name))


@dataclass(frozen=True)
class OovConcatenationConfig:
    """Federated word and character models reveal that two words were joined into one."""

    system: Literal["oov_concatenation"]
    data: DataConfig
    words: WordsConfig
    characters: CharactersConfig
    bug: ConcatenationConfig = ConcatenationConfig()
    drawn: DrawnConfig = DrawnConfig()
    scaled_up: ScaledUpConfig | None = None
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.data.public is None:
            raise InputError(
                "data.public is required, found none: the vocabulary comes from a public corpus"
            )
        if self.data.public == PUBLIC_PART and not self.data.split.public:
            raise InputError(
                f"data.split.public must be positive where data.public is {PUBLIC_PART!r}, found 0"
            )
        both = self.words.privacy, self.characters.privacy
        if both[0].private != both[1].private:
            raise InputError(
                "words.privacy.private and characters.privacy.private must be equal, found "
                f"{both[0].private} and {both[1].private}"
            )
        for name, privacy in zip(("words", "characters"), both, strict=True):
            check_study(f"{name}.privacy", privacy, self.run, self.scaled_up, worlds=True)
        if len({privacy.delta for privacy in both}) != 1:
            raise InputError(
                "words.privacy.delta and characters.privacy.delta must be equal, because both "
                f"models have one composed epsilon, found {both[0].delta} and {both[1].delta}"
            )
