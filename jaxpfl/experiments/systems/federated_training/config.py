"""The config of federated training. As in `config.sections`, every field is PUBLIC."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxpfl import checks
from jaxpfl.checked import Checked, OpenFraction, Positive, PositiveInt
from jaxpfl.errors import InputError, named
from jaxpfl.experiments.config import sections
from jaxpfl.experiments.config.published import MultiLabelConfig, PublishedDecoderConfig
from jaxpfl.experiments.engine.setting import KeepBest
from jaxpfl.models.classifiers import MLP
from jaxpfl.privacy.guarantee import Unit
from jaxpfl.privacy.simulated import LargerPopulation
from jaxpfl.text.cut import Cut

CHOSEN = "chosen texts"
"""What is prefinetuned on in the place of a candidate, with `prefinetune.chosen`."""


@dataclass(frozen=True)
class FredConfig(Checked):
    """Which public corpus to prefinetune on, chosen by the private Frechet distance (FreD).

    Attributes:
      candidates: maps a name to a public source, which may be "split:public", or to shares of
        other candidates, a mixture: `{near: ..., far: ..., "70%": {near: 0.7, far: 0.3}}`.
      epsilon: the part of `privacy.epsilon` that FreD's release costs; required by a private run.
      unit: what it protects. "example" is for the paper's tables, whose rounds are not private: the
        run is NOT PRIVATE, the number of the clients' examples is public, and FreD's release has
        a ledger of its own, `runs/FreD/ledger.jsonl`. Guarantees for clients and for examples
        have no common epsilon.
      mode: "paper" is Algorithm 1 as printed, for examples, whose number it publishes: `epsilon` is
        what the paper states; what it REALISES is charged (`FredPlan.as_printed`).
      delta: the delta at which `epsilon` is stated; None means `privacy.delta`.
      embedder: see `jaxpfl.text.embed.embedder`.
      cut: the rule by which the texts of clients and candidates are cut before they are embedded,
        see `text.cut`. The model is trained on texts as their sources give them, but prefinetuned
        on pieces if `prefinetune.chosen` chooses them.
      clip_norm: L2 bound of the embeddings of clients and candidates.
      max_examples: the most examples of a client that are used, drawn at random; all of them where
        the unit is the example.
      max_candidate_examples: the most examples of a candidate that are used, drawn at random.
    """

    candidates: dict[str, str | dict[str, float]]
    epsilon: Positive | None = None
    delta: OpenFraction | None = None
    unit: Unit = "client"
    mode: Literal["exact", "paper"] = "exact"
    embedder: str = "hashed"
    cut: str = "messages"
    clip_norm: Positive = 1.0
    max_examples: PositiveInt = 16
    max_candidate_examples: PositiveInt = 20_000

    def check_fields(self) -> None:
        with named("fred.cut"):
            Cut.without_model(self.cut)
        if self.mode == "paper" and (self.unit == "client" or self.epsilon is None):
            given = f"unit: {self.unit} and epsilon: {self.epsilon}"
            needed = "fred.epsilon, and fred.unit: example, which the paper protects"
            raise InputError(f"fred.mode: paper needs {needed}, found {given}")
        if len(self.candidates) < 2:
            number = len(self.candidates)
            advice = "to prefinetune on one corpus, leave out fred and name it in data.public"
            raise InputError(f"fred.candidates must be at least two, found {number}: {advice}")
        folders: dict[str, str] = {}
        for name, candidate in self.candidates.items():
            # Artifacts of a candidate have a folder that is named after it.
            other = folders.setdefault(name.replace(" ", "_"), name)
            if not name or name.startswith(".") or "/" in name or other != name:
                expected = "a file name without a leading dot, unique with _ in place of spaces"
                raise InputError(f"a name in fred.candidates must be {expected}, found {name!r}")
            if isinstance(candidate, str):
                continue
            for part, share in candidate.items():
                if part not in self.sources:
                    sources = ", ".join(map(repr, self.sources)) or "none"
                    of = f"a mixture of candidates that are sources, which are {sources}"
                    raise InputError(f"fred.candidates.{name} must be {of}; found {part!r}")
                checks.non_negative(f"fred.candidates.{name}.{part}", share)
            total = math.fsum(candidate.values())
            if not math.isclose(total, 1.0, abs_tol=1e-9):
                shares = f"the shares of fred.candidates.{name}"
                raise InputError(f"{shares} must sum to 1, found {total:g}")

    @property
    def sources(self) -> dict[str, str]:
        """The candidates that are sources, by name."""
        return {name: value for name, value in self.candidates.items() if isinstance(value, str)}

    @property
    def shares(self) -> dict[str, Mapping[str, float]]:
        """All candidates by name, each as shares of sources, which sum to 1."""
        return {
            name: {name: 1.0} if isinstance(value, str) else value
            for name, value in self.candidates.items()
        }


@dataclass(frozen=True)
class Config:
    """A model that is trained by DP-FedAvg, perhaps from a public corpus that FreD chose.

    `keep_best` is by scores on the validation clients; it needs `evaluation.every`.
    """

    system: Literal["federated_training"] = field(default="federated_training", kw_only=True)
    data: sections.DataConfig
    model: sections.ModelConfig | PublishedDecoderConfig
    privacy: sections.PrivacyConfig
    training: sections.TrainingConfig
    evaluation: sections.EvaluationConfig = field(default_factory=sections.EvaluationConfig)
    run: sections.RunConfig = field(default_factory=sections.RunConfig)
    fred: FredConfig | None = None
    prefinetune: sections.PrefinetuneConfig | None = None
    simulated: LargerPopulation | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        data, fred, model = self.data, self.fred, self.model
        words = isinstance(model, sections.LanguageModelConfig)
        if words and data.vocabulary is None and data.public is None and fred is None:
            needed = "data.public or data.vocabulary, because its words must be public"
            raise InputError(f"a language model needs {needed}, found neither")
        if data.vocabulary is not None and not words:
            where = f"for a model {model.name}, which has no words"
            raise InputError(f"data.vocabulary must be absent {where}, found one")
        if self.keep_best is not None and not self.evaluation.every:
            raise InputError("keep_best chooses by evaluations: evaluation.every must not be 0")
        if self.prefinetune is not None:
            self._check_prefinetune(self.prefinetune)
        if fred is not None:
            self._check_fred(fred)
        published = isinstance(model, PublishedDecoderConfig) and data.public is not None
        if published and (self.prefinetune is None or fred is not None):
            where = "for a published model, which has its own tokeniser, but to prefinetune it"
            raise InputError(f"data.public must be absent {where}, found {data.public!r}")
        self.evaluation.check_split(data.split)
        public = [data.public, *(fred.sources.values() if fred else ())]
        if sections.PUBLIC_PART in public and not data.split.public:
            what = f"data.split.public must be positive where {sections.PUBLIC_PART!r} is a source"
            raise InputError(f"{what}, found 0")

    @property
    def metrics(self) -> set[str]:
        """The names of what the results have numbers of; FreD has one for each candidate."""
        last = "average_precision" if isinstance(self.model, MultiLabelConfig) else "perplexity"
        scores = {"loss", "accuracy", "count", last} if self.evaluation.every else set()
        distances = set() if self.fred is None else {"fred", "fred_corrected"}
        return {"epsilon", "round", "update_norm", "clip_norm"} | scores | distances

    def _check_prefinetune(self, settings: sections.PrefinetuneConfig) -> None:
        """Refuses a section `prefinetune` that has no corpus, no model or no use."""
        model = self.model
        if isinstance(model, sections.CharacterModelConfig | MLP):
            where = f"with model.name {model.name}: it is for models of words and images"
            raise InputError(f"prefinetune must be absent {where}")
        if isinstance(model, PublishedDecoderConfig) and model.lora is not None:
            raise InputError("model.lora must be null with prefinetune, which trains all weights")
        needs_fred = settings.other_candidates or settings.chosen
        if self.fred is None and (self.data.public is None or needs_fred):
            fred = "prefinetune.other_candidates and prefinetune.chosen need a fred section"
            raise InputError(f"prefinetune needs a fred section or data.public, and {fred}")
        if self.fred is not None and CHOSEN in self.fred.candidates:
            kept = f"{CHOSEN!r}, which says that single texts were chosen"
            raise InputError(f"fred.candidates must have other names than {kept}")
        if settings.other_candidates and not self.evaluation.declared_public:
            needed = "evaluation.declared_public: true, to score its runs on public test clients"
            raise InputError(f"prefinetune.other_candidates needs {needed}")

    def _check_fred(self, fred: FredConfig) -> None:
        """Refuses FreD where its choice or its privacy cost has no meaning."""
        privacy, total = self.privacy, self.privacy.epsilon
        if self.prefinetune is None:
            because = "nothing else uses what FreD chooses at a privacy cost"
            raise InputError(f"fred needs a prefinetune section, found none: {because}")
        if self.simulated is not None:
            where = "with a fred section, whose release is on the run's own clients"
            raise InputError(f"simulated must be absent {where}")
        if fred.unit == "example":
            if privacy.private or privacy.ledger is not None:
                where = "with fred.unit: example, for the paper's rounds, which are not private"
                raise InputError(f"privacy.private must be false and privacy.ledger absent {where}")
            if (fred.epsilon is None) != (fred.delta is None):
                raise InputError("fred.epsilon and fred.delta go together with fred.unit: example")
        elif not privacy.private and (fred.epsilon is not None or fred.delta is not None):
            where = "where privacy.private is false, but for fred.unit: example"
            raise InputError(f"fred.epsilon and fred.delta must be absent {where}")
        if privacy.private and fred.epsilon is None:
            raise InputError("fred.epsilon is required by a private run, found none")
        if total is not None and fred.epsilon is not None and not fred.epsilon < total:
            given = f"{total:g}, the total of all stages, found {fred.epsilon:g}"
            raise InputError(f"fred.epsilon must be below privacy.epsilon = {given}")
        if "local" == privacy.trust or (privacy.sampling == "fixed" and fred.unit == "client"):
            because = "a server adds FreD's noise, for neighbours by add or remove one client"
            refused = "privacy.sampling 'fixed' and privacy.trust 'local'"
            raise InputError(f"{refused} must be absent with a fred section: {because}")
