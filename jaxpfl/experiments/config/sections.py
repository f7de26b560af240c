"""The sections that configs of several systems share: frozen dataclasses (see `reader`).

Every field here is PUBLIC: it is written to the run directory and shown in the report. Client data,
keys and anything computed from them never become fields.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from jaxpfl import checks
from jaxpfl.errors import InputError

PUBLIC_PART = "split:public"
"""As a public source: the clients that `data.split.public` sets apart and declares public."""


@dataclass(frozen=True)
class SplitConfig:
    """Fractions of the CLIENTS (not of the examples) that train, validate and test.

    The clients of `public` are declared public: they serve as a public corpus, under the source
    name "split:public", and take no other part.
    """

    train: float = 0.8
    valid: float = 0.1
    test: float = 0.1
    public: float = 0.0

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test", "public"):
            checks.non_negative(f"data.split.{name}", getattr(self, name))
        checks.positive("data.split.train", self.train)
        total = self.train + self.valid + self.test + self.public
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise InputError(f"data.split must sum to 1, found {total:g}")


@dataclass(frozen=True)
class DataConfig:
    """The private clients, and the public corpus that a language model's vocabulary comes from.

    With `public: null` the vocabulary comes from `fred.candidates`, which are public too.

    Attributes:
      min_examples: clients with fewer examples hold none and stay clients: the population's size,
        which the plan and the report show, must not follow from what clients hold. To train on
        those with more alone, publish their number first, counted by a release.
      remove: a regular expression; what it matches in a text of `source` is removed, such as the
        masks that an anonymiser left. Public, and applied to each text alone.
    """

    source: str
    public: str | None = None
    remove: str | None = None
    min_examples: int = 1
    split: SplitConfig = SplitConfig()
    split_seed: int = 0

    def __post_init__(self) -> None:
        checks.positive_int("data.min_examples", self.min_examples)
        try:
            re.compile(self.remove or "")
        except re.error as error:
            raise InputError(
                f"data.remove must be a regular expression, found {self.remove!r}: {error}"
            ) from None
        checks.non_negative_int("data.split_seed", self.split_seed)


@dataclass(frozen=True)
class LanguageModelConfig:
    """`models.CIFGLanguageModel`; `vocab_size` counts the four special tokens.

    `unigram_prior` starts the output bias at the word frequencies of the public corpus.
    """

    name: Literal["cifg_lm"] = "cifg_lm"
    vocab_size: int = 4_000
    sequence_length: int = 20
    embedding: int = 96
    hidden: int = 670
    projection: int = 96
    tied: bool = True
    unigram_prior: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "sequence_length", "embedding", "hidden", "projection"):
            checks.positive_int(f"model.{name}", getattr(self, name))


@dataclass(frozen=True)
class ImageModelConfig:
    """A CNN. `image_shape` and `classes` are stated, not read from the data: data is private."""

    name: Literal["classifier_cnn", "emnist_cnn"]
    image_shape: tuple[int, int, int]
    classes: int

    def __post_init__(self) -> None:
        for side in self.image_shape:
            checks.positive_int("model.image_shape", side)
        checks.positive_int("model.classes", self.classes)


@dataclass(frozen=True)
class PrivacyConfig:
    """Exactly one of `epsilon`, `noise_multiplier`, or `private: false`.

    Attributes:
      private: false trains without privacy, and every artefact of the run says so.
      epsilon: target of ALL releases of the run, those of `fred` too; the noise multiplier of
        the rounds is calibrated to what the others leave of it.
      noise_multiplier: std of the noise on the sum / sensitivity of the sum, in every round.
      delta: required by a private run.
      clip_norm: L2 bound of one client's update (the first one, under adaptive clipping).
      adaptive: private quantile clipping (Andrew et al. 2021), at `target_quantile`.
      sampling: who takes part in a round, see `privacy.plan`.
      noise: "tree" or "banded" is DP-FTRL's, correlated between rounds; it needs `sampling:
        epochs`.
      accountant: null takes PLD where it has support, else RDP.
      ledger: file that is charged; null means `ledger.jsonl` in the run directory. Runs on the
        same population that should share one budget name one file.
      budget_epsilon: hard limit of the whole ledger at `delta`; null means `epsilon`.
    """

    private: bool = True
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    clip_norm: float = 0.3
    clipping: Literal["flat", "per_layer"] = "flat"
    adaptive: bool = False
    target_quantile: float = 0.5
    sampling: Literal["poisson", "fixed", "cyclic"] = "poisson"
    noise: Literal["independent", "tree", "banded"] = "independent"
    accountant: Literal["pld", "rdp"] | None = None
    ledger: str | None = None
    budget_epsilon: float | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("epsilon", "noise_multiplier") if getattr(self, n) is not None]
        for name in (*given, "clip_norm"):
            checks.positive(f"privacy.{name}", getattr(self, name))
        checks.open_fraction("privacy.target_quantile", self.target_quantile)
        if self.budget_epsilon is not None:
            checks.positive("privacy.budget_epsilon", self.budget_epsilon)
        if not self.private:
            if given or self.delta is not None or self.budget_epsilon is not None:
                raise InputError(
                    "privacy.private is false, so privacy.epsilon, noise_multiplier, delta and "
                    "budget_epsilon must be absent: nothing in this run is private"
                )
            return
        if len(given) != 1:
            raise InputError(
                "privacy needs exactly one of epsilon, noise_multiplier or private: false, found "
                + (" and ".join(given) if given else "none")
            )
        if self.delta is None:
            raise InputError("privacy.delta is required by a private run, found none")
        checks.open_fraction("privacy.delta", self.delta)


@dataclass(frozen=True)
class OptimizerConfig:
    """See `federated.optimizers`; `momentum` is used by `momentum` and `nesterov` only."""

    name: Literal["sgd", "momentum", "nesterov", "adam", "yogi"] = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.positive("learning_rate", self.learning_rate)
        checks.open_fraction("momentum", self.momentum)


@dataclass(frozen=True)
class TrainingConfig:
    """The rounds. `max_examples` is a public cap per client and epoch.

    `clients_per_bucket` bounds memory; it is rounded up to a multiple of the devices.
    `chunk` is the number of clients vmapped together; null takes the measured default of the
    backend.
    """

    rounds: int
    clients_per_round: int
    batch_size: int = 8
    max_examples: int = 64
    epochs: int = 1
    client: OptimizerConfig = OptimizerConfig(learning_rate=0.5)
    server: OptimizerConfig = OptimizerConfig(name="nesterov", learning_rate=1.0)
    clients_per_bucket: int = 64
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "clients_per_round", "batch_size", "max_examples", "epochs"):
            checks.positive_int(f"training.{name}", getattr(self, name))
        checks.positive_int("training.clients_per_bucket", self.clients_per_bucket)
        if self.chunk is not None:
            checks.positive_int("training.chunk", self.chunk)


@dataclass(frozen=True)
class EvaluationConfig:
    """Metrics on other clients than those who train, declared public: else they would cost privacy.

    The validation clients are scored during the rounds, the test clients once, at the end.

    Attributes:
      every: rounds between two evaluations; 0 evaluates nothing.
      declared_public: the user's statement that the valid and test clients are public.
      max_examples: at most this many examples of either are used.
      sentences: sentences generated at each evaluation of a language model.
    """

    every: int = 10
    declared_public: bool = False
    max_examples: int = 2_000
    sentences: int = 5

    def __post_init__(self) -> None:
        checks.non_negative_int("evaluation.every", self.every)
        checks.positive_int("evaluation.max_examples", self.max_examples)
        checks.non_negative_int("evaluation.sentences", self.sentences)
        if self.every and not self.declared_public:
            raise InputError(
                "evaluation.every is set, and validation clients are as private as the others: set "
                "evaluation.declared_public: true if they are public, or evaluation.every: 0"
            )


@dataclass(frozen=True)
class RunConfig:
    """How the run is carried out; none of it changes what is learned.

    Attributes:
      seed: of the model's start; noise, cohorts and shuffles never follow it.
      checkpoint_every: rounds between two checkpoints; the last two are kept.
      devices: virtual CPU devices on the clients axis; null means one per core.
      reproducible_noise: draws the noise from `seed`: for tests only, NOT private.
      also_without_privacy: trains the same run again without privacy, for the table.
    """

    seed: int = 0
    checkpoint_every: int = 10
    devices: int | None = None
    reproducible_noise: bool = False
    also_without_privacy: bool = False

    def __post_init__(self) -> None:
        checks.non_negative_int("run.seed", self.seed)
        checks.positive_int("run.checkpoint_every", self.checkpoint_every)
        if self.devices is not None:
            checks.positive_int("run.devices", self.devices)


@dataclass(frozen=True)
class PrefinetuneConfig:
    """Central training on a public corpus, before the first private round; costs no privacy.

    The corpus is FreD's winner, or `data.public` where there is no `fred` section. Minibatch SGD
    with momentum. The learning rate is chosen by a random search: every trial trains for one
    epoch, the best of them goes on. Trials and epochs are chosen by the loss on a PUBLIC part of
    the corpus that is held out.

    Attributes:
      examples: drawn from the corpus at random, as many for every candidate; a mixture draws its
        shares.
      valid: the fraction of them that is held out.
      epochs: of the chosen trial; the parameters after the best one are kept.
      trials: learning rates, drawn log-uniformly between the two of `learning_rates`.
      other_candidates: also carries the candidates that FreD did not choose through prefinetuning
        and private training, to show whether FreD's order predicts theirs. These runs are
        SIMULATION, outside the pipeline's privacy cost, each on a ledger of its own: a deployment
        cannot have them.
    """

    examples: int = 5_000
    valid: float = 0.1
    epochs: int = 3
    batch_size: int = 16
    momentum: float = 0.9
    trials: int = 3
    learning_rates: tuple[float, float] = (0.03, 1.0)
    other_candidates: bool = False

    def __post_init__(self) -> None:
        for name in ("examples", "epochs", "batch_size", "trials"):
            checks.positive_int(f"prefinetune.{name}", getattr(self, name))
        for name in ("valid", "momentum"):
            checks.open_fraction(f"prefinetune.{name}", getattr(self, name))
        if not 1 <= round(self.valid * self.examples) < self.examples:
            raise InputError(
                f"prefinetune.valid = {self.valid:g} of prefinetune.examples = {self.examples} "
                "must leave at least one example on both sides"
            )
        low, high = self.learning_rates
        checks.positive("prefinetune.learning_rates", low)
        if not low <= high:
            raise InputError(
                f"prefinetune.learning_rates must be [low, high], found [{low:g}, {high:g}]"
            )


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


def refuse_second_run(run: RunConfig) -> None:
    if run.also_without_privacy:
        raise InputError("run.also_without_privacy is not for studies: set privacy.private: false")


def check_release(name: str, privacy: PrivacyConfig, *, worlds: bool) -> None:
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


def check_scaled_up(scaled_up: ScaledUpConfig | None, privacy: PrivacyConfig) -> None:
    if scaled_up is not None and not privacy.private:
        raise InputError("privacy.private is false, so scaled_up must be absent")
