"""What an experiment is: frozen dataclasses (`config_file` reads and writes them).

Every field here is PUBLIC: it is written to the run directory and shown in the report. Client data,
keys and anything computed from them never become fields.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    sampling: Literal["poisson", "fixed", "epochs"] = "poisson"
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
class FredConfig:
    """Which public corpus to prefinetune on, chosen by the private Frechet distance (FreD).

    Attributes:
      candidates: name -> public source ("split:public" among them), or name -> shares of other
        candidates, a mixture: `{near: ..., far: ..., "70%": {near: 0.7, far: 0.3}}`. Sources that
        are parts of a mixture are candidates too.
      epsilon: what FreD's own release costs, of the total `privacy.epsilon`; required by a
        private run.
      delta: at which `epsilon` is meant; null means `privacy.delta`.
      embedder: see `jaxpfl.text.embed.embedder`.
      clip_norm: L2 bound of an embedding, for clients and candidates alike.
      max_examples: so many examples of a client, drawn at random, are used.
      max_candidate_examples: so many examples of a candidate, drawn at random, are used.
    """

    candidates: dict[str, str | dict[str, float]]
    epsilon: float | None = None
    delta: float | None = None
    embedder: str = "hashed"
    clip_norm: float = 1.0
    max_examples: int = 16
    max_candidate_examples: int = 20_000

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip_norm"):
            if getattr(self, name) is not None:
                checks.positive(f"fred.{name}", getattr(self, name))
        if self.delta is not None:
            checks.open_fraction("fred.delta", self.delta)
        for name in ("max_examples", "max_candidate_examples"):
            checks.positive_int(f"fred.{name}", getattr(self, name))
        if len(self.candidates) < 2:
            raise InputError(
                f"fred.candidates must be at least two, found {len(self.candidates)}: with one "
                "there is nothing to choose; prefinetune alone uses data.public"
            )
        for name, given in self.candidates.items():
            if isinstance(given, Mapping):
                self._check_mixture(name, given)

    @property
    def sources(self) -> dict[str, str]:
        """The candidates that are sources, by name."""
        return {name: given for name, given in self.candidates.items() if isinstance(given, str)}

    def shares(self, name: str) -> dict[str, float]:
        """What a candidate is made of: shares of sources, which sum to 1."""
        given = self.candidates[name]
        return {name: 1.0} if isinstance(given, str) else dict(given)

    def _check_mixture(self, name: str, shares: Mapping[str, float]) -> None:
        key = f"fred.candidates.{name}"
        for part, share in shares.items():
            if part not in self.sources:
                raise InputError(
                    f"{key} is a mixture of {part!r}, which is no candidate with a source of its "
                    f"own; those are: {', '.join(map(repr, self.sources)) or 'none'}"
                )
            checks.non_negative(f"{key}.{part}", share)
        total = math.fsum(shares.values())
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise InputError(f"the shares of {key} must sum to 1, found {total:g}")


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
class Config:
    """One experiment."""

    data: DataConfig
    model: LanguageModelConfig | ImageModelConfig
    privacy: PrivacyConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)
    fred: FredConfig | None = None
    prefinetune: PrefinetuneConfig | None = None

    def __post_init__(self) -> None:
        language = isinstance(self.model, LanguageModelConfig)
        if language and self.data.public is None and self.fred is None:
            raise InputError(
                "data.public is required by a language model, found none: its vocabulary must "
                "come from a public corpus"
            )
        if self.run.also_without_privacy and not self.privacy.private:
            raise InputError("run.also_without_privacy makes no sense with privacy.private: false")
        self._check_stages()
        public = [self.data.public, *(self.fred.sources.values() if self.fred else ())]
        if PUBLIC_PART in public and not self.data.split.public:
            raise InputError(f"data.split.public must be positive where {PUBLIC_PART!r} is used")

    def _check_stages(self) -> None:
        """Refuses combinations of `fred` and `prefinetune` that mean nothing."""
        fred, prefinetune = self.fred, self.prefinetune
        if prefinetune is not None and fred is None:
            if self.data.public is None:
                raise InputError("prefinetune needs a fred section or data.public, found neither")
            if prefinetune.other_candidates:
                raise InputError(
                    "prefinetune.other_candidates needs a fred section: without one there are none"
                )
        others = prefinetune is not None and prefinetune.other_candidates
        if others and not self.evaluation.declared_public:
            raise InputError(
                "prefinetune.other_candidates needs evaluation.declared_public: true: these runs "
                "are there to be scored on public test clients"
            )
        if fred is None:
            return
        if prefinetune is None:
            raise InputError(
                "fred needs a prefinetune section: without it the choice is paid for and not used"
            )
        if not self.privacy.private and (fred.epsilon is not None or fred.delta is not None):
            raise InputError("privacy.private is false, so fred.epsilon and delta must be absent")
        if self.privacy.private and fred.epsilon is None:
            raise InputError("fred.epsilon is required by a private run, found none")
        total = self.privacy.epsilon
        if total is not None and fred.epsilon is not None and not fred.epsilon < total:
            raise InputError(
                f"fred.epsilon must be below privacy.epsilon = {total:g}, the total of all "
                f"stages, found {fred.epsilon:g}"
            )
        if self.privacy.sampling == "fixed":
            raise InputError(
                "fred needs privacy.sampling: poisson or epochs: its release and the rounds must "
                f"share an adjacency (add or remove one client), found {self.privacy.sampling!r}"
            )
