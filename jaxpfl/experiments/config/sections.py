"""The sections that configs of several systems share, as frozen dataclasses (see `reader`).

Every field is PUBLIC: it is written to the run directory and shown in the report.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from jaxpfl.checked import Checked, NonNegative, NonNegativeInt, OpenFraction, Positive, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.published import MultiLabelConfig
from jaxpfl.models.base import OOV
from jaxpfl.models.classifiers import CNN, MLP
from jaxpfl.models.recurrent import CIFGLanguageModel, LSTMLanguageModel
from jaxpfl.models.resnet import ResNet
from jaxpfl.privacy.accounting import Accountant
from jaxpfl.privacy.gaussian import NoiseKind, Trust
from jaxpfl.privacy.participation import Sampling
from jaxpfl.privacy.strategies import BufferedToeplitz
from jaxpfl.text.tokenisers.characters import VOCAB_SIZE

WRITTEN = "written"
"""The corpus of what a model wrote after looking at a release; no public corpus has its name."""
PUBLIC_PART = "split:public"
"""The public source that stands for the clients that `data.split.public` declares public."""


@dataclass(frozen=True)
class SplitConfig(Checked):
    """Fractions of the CLIENTS, not of the examples, that train, validate and test.

    The clients of the fraction `public` are declared public. They serve as a public corpus, with
    the source name "split:public", and for nothing else. Clients of no fraction are not used.
    """

    train: Positive = 0.8
    valid: NonNegative = 0.1
    test: NonNegative = 0.1
    public: NonNegative = 0.0

    def check_fields(self) -> None:
        total = self.train + self.valid + self.test + self.public
        if total > 1 + 1e-9:
            raise InputError(f"data.split must sum to 1, or to less, found {total:g}")


@dataclass(frozen=True)
class DataConfig(Checked):
    """The private clients, and the public corpus that a language model's vocabulary comes from.

    With `?min_examples=N` in `source`, clients with fewer keep their place but lose their examples:
    the population's size is published, and must not depend on client data.

    Attributes:
      clients: how many clients `source` has, for a dry run, which does not read them; a run counts
        them itself. None: a dry run assumes a number, and says so.
      public: None takes the vocabulary from `vocabulary`, or from `fred.candidates`, which are
        public, too.
      vocabulary: a PUBLIC list of words in place of those of `public`, see
        `text.tokenisers.public_words`: a folder with tokens, a vocabulary file, or TensorFlow
        Federated's word counts. Required where `source` holds tokens.
      remove: a regular expression, whose matches are deleted from each text of `source`.
    """

    source: str
    clients: PositiveInt | None = None
    public: str | None = None
    vocabulary: str | None = None
    remove: str | None = None
    split: SplitConfig = SplitConfig()
    split_seed: NonNegativeInt = 0

    def check_fields(self) -> None:
        try:
            re.compile(self.remove or "")
        except (re.error, OverflowError, RecursionError) as error:
            reason = f"found {self.remove!r}: {error}"
            raise InputError(f"data.remove must be a regular expression, {reason}") from None


@dataclass(frozen=True)
class LanguageModelConfig(CIFGLanguageModel):
    """`models.CIFGLanguageModel` on words; `vocab_size` includes the four special tokens.

    Attributes:
      sequence_length: a client's sentence is cut to this many tokens.
      unigram_prior: initialises the output bias to the public corpus's log word frequencies.
    """

    name: Literal["cifg_lm"] = "cifg_lm"
    vocab_size: PositiveInt = 4_000
    output_bias_prior: tuple[float, ...] | None = field(default=None, init=False)
    oov: int | None = field(default=OOV, init=False)
    sequence_length: PositiveInt = 20
    unigram_prior: bool = False


@dataclass(frozen=True)
class CharacterModelConfig(LSTMLanguageModel):
    """`models.LSTMLanguageModel` on characters: Shakespeare of Reddi et al. 2021, appendix C.

    The vocabulary of 90 ids is fixed (`text.tokenisers.characters`), so that no public corpus is
    needed. A text becomes as many examples of `sequence_length` characters as it fills.
    """

    name: Literal["character_lstm"] = "character_lstm"
    vocab_size: PositiveInt = field(default=VOCAB_SIZE, init=False)
    sequence_length: PositiveInt = 80


ModelConfig = LanguageModelConfig | CharacterModelConfig | CNN | ResNet | MLP | MultiLabelConfig
"""A model is its own section: its settings are not read from the data, which is private."""


@dataclass(frozen=True)
class PrivacyConfig(Checked):
    """Exactly one of `epsilon`, `noise_multiplier`, or `private: false`.

    Attributes:
      private: false trains without privacy; every artifact of the run says so.
      epsilon: of ALL releases of the run, including FreD's. The noise multiplier of the rounds is
        calibrated so that the composition meets it.
      noise_multiplier: standard deviation of each round's noise / sensitivity of the sum.
      clip_norm: L2 bound of one client's update; under adaptive clipping, the initial bound.
      adaptive: private quantile clipping (Andrew et al. 2021), at `target_quantile`.
      sampling: which clients take part in a round, see `privacy.participation`.
      separation: a client takes part at most once in so many rounds, with `sampling:
        min_separation` or `cyclic_poisson`.
      at_most: clients of a cohort, with `sampling: truncated_poisson`.
      noise: "exact" is drawn and added in whole numbers (`privacy.exact_noise`); "banded" is
        DP-FTRL's, correlated between rounds, and needs `sampling: cyclic` or `min_separation`;
        "exact_banded" is both; "blt" and "tree" need `min_separation`.
      trust: who adds the noise: "central", the server, or "local", each client to its own update,
        which costs far more (`privacy.local_trust`).
      blt: the coefficients of `noise: blt`; None finds them, and they are written with the run.
      accountant: None takes PLD where it supports the mechanism, else RDP.
      ledger: the file to charge; None means `ledger.jsonl` in the run directory. Runs on one
        population that share a budget name the same file.
      budget_epsilon: hard limit of the whole ledger at `delta`; None means that of the ledger's
        first run, or `epsilon` for the first.
    """

    private: bool = True
    epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    delta: OpenFraction | None = None
    clip_norm: Positive = 0.3
    adaptive: bool = False
    target_quantile: OpenFraction = 0.5
    sampling: Sampling = "poisson"
    separation: PositiveInt | None = None
    at_most: PositiveInt | None = None
    noise: NoiseKind = "independent"
    blt: BufferedToeplitz | None = None
    trust: Trust = "central"
    accountant: Accountant | None = None
    ledger: str | None = None
    budget_epsilon: Positive | None = None

    def check_fields(self) -> None:
        given = [n for n in ("epsilon", "noise_multiplier") if getattr(self, n) is not None]
        if not self.private:
            if given or self.delta is not None or self.budget_epsilon is not None:
                absent = "privacy.epsilon, noise_multiplier, delta and budget_epsilon"
                raise InputError(f"privacy.private is false, so {absent} must be absent")
            return
        if len(given) != 1:
            one = "exactly one of epsilon, noise_multiplier or private: false"
            raise InputError(f"privacy needs {one}, found {' and '.join(given) or 'none'}")
        if self.delta is None:
            raise InputError("privacy.delta is required by a private run, found none")


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """See `federated.clients.optimizers`; only `momentum` and `nesterov` use `momentum`."""

    name: Literal["sgd", "momentum", "nesterov", "adam", "yogi"] = "sgd"
    learning_rate: Positive = 1.0
    momentum: OpenFraction = 0.9


@dataclass(frozen=True)
class FedAvgConfig(Checked):
    """FedAvg, or FedNova, whose clients divide their update by their number of steps."""

    name: Literal["fed_avg", "fed_nova"] = "fed_avg"


@dataclass(frozen=True)
class ProximalConfig(Checked):
    """FedProx and Ditto; `mu`: how strongly a client's model is pulled to the shared one."""

    name: Literal["fed_prox", "ditto"]
    mu: Positive


