"""The study of joined words: federated language models reveal a bug of a tokeniser.

Source: Augenstein et al. 2020, section 5 and appendix B. In a share of the sentences the first two
words are joined into one, which is out of vocabulary. Two models are trained under differential
privacy:

    words        on whole sentences: it shows WHERE in a sentence words are out of vocabulary
    characters   on the clients' out-of-vocabulary words only: it shows WHICH words these are

Each share of the bug is a WORLD of its own, in which the same clients have another history. The two
models of a world are charged to one ledger and have one composed epsilon, which is what a
deployment would spend, because only one world happens to it. The page shows several worlds of the
same clients side by side, so it also states the cost of all of them. Generating text from the
finished models is post-processing.

    vocabulary.json              the words of the public corpus
    artifacts/                   initial parameters of the character model; the generated text
    runs/KIND_WORLD/             the run of each model, with a report of its own
    worlds/WORLD/ledger.jsonl    the releases of both models
"""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.public_check import PrivateContent
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine.build import (
    build_fed_avg,
    build_model,
    build_plan,
    open_public,
    read_clients,
    split_clients,
)
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.engine.texts import exactly
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.base import Workspace
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig
from jaxpfl.models.base import Model, initialised, require_room
from jaxpfl.privacy.keys import OOV_SENTENCES, OOV_WORDS, training_root
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.character.words import char_lm, log_prior, oov_words
from jaxpfl.text.generation.sentences import Recurrent, sample_tokens
from jaxpfl.text.metrics.oov import oov_rates
from jaxpfl.text.tokenisers.public_words import public_words
from jaxpfl.text.tokenisers.vocabulary import Vocabulary, with_words

_PREFINETUNE_BATCH = 128


def world_name(probability: float) -> str:
    """The name of a world, such as "bug_1_percent" for 0.01."""
    return f"bug_{100 * probability:g}_percent"


def prepare(config: OovConcatenationConfig) -> "ConcatenationStudy":
    """Reads the clients and refuses what cannot be carried out; see `systems.base`."""
    clients = read_clients(config.data)
    parts = split_clients(clients, config.data)
    assert config.data.public is not None
    private = PrivateContent(parts["train"])
    public = open_public(config.data.public, parts["public"], private, "data.public")
    size = config.words.model.vocab_size
    if config.data.vocabulary is None:
        vocabulary = exactly(Vocabulary.from_public(public, size), size)
    else:
        vocabulary = public_words(config.data.vocabulary, size)
    train = with_words(parts["train"], vocabulary.split)
    study = ConcatenationStudy(config, train, public, vocabulary)
    for model in (study.word_model, study.character_model):
        require_room(model)
    if config.scaled_up:
        study_runs.at_scale(config.scaled_up, study.plans)
    return study


