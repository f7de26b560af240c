"""Carries out the study of joined words: the models of each world, and what they generate."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.errors import InputError
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.oov_concatenation.study import Study
from jaxpfl.experiments.systems.workspace import (
    Workspace,
    at_scale,
    params_digest,
    restate,
    stored_params,
)
from jaxpfl.privacy.keys import OOV_SENTENCES, OOV_WORDS, training_root
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.generation.sentences import Recurrent, sample_tokens
from jaxpfl.text.metrics.oov import oov_rates
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    return _Run(study, workspace).public_record()


class _Run:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: Study, workspace: Workspace) -> None:
        assert study.vocabulary is not None
        self.study, self.workspace, self.vocabulary = study, workspace, study.vocabulary
        self._check_vocabulary()
        self.artifacts, name = workspace.artifacts(), "character_start"
        start = stored_params(
            self.artifacts, name, study.models["characters"], study.character_start
        )
        tokens = hashlib.sha256("\n".join(self.vocabulary.tokens).encode()).hexdigest()[:12]
        # What each model starts from, and what identifies it.
        self.starts = {
            "words": (None, tokens),
            "characters": (start, f"{tokens} {self.artifacts.sha256(name)}"),
        }

    def _check_vocabulary(self) -> None:
        """Saves the vocabulary, or refuses to resume with another one."""
        path = self.workspace.directory / "vocabulary.json"
        if not path.exists():
            self.vocabulary.save(path)
        elif Vocabulary.load(path).tokens != self.vocabulary.tokens:
            raise InputError(
                f"{path}: the study began with this vocabulary, but data.public gives another "
                "vocabulary now: restore the public corpus"
            )

    def public_record(self) -> dict[str, Any]:
        study, config = self.study, self.study.config
        worlds = {name: self._world(name, share) for name, share in study.worlds.items()}
        return {
            "population": study.clients.name,
            "unit": study.clients.unit,
            "vocabulary": {"size": len(self.vocabulary), "source": self.vocabulary.source},
            "bug": dataclasses.asdict(config.bug),
            "drawn": dataclasses.asdict(config.drawn),
            "plans": {kind: plan.to_dict() for kind, plan in study.plans.items()},
            "worlds": worlds,
            # The page shows the models of all worlds, which are of the same clients.
            "all_worlds": self._composed_guarantee(*worlds),
            "at_scale": at_scale(config.scaled_up, study.plans),
        }

    def _world(self, name: str, share: float) -> dict[str, Any]:
        study, ledger = self.study, self._ledger(name)
        clients = concatenate_first_words(study.clients, share, study.config.bug.seed)
        ledger.parent.mkdir(parents=True, exist_ok=True)
        results = {}
        for kind, (start, identity) in self.starts.items():
            run = f"{kind}_{name}"
            results[kind] = self.workspace.train(
                study.algorithm(kind, start)._replace(name=run),
                study.examples(kind, clients),
                name=run,
                privacy=getattr(study.config, kind).privacy,
                ledger=ledger,
                start=identity,
            )
        params = {kind: result.params for kind, result in results.items()}
        found = self.artifacts.load_or_compute(
            f"generated_{name}",
            lambda: Artifact(self._generate(params)),
            {kind: params_digest(each) for kind, each in params.items()},
        )
        return {
            "probability": share,
            "composed_guarantee": self._composed_guarantee(name),
            "privacy": {kind: restate(result.out, ledger) for kind, result in results.items()},
            **found.record,
        }

    def _composed_guarantee(self, *worlds: str) -> dict[str, Any]:
        delta = self.study.config.words.privacy.delta
        return self.workspace.composed_guarantee([self._ledger(name) for name in worlds], delta)

    def _ledger(self, world: str) -> Path:
        return self.workspace.directory / "worlds" / world / "ledger.jsonl"

    def _generate(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Generates sentences and words from the finished models and returns their statistics."""
        settings, root = self.study.config.drawn, training_root(self.study.config.run.seed)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            jax.random.fold_in(root, OOV_SENTENCES), jnp.arange(settings.sentences)
        )
        sentences = sample_tokens(
            cast(Recurrent, self.study.models["words"]),
            params["words"],
            keys,
            max_tokens=self.study.config.words.model.sequence_length,
            progress=self.workspace.progress,
        )
        rates = oov_rates(sentences)
        top = top_words(
            cast(Recurrent, self.study.models["characters"]),
            params["characters"],
            jax.random.fold_in(root, OOV_WORDS),
            number=settings.top,
            draws=settings.words,
            max_bytes=self.study.config.characters.model.max_bytes,
            # The model also generates words of the vocabulary, by mistake.
            excluding=self.vocabulary,
            progress=self.workspace.progress,
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
