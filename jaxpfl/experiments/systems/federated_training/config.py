"""The config of federated training. As in `config.sections`, every field is PUBLIC."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.sections import (
    PUBLIC_PART,
    DataConfig,
    EvaluationConfig,
    ImageModelConfig,
    LanguageModelConfig,
    PrefinetuneConfig,
    PrivacyConfig,
    RunConfig,
    TrainingConfig,
)


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
        folders: dict[str, str] = {}
        for name, given in self.candidates.items():
            # What is made of a candidate lies in a folder that is named after it.
            other = folders.setdefault(name.replace(" ", "_"), name)
            if not name or name.startswith(".") or "/" in name or other != name:
                raise InputError(
                    "a name in fred.candidates must be a file's name that begins with no dot and "
                    f"differs from the others in more than spaces, found {name!r}"
                )
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
class Config:
    """A model that is trained by DP-FedAvg, perhaps from a public corpus that FreD chose."""

    system: Literal["federated_training"] = field(default="federated_training", kw_only=True)
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
                "fred needs privacy.sampling: poisson or cyclic: its release and the rounds must "
                f"share an adjacency (add or remove one client), found {self.privacy.sampling!r}"
            )