@dataclass(frozen=True)
class ConcatenationStudy:
    """The study, ready to be carried out.

    Attributes:
      config: the config file.
      clients: the clients without the bug, with their words; private.
      public: the public corpus.
      vocabulary: the words of the public corpus.
    """

    config: OovConcatenationConfig
    clients: Population = field(repr=False)
    public: Population = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do, and returns the public record."""
        return _Progress(self, workspace).public_record()

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """The plans of both models, which are the same in every world."""
        both = {"words": self.config.words, "characters": self.config.characters}
        return {
            name: build_plan(settings.privacy, settings.training, len(self.clients))
            for name, settings in both.items()
        }

    @cached_property
    def word_model(self) -> Model:
        return build_model(self.config.words.model, self.vocabulary)

    @cached_property
    def character_model(self) -> Model:
        sizes = dataclasses.asdict(self.config.characters.model)
        sizes.pop("max_bytes")
        # The letter frequencies of the out-of-vocabulary words of the PUBLIC corpus.
        return char_lm(**sizes, output_bias_prior=log_prior(self._public_words.columns["tokens"]))

    def character_start(self) -> Any:
        """Returns the initial parameters of the character model, which follow from public words."""
        settings, model = self.config.characters, self.character_model
        if not settings.prefinetune_epochs:
            return initialised(model, jax.random.key(self.config.run.seed))
        return fit_adam(
            model,
            {"tokens": self._public_words.columns["tokens"]},
            epochs=settings.prefinetune_epochs,
            batch_size=_PREFINETUNE_BATCH,
            learning_rate=settings.prefinetune_learning_rate,
            seed=self.config.run.seed,
        )

    @cached_property
    def _public_words(self) -> Population:
        max_bytes = self.config.characters.model.max_bytes
        found = oov_words(
            with_words(self.public, self.vocabulary.split), self.vocabulary, max_bytes
        )
        if not found.num_examples:
            raise InputError(
                "data.public must contain words out of the vocabulary, found none: lower "
                f"words.model.vocab_size = {self.config.words.model.vocab_size}"
            )
        return found

    def algorithms(self, character_start: Any) -> dict[str, Algorithm]:
        """The algorithms that train the two models."""
        words, characters = self.config.words, self.config.characters
        return {
            "words": build_fed_avg(self.word_model, words.training, self.plans["words"]),
            "characters": build_fed_avg(
                self.character_model, characters.training, self.plans["characters"], character_start
            ),
        }

    def examples(self, kind: str, clients: Population) -> Population:
        """The examples that a model is trained on."""
        if kind == "words":
            return self.vocabulary.encode(clients, self.config.words.model.sequence_length)
        return oov_words(clients, self.vocabulary, self.config.characters.model.max_bytes)

    def generate(self, params: dict[str, Any], *, progress: bool) -> dict[str, Any]:
        """Generates sentences and words from the finished models and returns their statistics."""
        settings, root = self.config.drawn, training_root(self.config.run.seed)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            jax.random.fold_in(root, OOV_SENTENCES), jnp.arange(settings.sentences)
        )
        sentences = sample_tokens(
            cast(Recurrent, self.word_model),
            params["words"],
            keys,
            max_tokens=self.config.words.model.sequence_length,
            progress=progress,
        )
        rates = oov_rates(sentences)
        top = top_words(
            cast(Recurrent, self.character_model),
            params["characters"],
            jax.random.fold_in(root, OOV_WORDS),
            number=settings.top,
            draws=settings.words,
            max_bytes=self.config.characters.model.max_bytes,
            # The model also generates words of the vocabulary, by mistake.
            excluding=self.vocabulary,
            progress=progress,
        )
        return {
            "oov_by_position": rates.rate_T,
            "standard_error": rates.standard_error_T(),
            "oov_overall": rates.overall,
            "top_words": [
                {"word": each.word, "log_probability": each.log_probability} for each in top.words
            ],
            "covered": top.covered,
        }


class _Progress:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: ConcatenationStudy, workspace: Workspace) -> None:
        self.study, self.workspace = study, workspace
        self._check_vocabulary()
        self.artifacts = workspace.artifacts(study_runs.config_id(study.config))
        name = "character_start"
        start = study_runs.stored_params(
            self.artifacts, name, study.character_model, study.character_start
        )
        self.algorithms = study.algorithms(start)
        tokens = "\n".join(study.vocabulary.tokens)
        vocabulary = hashlib.sha256(tokens.encode()).hexdigest()[:12]
        self.starts = {
            "words": vocabulary,
            "characters": f"{vocabulary} {self.artifacts.sha256(name)}",
        }

    def _check_vocabulary(self) -> None:
        """Saves the vocabulary, or refuses to resume with another one."""
        path = self.workspace.directory / "vocabulary.json"
        if not path.exists():
            self.study.vocabulary.save(path)
        elif Vocabulary.load(path).tokens != self.study.vocabulary.tokens:
            raise InputError(
                f"{path}: the study began with this vocabulary, but data.public gives another "
                "vocabulary now: restore the public corpus"
            )

    def public_record(self) -> dict[str, Any]:
        """Does what is left to do, and returns the public record."""
        study, config = self.study, self.study.config
        worlds = {
            world_name(probability): self._world(probability)
            for probability in config.bug.probabilities
        }
        return {
            "population": study.clients.name,
            "unit": study.clients.unit,
            "vocabulary": {"size": len(study.vocabulary), "source": study.vocabulary.source},
            "bug": dataclasses.asdict(config.bug),
            "drawn": dataclasses.asdict(config.drawn),
            "plans": {name: plan.to_dict() for name, plan in study.plans.items()},
            "worlds": worlds,
            # The page shows the models of all worlds, which are of the same clients.
            "all_worlds": self._composed_guarantee(list(worlds)),
            "at_scale": study_runs.at_scale(config.scaled_up, study.plans),
        }

    def _world(self, probability: float) -> dict[str, Any]:
        bug, name = self.study.config.bug, world_name(probability)
        clients = concatenate_first_words(self.study.clients, probability, bug.seed)
        ledger = self._ledger(name)
        ledger.parent.mkdir(parents=True, exist_ok=True)
        results = {kind: self._train(kind, name, clients) for kind in self.algorithms}
        params = {kind: result.params for kind, result in results.items()}

        def generated() -> Artifact:
            return Artifact(self.study.generate(params, progress=self.workspace.progress))

        made_from = {kind: study_runs.params_digest(each) for kind, each in params.items()}
        found = self.artifacts.load_or_compute(f"generated_{name}", generated, made_from)
        return {
            "probability": probability,
            "composed_guarantee": self._composed_guarantee([name]),
            "privacy": {
                kind: study_runs.restate(result.out, ledger) for kind, result in results.items()
            },
            **found.record,
        }

    def _train(self, kind: str, world: str, clients: Population) -> Result:
        config = self.study.config
        every = config.run.checkpoint_every
        name = f"{kind}_{world}"
        return study_runs.train(
            config,
            self.algorithms[kind]._replace(name=name),
            self.study.examples(kind, clients),
            name=name,
            directory=self.workspace.directory,
            ledger=self._ledger(world),
            privacy=getattr(config, kind).privacy,
            tracking=Tracking(
                evaluate_every=every, checkpoint_every=every, progress=self.workspace.progress
            ),
            start=self.starts[kind],
        )

    def _composed_guarantee(self, worlds: list[str]) -> dict[str, Any]:
        return study_runs.composed_guarantee(
            [self._ledger(name) for name in worlds],
            self.study.config.words.privacy.delta,
            self.workspace.stamp,
        )

    def _ledger(self, world: str) -> Path:
        return self.workspace.directory / "worlds" / world / "ledger.jsonl"
