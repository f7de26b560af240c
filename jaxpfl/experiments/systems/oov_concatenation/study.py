"""The study of joined words: federated language models show a tokenizer's bug.

Source: Augenstein et al. 2020, section 5 and appendix B. In a share of the sentences the first two
words become one, which is out of vocabulary. Two models are trained under differential privacy:

    words        over whole sentences: WHERE in a sentence words are out of vocabulary
    characters   over the clients' out-of-vocabulary words alone: WHICH words those are

Each share of the bug is a WORLD of its own: the same clients, another history. A world's two
models are charged to one ledger and have one epsilon together: what a deployment, to which one
world happens, would spend. Whoever sees several worlds of the same clients side by side has seen
all of their releases: the page says what that costs, too. Everything drawn from the finished models
is post-processing.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import study_runs as studies
from jaxpfl.experiments.engine.build import (
    build_fed_avg,
    build_model,
    build_plan,
    cleaned,
    open_public,
    read_clients,
)
from jaxpfl.experiments.engine.public_check import PrivateContent
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.engine.texts import public_vocabulary
from jaxpfl.experiments.engine.tracking import jsonable
from jaxpfl.experiments.systems.base import Workspace, stamp_of
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig
from jaxpfl.models.base import Model
from jaxpfl.privacy.keys import OOV_SENTENCES, OOV_WORDS, training_root
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.character.words import char_lm, log_prior, oov_words
from jaxpfl.text.generation.sentences import Recurrent, sample_tokens
from jaxpfl.text.metrics.oov import oov_rates
from jaxpfl.text.tokenisers.vocabulary import Vocabulary, with_words

_PREFINETUNE_BATCH = 128


def world_name(probability: float) -> str:
    """0.01 -> "bug_1_percent": also the folder of the world's ledger."""
    return f"bug_{100 * probability:g}_percent"


def prepare(config: OovConcatenationConfig) -> "_Study":
    """Reads the clients and builds all that can be refused, before a directory is touched."""
    clients = read_clients(config.data)
    parts = clients.split(dataclasses.asdict(config.data.split), seed=config.data.split_seed)
    parts = {name: cleaned(part, config.data) for name, part in parts.items()}
    assert config.data.public is not None
    private = PrivateContent(parts["train"])
    public = open_public(config.data.public, parts["public"], private, "data.public")
    vocabulary = public_vocabulary(public, config.words.model.vocab_size)
    study = _Study(config, with_words(parts["train"]), public, vocabulary)
    if config.scaled_up:
        studies.at_scale(config.scaled_up, study.plans)
    return study