@dataclass(frozen=True)
class ApflConfig(Checked):
    """APFL; `mix` is the weight of a client's own model."""

    name: Literal["apfl"]
    mix: OpenFraction


@dataclass(frozen=True)
class AdaFedProxConfig(Checked):
    """AdaFedProx; `rise_clip` bounds the rise of a client's mean loss."""

    name: Literal["ada_fed_prox"]
    rise_clip: Positive


@dataclass(frozen=True)
class ScaffoldConfig(Checked):
    """SCAFFOLD; `variate_clip` is the L2 bound on the change of a client's control variate."""

    name: Literal["scaffold"]
    variate_clip: Positive


@dataclass(frozen=True)
class FedDynConfig(Checked):
    """FedDyn; `alpha` is the strength of its regularisation."""

    name: Literal["fed_dyn"]
    alpha: Positive


@dataclass(frozen=True)
class FedBuffConfig(Checked):
    """FedBuff; a client trains a model that is at most `longest_delay` rounds old."""

    name: Literal["fed_buff"]
    longest_delay: PositiveInt


ConstantRateConfig = AdaFedProxConfig | ScaffoldConfig | FedDynConfig | FedBuffConfig
"""Algorithms for which the clients' learning rate must be the same in all rounds."""

AlgorithmConfig = FedAvgConfig | ProximalConfig | ApflConfig | ConstantRateConfig
"""What clients do differently from FedAvg, see docs/algorithms.md."""


