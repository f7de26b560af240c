"""The config file of the study of joined words, see `study`. Every field is PUBLIC."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxpfl.checked import Checked, NonNegative, NonNegativeInt, Positive, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import sections


@dataclass(frozen=True)
class CharacterModelConfig(Checked):
    """A CIFG language model over bytes; by default it has the paper's 756,738 parameters.

    Longer words are cut to `max_bytes` bytes.
    """

    embedding: PositiveInt = 128
    hidden: PositiveInt = 256
    projection: PositiveInt = 128
    layers: PositiveInt = 3
    max_bytes: PositiveInt = 20


@dataclass(frozen=True)
class WordsConfig:
    """The word-level model, which shows WHERE in sentences words are out of vocabulary.

    `rate_epsilon` is epsilon of the count of the clients' own words out of the vocabulary, in the
    sentences that the model may be trained on; required by a private study.
    """

    privacy: sections.PrivacyConfig
    training: sections.TrainingConfig
    model: sections.LanguageModelConfig = field(default_factory=sections.LanguageModelConfig)
    rate_epsilon: Positive | None = None


@dataclass(frozen=True)
class CharactersConfig(Checked):
    """The character-level model of out-of-vocabulary words, which shows WHICH words these are.

    Before the rounds it is trained for `prefinetune_epochs` on the out-of-vocabulary words of the
    PUBLIC corpus, which teach it spelling. With 0 epochs only its output bias is initialised, to
    the letter frequencies of these words.
    """

    privacy: sections.PrivacyConfig
    training: sections.TrainingConfig
    model: CharacterModelConfig = CharacterModelConfig()
    prefinetune_epochs: NonNegativeInt = 0


@dataclass(frozen=True)
class ConcatenationConfig(Checked):
    """The shares of sentences with the simulated bug; each of them is a world of its own."""

    probabilities: tuple[NonNegative, ...] = (0.0, 0.01, 0.1, 1.0)

    def check_fields(self) -> None:
        sections.check_shares("bug.probabilities", self.probabilities)


@dataclass(frozen=True)
class DrawnConfig(Checked):
    """How much the finished models generate, at no privacy cost; the page lists `top` words."""

    sentences: PositiveInt = 20_000
    words: PositiveInt = 100_000
    top: PositiveInt = 20


@dataclass(frozen=True)
class Config:
    """Federated word and character models reveal that two words were joined into one."""

    system: Literal["oov_concatenation"]
    data: sections.DataConfig
    words: WordsConfig
    characters: CharactersConfig
    bug: ConcatenationConfig = ConcatenationConfig()
    drawn: DrawnConfig = DrawnConfig()
    scaled_up: sections.ScaledUpConfig | None = None
    run: sections.RunConfig = field(default_factory=sections.RunConfig)

    metrics: ClassVar[set[str]] = {"oov_overall", "oov_generated", "epsilon"}

    def __post_init__(self) -> None:
        public = self.data.public
        if public is None or (public == sections.PUBLIC_PART and not self.data.split.public):
            raise InputError(
                "data.public must name a public corpus, which the vocabulary comes from; for "
                f"{sections.PUBLIC_PART!r} data.split.public must be positive, found {public!r} "
                f"and {self.data.split.public:g}"
            )
        words, characters = self.words.privacy, self.characters.privacy
        for name, privacy in (("words", words), ("characters", characters)):
            sections.check_study(f"{name}.privacy", privacy, self.scaled_up)
            count = "words.rate_epsilon", self.words.rate_epsilon
            sections.check_world(f"{name}.privacy", privacy, *count)
        if words.delta != characters.delta:
            raise InputError(
                "words.privacy.delta and characters.privacy.delta must be equal, because both "
                f"models have one composed epsilon, found {words.delta} and {characters.delta}"
            )
