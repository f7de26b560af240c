"""The config of a study of synthetic text: public models, private clients, and a method.

Every field is PUBLIC, as in all configs.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

from jaxpfl.algorithms.candidate_scores import ScoreKind
from jaxpfl.algorithms.popri import PopriSettings
from jaxpfl.algorithms.private_evolution import EvolutionSettings
from jaxpfl.algorithms.steering import SteeringSettings
from jaxpfl.checked import Checked, NonNegative, OpenFraction, PositiveFraction, PositiveInt
from jaxpfl.data.open import place
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.central.adamw import DecoderModelConfig, Training
from jaxpfl.experiments.config import sections
from jaxpfl.experiments.config.published import (
    PublishedGeneratorConfig,
    PublishedModelConfig,
    RemoteGeneratorConfig,
)
from jaxpfl.privacy.participation import OTHERS
from jaxpfl.privacy.simulated import LargerPopulation
from jaxpfl.text.cut import Cut

EMBEDDING, JUDGE = "embedding", "judge"
"""The columns of what clients are asked for in one look."""

DOWNSTREAM = DecoderModelConfig(
    architecture="gpt2", hidden_size=128, layers=3, heads=4, inner_size=512, sequence_length=64
)
"""The downstream model of a study that names none: a GPT-2 of 0.9 M parameters."""

_FINE_TUNING = partial(Training, epochs=3, batch_size=32, learning_rate=0.001)


@dataclass(frozen=True)
class CorpusConfig(Checked):
    """The synthetic corpus, and the training of the downstream model on it.

    Attributes:
      texts: the number of texts that the generator is asked for; empty ones are left out.
      tokens: the downstream model reads at most this many tokens of a text, in training and in
        evaluation.
      cut: the rule by which all texts are cut, see `text.cut`: those of clients of all splits, and
        of public corpora for prompts; of a generated text the first piece is used. Where the rule
        joins texts, `popri.format.stop` must not be a newline, over which pieces go on.
      pool, chosen: [public, written] and N: the corpus is N of all these, chosen by the one look.
      fine_tuning: the training of the downstream model on the synthetic corpus.
    """

    texts: PositiveInt = 4_000
    pool: tuple[Literal["public", "written"], ...] = (sections.WRITTEN,)
    chosen: PositiveInt | None = None
    tokens: PositiveInt = 32
    cut: str = "messages"
    fine_tuning: Training = field(default_factory=_FINE_TUNING)

    def check_fields(self) -> None:
        with named("corpus.cut"):
            Cut.parse(self.cut)
        if (set(self.pool) == {"public", sections.WRITTEN}) != (self.chosen is not None):
            expected = "[public, written] where corpus.chosen is given, and absent elsewhere"
            raise InputError(f"corpus.pool must be {expected}, found {list(self.pool)}")


@dataclass(frozen=True)
class TuneConfig(Checked):
    """Settings that one look chooses before the first round; None leaves one as `popri` has it.

    For every combination the untuned generator writes as many texts as in a round; the nearest to
    the release decide, by the judge's part or, without a judge, the embedder's, at no cost.

    Attributes:
      temperature, top_p: of all that the generator writes afterwards.
      samples: names of corpora; prompts are made of the chosen one alone.
    """

    temperature: tuple[NonNegative, ...] | None = None
    top_p: tuple[PositiveFraction, ...] | None = None
    samples: tuple[str, ...] | None = None

    def choices(self, popri: "PopriConfig") -> list["PopriConfig"]:
        """The settings with each combination, in the order in which they are tried."""
        samples = [(name,) for name in self.samples or ()] or [popri.samples]
        temperatures = self.temperature or [popri.temperature]
        tried = product(temperatures, self.top_p or [popri.top_p], samples)
        return [replace(popri, temperature=t, top_p=p, samples=names) for t, p, names in tried]


@dataclass(frozen=True)
class PopriConfig(PopriSettings):
    """POPri's settings, how clients score, and the public texts that prompts are made of.

    Attributes:
      clients_send: what ranks the responses to a prompt: the "scores" that a cohort gives in each
        round, as published, or "moments": ONE release of the moments of all clients' embeddings,
        for the whole `privacy.epsilon` and all rounds. This is ours, see `algorithms.one_look`; it
        has no use for `client_score` and `training.clients_per_round`.
      client_score: a client's score of a response, see `algorithms.candidate_scores`; the default,
        "per_prompt", is ours.
      samples: the names of the corpora that prompts are made of; None for all. One corpus makes
        prompts of one kind, as in the released code.
      corpus: whether prompts are made of "all" of these corpora; of the one that is "nearest" to
        the clients by FreD; or of `corpus.texts` single texts of all, "chosen" as
        `algorithms.chosen_texts` says. The release of "moments" shows both at no cost.
      checkpoint: which round's adapters write the corpus: the "last", those whose texts are
        "nearest" to the validation clients, which are declared public, by Frechet distance; or, of
        one look, those that a second embedder has "judged" to be nearest to the training clients,
        by its part of the one release.
      judge: the embedder of that judge, which no reward sees.
      judge_share: its share of the look's squared ratio of sensitivity to noise, mu^2.
      tune: settings that one look chooses before the first round; None: no setting.
      final_prompts: what the corpus's prompts are made of: the "samples", as published, or the
        "best_responses" of the last round, one of each prompt, which is ours.
    """

    clients_send: Literal["scores", "moments"] = "scores"
    client_score: ScoreKind = "per_prompt"
    samples: tuple[str, ...] | None = None
    corpus: Literal["all", "nearest", "chosen"] = "all"
    checkpoint: Literal["last", "nearest", "judged"] = "last"
    judge: str = "hashed:128"
    judge_share: OpenFraction = 0.1
    tune: TuneConfig | None = None
    final_prompts: Literal["samples", "best_responses"] = "samples"

    def check_fields(self) -> None:
        super().check_fields()
        judged, by_distance = self.checkpoint == "judged", self.corpus != "all"
        by_look = {"corpus": by_distance, "checkpoint": judged, "tune": self.tune is not None}
        for name, chosen in by_look.items():
            if chosen and self.clients_send != "moments":
                expected = "popri.clients_send 'moments', whose one look it chooses by"
                raise InputError(f"popri.{name} needs {expected}, found {self.clients_send!r}")
        if self.tune is not None:
            if by_distance and self.tune.samples:
                what = f"popri.tune.samples must be absent with popri.corpus {self.corpus!r}"
                because = "both choose what prompts are made of"
                raise InputError(f"{what}, found {list(self.tune.samples)}: {because}")
            if len(self.tune.choices(replace(self, tune=None))) < 2:
                needed = "at least two values of temperature, top_p or samples"
                raise InputError(f"popri.tune needs {needed} to choose from, found one choice")


@dataclass(frozen=True)
class EvolutionConfig(EvolutionSettings):
    """Private evolution's settings, how clients vote, and how texts are varied.

    Attributes:
      max_texts: a client votes with at most this many texts per round, which is the clip norm.
      variation: how texts are varied, see `text.generation.variation`: "fill" (PrE-Text's, which
        needs a `fill_model`), "rephrase" (Aug-PE's, which needs a generator that follows
        instructions), or a substitute: "redraw" or "continue". None: the form's own.
      fill_model: the masked language model of "fill", a folder or a name on the Hugging Face hub.
      fine_tuning: the training of the generator's adapters on the selected texts, in `pe_sft`.
    """

    max_texts: PositiveInt = 8
    variation: Literal["fill", "rephrase", "redraw", "continue"] | None = None
    fill_model: str | None = None
    fine_tuning: Training = field(default_factory=_FINE_TUNING)

    @property
    def varied_by(self) -> str:
        """`variation`, or the form's own."""
        return self.variation or ("fill" if self.form == "pre_text" else "rephrase")