@dataclass(frozen=True)
class _Study:
    config: OovConcatenationConfig
    clients: Population = field(repr=False)
    public: Population = field(repr=False)
    vocabulary: Vocabulary = field(repr=False)

    @cached_property
    def plans(self) -> dict[str, Plan]:
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
        # What the vocabulary lacks of the PUBLIC corpus: how such words are spelt.
        return char_lm(**sizes, output_bias_prior=log_prior(self._public_words.columns["tokens"]))

    @cached_property
    def words(self) -> Algorithm:
        return build_fed_avg(self.word_model, self.config.words.training, self.plans["words"])

    def characters(self, directory: Path) -> tuple[Algorithm, str]:
        """The algorithm, and what identifies its start: made once, from public words."""
        settings, model = self.config.characters, self.character_model
        tokens = self._public_words.columns["tokens"]
        like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))

        def start() -> Any:
            if not settings.prefinetune_epochs:
                return model.init(jax.random.key(self.config.run.seed))
            return fit_adam(
                model,
                {"tokens": tokens},
                epochs=settings.prefinetune_epochs,
                batch_size=_PREFINETUNE_BATCH,
                learning_rate=settings.prefinetune_learning_rate,
                seed=self.config.run.seed,
            )

        params, digest = studies.load_or_compute(directory / "start" / "characters", start, like)
        return build_fed_avg(model, settings.training, self.plans["characters"], params), digest

    @cached_property
    def _public_words(self) -> Population:
        max_bytes = self.config.characters.model.max_bytes
        found = oov_words(with_words(self.public), self.vocabulary, max_bytes)
        if not found.num_examples:
            raise InputError(
                "data.public has no word out of words.model.vocab_size: make the vocabulary smaller"
            )
        return found

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do in the directory."""
        config, directory, shown = self.config, workspace.directory, workspace.progress
        self._keep_vocabulary(directory)
        characters, start = self.characters(directory)
        both = {
            "words": (self.words, self._vocabulary_digest),
            "characters": (characters, f"{self._vocabulary_digest} {start}"),
        }
        worlds = {
            world_name(probability): self._world(probability, both, directory, shown)
            for probability in config.bug.probabilities
        }
        return {
            "population": self.clients.name,
            "unit": self.clients.unit,
            "vocabulary": {"size": len(self.vocabulary), "source": self.vocabulary.source},
            "bug": dataclasses.asdict(config.bug),
            "drawn": dataclasses.asdict(config.drawn),
            "plans": {name: plan.to_dict() for name, plan in self.plans.items()},
            "worlds": worlds,
            # Whoever sees this page has seen every world's models, of the same clients.
            "all_worlds": studies.composed_guarantee(
                [_ledger(directory, name) for name in worlds],
                config.words.privacy.delta,
                stamp_of(directory),
            ),
            "at_scale": studies.at_scale(config.scaled_up, self.plans),
        }

    @cached_property
    def _vocabulary_digest(self) -> str:
        return hashlib.sha256("\n".join(self.vocabulary.tokens).encode()).hexdigest()[:12]

    def _keep_vocabulary(self, directory: Path) -> None:
        """Saves it, or refuses a study that was begun with another one."""
        path = directory / "vocabulary.json"
        if not path.exists():
            self.vocabulary.save(path)
        elif Vocabulary.load(path).tokens != self.vocabulary.tokens:
            raise InputError(f"{path}: data.public gives another vocabulary than it did before")

    def _world(
        self,
        probability: float,
        both: dict[str, tuple[Algorithm, str]],
        directory: Path,
        shown: bool,
    ) -> dict[str, Any]:
        config, name = self.config, world_name(probability)
        held = concatenate_first_words(self.clients, probability, config.bug.seed)
        ledger = _ledger(directory, name)
        ledger.parent.mkdir(parents=True, exist_ok=True)
        length, max_bytes = config.words.model.sequence_length, config.characters.model.max_bytes
        populations = {
            "words": lambda: self.vocabulary.encode(held, length),
            "characters": lambda: oov_words(held, self.vocabulary, max_bytes),
        }
        results = {}
        for kind, (algorithm, start) in both.items():
            privacy = getattr(config, kind).privacy
            results[kind] = studies.train(
                config,
                algorithm._replace(name=f"{kind}_{name}"),
                populations[kind](),
                name=f"{kind}_{name}",
                directory=directory,
                ledger=ledger,
                budget=studies.budget_of(privacy),
                tracking=Tracking(
                    evaluate_every=config.run.checkpoint_every,
                    checkpoint_every=config.run.checkpoint_every,
                    progress=shown,
                ),
                start=start,
            )
        found = self._drawn(results, ledger.with_name("drawn.json"), shown)
        record = {
            "probability": probability,
            "composed_guarantee": studies.composed_guarantee(
                [ledger], config.words.privacy.delta, stamp_of(directory)
            ),
            "privacy": {
                kind: studies.restate(result.out, ledger) for kind, result in results.items()
            },
            **found,
        }
        return jsonable(record)

    def _drawn(
        self,
        results: dict[str, Result],
        path: Path,
        shown: bool,
    ) -> dict[str, Any]:
        """Sentences and words from the finished models; read where it was done, else made."""
        of = {kind: studies.params_digest(result.params) for kind, result in results.items()}
        if path.exists():
            record = files.read_json(path)
            if record["of"] == of:
                return record["found"]
        settings, root = self.config.drawn, training_root(self.config.run.seed)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            jax.random.fold_in(root, OOV_SENTENCES), jnp.arange(settings.sentences)
        )
        sentences = sample_tokens(
            cast(Recurrent, self.word_model),
            results["words"].params,
            keys,
            max_tokens=self.config.words.model.sequence_length,
            progress=shown,
        )
        rates = oov_rates(sentences)
        top = top_words(
            cast(Recurrent, self.character_model),
            results["characters"].params,
            jax.random.fold_in(root, OOV_WORDS),
            number=settings.top,
            draws=settings.words,
            max_bytes=self.config.characters.model.max_bytes,
            # The model gives words that are in the vocabulary a share, too: its error.
            excluding=self.vocabulary,
            progress=shown,
        )
        found = jsonable(
            {
                "oov_by_position": rates.rate_T,
                "standard_error": rates.standard_error_T(),
                "oov_overall": rates.overall,
                "top_words": [
                    {"word": each.word, "log_probability": each.log_probability}
                    for each in top.words
                ],
                "covered": top.covered,
            }
        )
        text = json.dumps({"of": of, "found": found}, indent=1)
        files.write_atomically(path, text + "\n")
        return found


def _ledger(directory: Path, world: str) -> Path:
    return directory / "worlds" / world / "ledger.jsonl"
