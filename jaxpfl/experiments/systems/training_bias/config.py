"""The config file of the study of training bias, see `study`. Every field is PUBLIC."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxpfl.checked import Checked, Fraction, OpenFraction, Positive, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import sections


@dataclass(frozen=True)
class BiasConfig(Checked):
    """The simulated bias: clients who write what the public training data lacks.

    In the world of each of the `shares`, so many of the clients write texts of the PUBLIC `source`
    in place of their own; in the world of 0 nobody does.
    """

    source: str
    shares: tuple[Fraction, ...] = (0.0, 0.3)

    def check_fields(self) -> None:
        sections.check_shares("bias.shares", self.shares)


@dataclass(frozen=True)
class PublicModelConfig(Checked):
    """The model of the PUBLIC corpus, trained centrally by Adam on all but its share `valid`.

    Clients keep the sentences whose density by this model is below that of all but the share
    `rare` of the held-out ones.
    """

    epochs: PositiveInt = 3
    batch_size: PositiveInt = 64
    learning_rate: Positive = 0.003
    valid: OpenFraction = 0.2
    rare: OpenFraction = 0.1


@dataclass(frozen=True)
class DrawnConfig(Checked):
    """How many sentences the private model generates, at no privacy cost; the page lists `top`.

    A drawn sentence counts as missing in the public corpus if the mean log probability of its words
    by the private model is greater by `excess` nats than by the public one.
    """

    sentences: PositiveInt = 2_000
    top: PositiveInt = 10
    excess: Positive = 1.0


@dataclass(frozen=True)
class Config(Checked):
    """A private model of the sentences that are rare to a public one shows what the public lacks.

    `rate_epsilon` is epsilon of the count of these sentences; required by a private study.
    """

    system: Literal["training_bias"]
    data: sections.DataConfig
    bias: BiasConfig
    privacy: sections.PrivacyConfig
    training: sections.TrainingConfig
    model: sections.LanguageModelConfig = field(default_factory=sections.LanguageModelConfig)
    public_model: PublicModelConfig = PublicModelConfig()
    rate_epsilon: Positive | None = None
    drawn: DrawnConfig = DrawnConfig()
    scaled_up: sections.ScaledUpConfig | None = None
    run: sections.RunConfig = field(default_factory=sections.RunConfig)

    metrics: ClassVar[set[str]] = {"rare_share", "missing_share", "planted_share", "epsilon"}

    def check_fields(self) -> None:
        if self.data.public is None:
            raise InputError("data.public must name the public training data, found none")
        sections.check_study("privacy", self.privacy, self.scaled_up)
        sections.check_world("privacy", self.privacy, "rate_epsilon", self.rate_epsilon)
