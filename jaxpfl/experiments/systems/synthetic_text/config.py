"""What a study of synthetic text is: public models, private clients, and the method between them.

As in `config`, every field is PUBLIC.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxpfl import checks
from jaxpfl.data.open import place
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import (
    DataConfig,
    EvaluationConfig,
    PrivacyConfig,
    RunConfig,
    TrainingConfig,
)

METHODS = ("public", "generator", "fed_avg", "private_evolution", "pe_sft", "popri")
SCORING = ("private_evolution", "pe_sft", "popri")
"""Methods in which clients score texts."""
EVOLVING = ("private_evolution", "pe_sft")
"""Methods that make variations of the texts that clients voted for."""


@dataclass(frozen=True)
class FitConfig:
    """Central training by AdamW with a cosine schedule (`experiments.central.adamw.Training`)."""

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.001
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            checks.positive_int(name, getattr(self, name))
        checks.positive("learning_rate", self.learning_rate)
        checks.non_negative("weight_decay", self.weight_decay)


@dataclass(frozen=True)
class DecoderModelConfig:
    """A decoder and its pretraining on public corpora.

    Attributes:
      architecture: "gpt2" or "llama".
      sequence_length: tokens of a pretraining row.
      corpora: names of `corpora` that it is pretrained on; none: all.
      pretraining: of the public checkpoint.
    """

    architecture: Literal["gpt2", "llama"] = "llama"
    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    inner_size: int = 512
    sequence_length: int = 128
    corpora: tuple[str, ...] | None = None
    pretraining: FitConfig = FitConfig(learning_rate=0.003, weight_decay=0.1)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "inner_size", "sequence_length"):
            checks.positive_int(name, getattr(self, name))
        if self.hidden_size % self.heads:
            raise InputError(
                f"hidden_size must be a multiple of heads = {self.heads}, found {self.hidden_size}"
            )


@dataclass(frozen=True)
class CorpusConfig:
    """The synthetic corpus and what is done with it.

    Attributes:
      texts: so many are asked for; empty ones are left out.
      tokens: of a text, at most; also of the clients' texts in training and evaluation.
      spans: a client's texts, joined by newlines, are cut into successive spans of `tokens` tokens
        first, and each span is an example, as in LargeFedBench; synthetic texts in the format
        "lines" then go on through newlines until they are as long.
      fine_tuning: of the downstream model on them.
    """

    texts: int = 4_000
    tokens: int = 32
    spans: bool = False
    fine_tuning: FitConfig = FitConfig(epochs=3, learning_rate=0.001)

    def __post_init__(self) -> None:
        checks.positive_int("corpus.texts", self.texts)
        checks.positive_int("corpus.tokens", self.tokens)


@dataclass(frozen=True)
class PopriConfig:
    """See `algorithms.popri.PopriSettings` and `text.preference.optimisation.PreferenceSettings`.

    Attributes:
      score: see `algorithms.candidate_scores`.
      format: of prompts, "popri" (for models that follow instructions) or "lines".
      samples: corpora that prompts are made of; none: all.
    """

    prompts: int = 100
    responses: int = 10
    rejected_rank: int = 5
    score: Literal["cosine", "zscore", "per_prompt", "nn_histogram"] = "per_prompt"
    format: Literal["popri", "lines"] = "lines"
    shots: int = 3
    samples: tuple[str, ...] | None = None
    temperature: float = 1.0
    loss: Literal["dpo", "ipo"] = "dpo"
    tau: float = 0.1
    epochs: int = 2
    batch_size: int = 25
    learning_rate: float = 0.001
    rank: int = 4
    alpha: float = 8.0

    def __post_init__(self) -> None:
        for name in ("prompts", "responses", "shots", "epochs", "batch_size", "rank"):
            checks.positive_int(f"popri.{name}", getattr(self, name))
        for name in ("tau", "learning_rate", "alpha"):
            checks.positive(f"popri.{name}", getattr(self, name))
        checks.non_negative("popri.temperature", self.temperature)
        if not 2 <= self.rejected_rank <= self.responses:
            raise InputError(
                f"popri.rejected_rank must lie in 2 .. popri.responses = {self.responses}, found "
                f"{self.rejected_rank}"
            )


@dataclass(frozen=True)
class EvolutionConfig:
    """See `algorithms.private_evolution.EvolutionSettings`.

    Attributes:
      max_texts: a client votes with at most so many texts a round, and that is the clip norm.
      variation: by the generator, which continues a text's beginning ("continue"), or by a masked
        language model, which draws some of its tokens anew ("mask_and_fill", as PrE-Text does).
      kept: share of a text that its continuation keeps.
      fill_model: the masked language model, a folder or a name on the Hugging Face hub, see
        `text.generation.variation.mask_and_fill`; only of "mask_and_fill".
      fine_tuning: of the generator's adapters on the selected texts, in `pe_sft`.
    """

    form: Literal["pre_text", "aug_pe"] = "aug_pe"
    population: int = 1_000
    threshold: float = 0.0
    lookahead: int = 4
    variations: int = 3
    max_texts: int = 8
    variation: Literal["continue", "mask_and_fill"] = "continue"
    kept: float = 0.5
    fill_model: str | None = None
    fine_tuning: FitConfig = FitConfig(epochs=3, learning_rate=0.001)

    def __post_init__(self) -> None:
        for name in ("population", "variations", "max_texts"):
            checks.positive_int(f"evolution.{name}", getattr(self, name))
        checks.non_negative("evolution.threshold", self.threshold)
        checks.non_negative_int("evolution.lookahead", self.lookahead)
        checks.open_fraction("evolution.kept", self.kept)
        checks.one_of("evolution.variation", self.variation, ("continue", "mask_and_fill"))
        if self.variation == "mask_and_fill" and not self.fill_model:
            raise InputError(
                "evolution.fill_model must name a masked language model: evolution.variation = "
                "'mask_and_fill' needs one, found none"
            )
        if self.variation != "mask_and_fill" and self.fill_model is not None:
            raise InputError(
                "evolution.fill_model is only for evolution.variation = 'mask_and_fill', found "
                f"{self.variation!r}"
            )


@dataclass(frozen=True)
class SyntheticTextConfig:
    """One method that brings private clients' text and a public model together.

    | method            | what clients send        | what trains the downstream model           |
    |-------------------|--------------------------|--------------------------------------------|
    | public            | nothing                  | nothing: the public checkpoint              |
    | generator         | nothing                  | texts of the untuned generator              |
    | fed_avg           | model changes            | the clients, in rounds (DP-FTRL: with       |
    |                   |                          | `privacy.sampling: epochs` and its noise)   |
    | private_evolution | votes for nearest texts  | texts like those voted for                  |
    | pe_sft            | the same                 | texts of the generator, tuned on those      |
    | popri             | scores of texts          | texts of the generator, tuned by preference |

    Attributes:
      corpora: name -> public source of texts.
      corpus_texts: so many of a corpus are used, of each document the same share.
      vocab_size: of the byte-level BPE that is learned from all of them.
      training: rounds and cohorts of every method; `max_examples` of a client's texts, the same
        ones all along, take part in its scores and votes. The rest of it is `fed_avg`'s.
      cache: folder where public models are kept, named by a hash of all that they follow from.
    """

    study: Literal["synthetic_text"]
    method: Literal["public", "generator", "fed_avg", "private_evolution", "pe_sft", "popri"]
    data: DataConfig
    corpora: dict[str, str]
    privacy: PrivacyConfig
    training: TrainingConfig
    corpus_texts: int = 60_000
    vocab_size: int = 2_048
    generator: DecoderModelConfig = DecoderModelConfig()
    downstream: DecoderModelConfig = DecoderModelConfig(
        architecture="gpt2",
        hidden_size=128,
        layers=3,
        heads=4,
        inner_size=512,
        sequence_length=64,
    )
    corpus: CorpusConfig = CorpusConfig()
    embedder: str = "minilm"
    popri: PopriConfig = PopriConfig()
    evolution: EvolutionConfig = EvolutionConfig()
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cache: str = "runs/public_models"
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        checks.positive_int("corpus_texts", self.corpus_texts)
        if not checks.positive_int("vocab_size", self.vocab_size) > 256:
            raise InputError(f"vocab_size must be above 256, found {self.vocab_size}")
        if self.run.also_without_privacy:
            raise InputError(
                "run.also_without_privacy is not for studies: set privacy.private: false"
            )
        if not self.evaluation.declared_public:
            raise InputError(
                "evaluation.declared_public must be true: the study compares methods on held-out "
                "clients, which costs nothing only if these are declared public"
            )
        if not self.corpora:
            raise InputError("corpora must name at least one public source, found none")
        needed = ("test",) if self.method in ("public", "fed_avg") else ("test", "valid")
        for name in needed:
            if not getattr(self.data.split, name):
                raise InputError(
                    f"data.split.{name} must be positive: method {self.method!r} is measured on "
                    "these clients, found 0"
                )
        self._check_evolution()
        for name, source in self.corpora.items():
            if place(source) == place(self.data.source):
                raise InputError(
                    f"corpora.{name} is data.source: what private clients hold is no public corpus"
                )
        for owner, names in (
            ("generator.corpora", self.generator.corpora),
            ("downstream.corpora", self.downstream.corpora),
            ("popri.samples", self.popri.samples),
        ):
            for name in names or ():
                if name not in self.corpora:
                    known = ", ".join(map(repr, self.corpora))
                    raise InputError(f"{owner} must be among {known}, found {name!r}")
        self._check_privacy()

    def ledger_path(self, directory: Path) -> Path:
        """The file that the study in `directory` charges."""
        path = self.privacy.ledger
        return directory / "ledger.jsonl" if path is None else Path(path)

    def _check_evolution(self) -> None:
        """What would otherwise be refused after clients were asked."""
        if self.method not in EVOLVING:
            return
        evolution = self.evolution
        selected = evolution.population
        if evolution.form == "aug_pe":
            each = 1 + evolution.variations
            if evolution.population % each:
                raise InputError(
                    f"evolution.population must be a multiple of 1 + evolution.variations = {each} "
                    f"in 'aug_pe', found {evolution.population}"
                )
            selected //= each
        if selected < self.popri.shots:
            raise InputError(
                f"evolution selects {selected} texts a round, too few for prompts of popri.shots = "
                f"{self.popri.shots}: choose a larger evolution.population"
            )

    def _check_privacy(self) -> None:
        privacy = self.privacy
        if privacy.sampling == "epochs" and self.method in SCORING:
            raise InputError(
                f"privacy.sampling must be 'poisson' or 'fixed' for method {self.method!r}, which "
                "draws a new cohort for every release, found 'epochs'"
            )
        if privacy.adaptive and self.method in SCORING:
            raise InputError(
                f"privacy.adaptive is not for method {self.method!r}: scores have one clip norm"
            )
        if privacy.noise != "independent" and self.method != "fed_avg":
            raise InputError(
                f"privacy.noise = {privacy.noise!r} is for method 'fed_avg': what is added up over "
                f"rounds there, {self.method!r} does not add up"
            )