@dataclass(frozen=True)
class TrainingConfig(Checked):
    """The rounds.

    Attributes:
      schedule: of the clients' learning rate over the rounds, from `client.learning_rate` to 0.
      max_examples: examples of one client that an epoch uses at most.
      clients_per_bucket: bounds memory; rounded up to a multiple of the number of devices. None
        takes 64, or more where the devices need more to be busy.
      chunk: clients that are vmapped together; None takes the backend's measured default.
      model_devices: devices that share one copy of the model, for models that one cannot hold; of
        synthetic text, of the generator.
    """

    rounds: PositiveInt
    clients_per_round: PositiveInt
    batch_size: PositiveInt = 8
    max_examples: PositiveInt = 64
    epochs: PositiveInt = 1
    client: OptimizerConfig = OptimizerConfig(learning_rate=0.5)
    server: OptimizerConfig = OptimizerConfig(name="nesterov", learning_rate=1.0)
    algorithm: AlgorithmConfig = FedAvgConfig()
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    clients_per_bucket: PositiveInt | None = None
    chunk: PositiveInt | None = None
    model_devices: PositiveInt = 1

    def check_fields(self) -> None:
        name = self.algorithm.name
        needs = f"training.algorithm {name} needs training"
        if name == "scaffold" and self.client.name != "sgd":
            raise InputError(f"{needs}.client.name sgd, found {self.client.name}")
        if isinstance(self.algorithm, ConstantRateConfig) and self.schedule != "constant":
            raise InputError(f"{needs}.schedule constant, found {self.schedule}")


@dataclass(frozen=True)
class EvaluationConfig(Checked):
    """Metrics on held-out clients that are declared public: on private ones they would be releases.

    Validation clients are evaluated during the rounds, test clients once at the end.

    Attributes:
      every: rounds between two evaluations; 0 evaluates nothing.
      declared_public: the user's statement that validation and test clients are public.
      max_examples: the most examples that are used of either.
      sentences: number generated at each evaluation of a language model.
      source: a public source to evaluate on, such as a data set's own test part, in place of
        validation and test clients; `data.split.valid` and `data.split.test` must then be 0.
    """

    every: NonNegativeInt = 10
    declared_public: bool = False
    max_examples: PositiveInt = 2_000
    sentences: NonNegativeInt = 5
    source: str | None = None

    def check_fields(self) -> None:
        if self.source is not None and not self.declared_public:
            raise InputError(
                "evaluation.source must be public: state so by evaluation.declared_public"
            )
        if self.every and not self.declared_public:
            how = "evaluation.declared_public: true if they are public, or evaluation.every: 0"
            why = "evaluation.every is set, and validation clients are as private as the others"
            raise InputError(f"{why}: set {how}")

    def check_split(self, split: SplitConfig) -> None:
        """Refuses held-out clients in a split where `source` names others."""
        if self.source is not None and (split.valid or split.test):
            where = f"where evaluation.source is given, found {split.valid:g} and {split.test:g}"
            raise InputError(f"data.split.valid and data.split.test must be 0 {where}")