@dataclass(frozen=True)
class Config(Checked):
    """One method by which a downstream model learns from private clients' text.

    | method            | what clients send        | what trains the downstream model           |
    |-------------------|--------------------------|--------------------------------------------|
    | public            | nothing                  | nothing: the public checkpoint              |
    | generator         | nothing                  | texts of the untuned generator              |
    | central           | their texts: NOT PRIVATE | their texts, as a synthetic corpus would    |
    | fed_avg           | model changes            | the clients, in rounds (DP-FTRL: with       |
    |                   |                          | `privacy.sampling: cyclic` and its noise)   |
    | private_evolution | votes for nearest texts  | texts like those voted for                  |
    | pe_sft            | the same                 | texts of the generator, tuned on those      |
    | popri             | scores of texts, or      | texts of the generator, tuned by preference |
    |                   | moments, once            | (`popri.clients_send`)                      |
    | steered           | differences of hidden    | texts of the generator, steered by their    |
    |                   | states, once             | mean (EPSVec's form, `algorithms.steering`) |

    Attributes:
      corpora: maps the name of each public corpus to its source of texts; None where nothing is
        pretrained and nothing is written, and so no prompt is needed.
      corpus_texts: the number of texts of a corpus that are used, the same share of every document.
      vocab_size: size of the byte-level BPE that is learned from all corpora, for models that are
        pretrained on them.
      generator, downstream: each is pretrained on the corpora, or is a published model. A method
        that does not tune the generator can have one behind an address (`api`), whose texts are
        never the same again.
      evaluation: with a `source`, one half of its clients serves as validation clients and the
        other as test clients.
      training: rounds and cohorts of every method. A client's scores and votes use `max_examples`
        of its texts, the same in every round. The other fields are for method `fed_avg` only.
      cache: the folder of the public models, each named by a hash of everything that it depends on.
    """

    system: Literal["synthetic_text"]
    method: Literal[
        "public",
        "generator",
        "central",
        "fed_avg",
        "private_evolution",
        "pe_sft",
        "popri",
        "steered",
    ]
    data: sections.DataConfig
    corpora: dict[str, str] | None = field(default=None, kw_only=True)
    privacy: sections.PrivacyConfig
    training: sections.TrainingConfig
    corpus_texts: PositiveInt = 60_000
    vocab_size: PositiveInt = 2_048
    generator: DecoderModelConfig | PublishedGeneratorConfig | RemoteGeneratorConfig = field(
        default_factory=DecoderModelConfig
    )
    downstream: DecoderModelConfig | PublishedModelConfig = DOWNSTREAM
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    embedder: str = "minilm"
    popri: PopriConfig = field(default_factory=PopriConfig)
    evolution: EvolutionConfig = field(default_factory=EvolutionConfig)
    steering: SteeringSettings = field(default_factory=SteeringSettings)
    evaluation: sections.EvaluationConfig = field(default_factory=sections.EvaluationConfig)
    cache: str = "runs/public_models"
    run: sections.RunConfig = field(default_factory=sections.RunConfig)
    simulated: LargerPopulation | None = None

    def check_fields(self) -> None:
        if not self.vocab_size > 256:
            raise InputError(f"vocab_size must be above 256, found {self.vocab_size}")
        self.evaluation.check_split(self.data.split)
        if not self.evaluation.declared_public:
            because = "held-out clients, on whom methods are compared, cost nothing only if public"
            raise InputError(f"evaluation.declared_public must be true, found false: {because}")
        if self.popri.checkpoint == "judged" and self.popri.judge == self.embedder:
            seen = f"{self.embedder!r}, which the rewards see"
            because = "tuning raises what they see, whether texts improve or not"
            raise InputError(f"popri.judge must be another embedder than {seen}: {because}")
        self._check_corpora()
        if self.corpus.chosen is not None and not self.one_look:
            expected = "the clients' moments: method 'popri' with popri.clients_send 'moments'"
            raise InputError(f"corpus.chosen needs {expected}, found method {self.method!r}")
        for name in ("test", "valid") if self.writes else ("test",):
            if self.evaluation.source is None and not getattr(self.data.split, name):
                expected = f"positive with method {self.method!r}, which is measured on it"
                raise InputError(f"data.split.{name} must be {expected}, found 0")
        if self.evolves:
            self._check_evolution()
        if self.remote is not None and self.method in ("pe_sft", "popri", "steered"):
            method = f"method {self.method!r}, which changes the generator's weights"
            raise InputError(f"generator.api must be absent with {method}, found one")
        stop, cut = self.popri.format.stop, Cut.parse(self.corpus.cut)
        if self.writes and cut.size and stop and not stop.strip():
            cuts = f"corpus.cut '{cut}', whose pieces go on over the ends of lines"
            because = "texts would end at the first one"
            raise InputError(f"popri.format.stop must be '' with {cuts}, found {stop!r}: {because}")
        self._check_privacy()
        if self.method == "central" and (self.privacy.private or self.privacy.ledger is not None):
            where = "with method 'central', which no ledger accounts for"
            because = "it trains on the clients' own texts"
            what = "privacy.private must be false, and privacy.ledger absent"
            raise InputError(f"{what}, {where}: {because}")
        sends = self.method not in ("public", "generator") and self.privacy.private
        if self.simulated is not None and not sends:
            where = "without privacy, and with public and generator, whose clients send nothing"
            raise InputError(f"simulated must be absent {where}, found method {self.method!r}")

    def _check_evolution(self) -> None:
        """Refuses too few texts, and a variation that cannot be made."""
        selected, shots = self.evolution.selected, self.popri.format.shots
        if selected < shots:
            least = f"{shots}, a prompt's (popri.format.shots): raise evolution.population"
            raise InputError(f"evolution selects {selected} texts, expected at least {least}")
        variation, lacks = self.evolution.varied_by, ""
        if variation == "fill" and self.evolution.fill_model is None:
            lacks = "needs evolution.fill_model, a masked language model: name one, or choose"
            lacks += " 'redraw', a substitute"
        if variation == "redraw" and self.remote is not None:
            lacks = "needs the generator's weights: choose 'rephrase'"
        if variation == "rephrase" and isinstance(self.generator, DecoderModelConfig):
            lacks = "needs a generator that follows instructions: choose 'continue', a substitute"
        if lacks:
            raise InputError(f"evolution.variation is {variation!r}, which {lacks}")

    metrics: ClassVar[set[str]] = {"loss", "perplexity", "accuracy", "count", "epsilon"}
    metrics |= {"public_accuracy", "public_perplexity"}

    @property
    def evolves(self) -> bool:
        """Whether texts that clients voted for are varied."""
        return self.method in ("private_evolution", "pe_sft")

    @property
    def asks(self) -> bool:
        """Whether the texts follow from what clients answered."""
        return self.evolves or self.method in ("popri", "steered")

    @property
    def writes(self) -> bool:
        """Whether the method writes a synthetic corpus."""
        return self.asks or self.method == "generator"

    @property
    def one_look(self) -> bool:
        """Whether clients are asked once, for the moments that all rewards follow from."""
        return self.method == "popri" and self.popri.clients_send == "moments"

    @property
    def embedders(self) -> dict[str, str]:
        """The name of the embedder of each column that the look reads."""
        judge = {JUDGE: self.popri.judge} if self.popri.checkpoint == "judged" else {}
        return {EMBEDDING: self.embedder, **judge}

    @property
    def asks_once(self) -> bool:
        """Whether one release of all clients is all that they send."""
        return self.one_look or self.method == "steered"

    @property
    def algorithm(self) -> str:
        """Names the method's entries in the ledger."""
        return "one look" if self.one_look else self.method

    @property
    def models(self) -> dict[str, DecoderModelConfig | PublishedModelConfig]:
        """The sections of the models that the method computes with, by name."""
        models = {"downstream": self.downstream}
        if self.writes and not isinstance(self.generator, RemoteGeneratorConfig):
            models["generator"] = self.generator
        return models

    @property
    def remote(self) -> RemoteGeneratorConfig | None:
        """The generator that the method asks behind an address, if it does."""
        generator = self.generator if self.writes else None
        return generator if isinstance(generator, RemoteGeneratorConfig) else None

    @property
    def client_privacy(self) -> sections.PrivacyConfig:
        """The section `privacy`, with the clip norm of what clients send in the method."""
        if self.evolves:
            # The L2 norm of a client's votes is largest if all votes are for one text.
            return replace(self.privacy, clip_norm=float(self.evolution.max_texts))
        return replace(self.privacy, clip_norm=1.0) if self.method == "popri" else self.privacy

    @property
    def client_score(self) -> ScoreKind:
        """How clients score texts: those that evolve are voted for."""
        return "nn_histogram" if self.evolves else self.popri.client_score

    @property
    def candidates(self) -> tuple[int, int]:
        """The prompts of a round and the texts of each that clients score."""
        if self.evolves:
            return self.evolution.population, 1
        return self.popri.prompts, self.popri.responses

    @property
    def positions(self) -> dict[str, int]:
        """The tokens of the longest sequence that each of the `models` reads."""
        # One more for the start token.
        generated = self.popri.prompt_tokens + self.popri.new_tokens + 1
        both = {"downstream": self.corpus.tokens, "generator": generated}
        if self.method == "steered":
            # It reads clients' texts, too.
            both["generator"] = max(generated, self.corpus.tokens + 1)
        return {name: both[name] for name in self.models}

    def _check_corpora(self) -> None:
        corpora, owners, tune = self.corpora or {}, dict[str, Any](), self.popri.tune
        for name, model in self.models.items():
            if isinstance(model, DecoderModelConfig):
                owners[f"{name}.corpora"] = model.corpora
        if not corpora and (owners or self.writes):
            because = "models without a path are pretrained on them, prompts made of their texts"
            where = f"for method {self.method!r}"
            raise InputError(f"corpora must name a public source {where}, found none: {because}")
        for name, source in corpora.items():
            if name == sections.WRITTEN and self.corpus.chosen is not None:
                raise InputError(f"corpora.{name} must have another name: it is what is written")
            if place(source) == place(self.data.source):
                expected = "a public source: the texts of private clients are not public"
                raise InputError(f"corpora.{name} is data.source, expected {expected}")
        owners |= {"popri.tune.samples": tune and tune.samples, "popri.samples": self.popri.samples}
        for owner, names in owners.items():
            for name in names or ():
                if name not in corpora:
                    ours = ", ".join(map(repr, corpora)) or "none"
                    raise InputError(f"{owner} must be among {ours}, found {name!r}")

    def _check_privacy(self) -> None:
        privacy, method, asks, once = self.privacy, self.method, self.asks, self.asks_once
        look = "popri.clients_send 'moments'" if self.one_look else f"method {method!r}"
        look += ", which is one release of all clients"
        bands = ["banded", "exact_banded"]
        sums = f"method {method!r}: only the rounds of 'fed_avg' add up to one model"
        cohorts = f"method {method!r}, which draws a new cohort for every release"
        for name, refused, allowed, where in (
            ("epsilon", once and privacy.private and [None], "given", look),
            ("sampling", once and OTHERS, "'poisson'", look),
            ("trust", ["local"], "'central'", f"method {method!r}"),
            ("accountant", once and ["rdp"], "absent or 'pld'", look),
            ("sampling", asks and OTHERS - {"fixed"}, "'poisson' or 'fixed'", cohorts),
            ("adaptive", asks and [True], "false", f"{cohorts}, with the same clip norm"),
            ("noise", method != "fed_avg" and bands, "'independent' or 'exact'", sums),
        ):
            if refused and (value := getattr(privacy, name)) in refused:
                raise InputError(f"privacy.{name} must be {allowed} with {where}, found {value!r}")