@dataclass(frozen=True)
class RunConfig(Checked):
    """How the run is carried out.

    Attributes:
      seed: of the model's initial parameters; noise, cohorts and shuffles do not depend on it.
      checkpoint_every: rounds between two checkpoints; the last two are kept.
      devices: virtual CPU devices of a process on the clients axis; None means one per core.
      reproducible_noise: draws the noise from `seed`: for tests only, NOT private.
    """

    seed: NonNegativeInt = 0
    checkpoint_every: PositiveInt = 10
    devices: PositiveInt | None = None
    reproducible_noise: bool = False


@dataclass(frozen=True)
class PrefinetuneConfig(Checked):
    """Central training on a public corpus, before the first private round; costs no privacy.

    The corpus is FreD's winner, or `data.public` where there is no section `fred`. Training is
    minibatch SGD with momentum; see `central.prefinetune` for how the learning rate is chosen.

    Attributes:
      examples: number drawn from the corpus at random, by its shares in a mixture.
      chosen: takes so many single examples of all candidates instead, which FreD's release chooses
        at no further cost, see `algorithms.chosen_texts`. They are cut as `fred.cut` says.
      valid: the fraction of them that is held out to choose the learning rate and the epoch.
      epochs: of the chosen trial; the parameters of the best epoch are kept.
      trials: number of learning rates, drawn log-uniformly from the range `learning_rates`.
      other_candidates: also prefinetunes and privately trains from the candidates that FreD did
        not choose, or with `chosen` from all, to show whether FreD's order predicts theirs. These
        runs are a SIMULATION, each on its own ledger and outside the stated privacy: a deployment
        cannot have them.
    """

    examples: PositiveInt = 5_000
    chosen: bool = False
    valid: OpenFraction = 0.1
    epochs: PositiveInt = 3
    batch_size: PositiveInt = 16
    momentum: OpenFraction = 0.9
    trials: PositiveInt = 3
    learning_rates: tuple[Positive, Positive] = (0.03, 1.0)
    other_candidates: bool = False

    def check_fields(self) -> None:
        if not 1 <= round(self.valid * self.examples) < self.examples:
            part = f"prefinetune.valid = {self.valid:g} of prefinetune.examples = {self.examples}"
            raise InputError(f"{part} must leave an example to hold out and one to train on")
        low, high = self.learning_rates
        if low > high:
            rates = f"[low, high], found [{low:g}, {high:g}]"
            raise InputError(f"prefinetune.learning_rates must be {rates}")


@dataclass(frozen=True)
class ScaledUpConfig(Checked):
    """A larger population on which the same noise of the MEAN costs a far smaller epsilon.

    With `factor` times the clients per round, the noise multiplier can be `factor` times as large
    at the same noise of the mean, and so at the same utility (Augenstein et al. 2020, "Privacy at
    scale"). The report shows both epsilons.
    """

    factor: Positive
    population: PositiveInt
    delta: OpenFraction


def check_study(name: str, privacy: PrivacyConfig, scaled_up: ScaledUpConfig | None) -> None:
    """Refuses what a study, a system of several releases, cannot carry out; `name` of `privacy`."""
    if privacy.epsilon is not None:
        several = "in a study, which makes several releases: give noise_multiplier, and"
        limit = "budget_epsilon as the limit of all of them"
        raise InputError(f"{name}.epsilon must be absent {several} {limit}")
    for setting, needed in (("sampling", "poisson"), ("trust", "central")):
        if (value := getattr(privacy, setting)) != needed:
            raise InputError(f"{name}.{setting} must be {needed} in a study, found {value!r}")
    if scaled_up is not None and not privacy.private:
        raise InputError(f"scaled_up must be absent where {name}.private is false")


def check_shares(name: str, shares: tuple[float, ...]) -> None:
    """Refuses shares by which no worlds can be named."""
    if not shares or len({f"{share:g}" for share in shares if share <= 1}) != len(shares):
        raise InputError(f"{name} must be different numbers in [0, 1], found {list(shares)}")


def check_world(name: str, privacy: PrivacyConfig, count: str, epsilon: float | None) -> None:
    """Refuses a ledger, which each of several worlds has, and a `count` that must be private."""
    if privacy.ledger is not None:
        raise InputError(f"{name}.ledger must be absent: each world of a study has one of its own")
    if privacy.private != (epsilon is not None):
        private = f"{count} is required where {name}.private is true, for a count is a release"
        raise InputError(f"{private}, and must be absent where it is false, found {epsilon}")
