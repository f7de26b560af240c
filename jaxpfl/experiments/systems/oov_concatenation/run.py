"""Carries out the study of joined words: each world's models, what they generate, its count."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxpfl.algorithms.federated_sums import Rates
from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.oov_concatenation.study import Study
from jaxpfl.experiments.systems.workspace import Workspace, params_digest, restate, stored_params
from jaxpfl.experiments.systems.worlds import RATE, ledger_of, record_of
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.privacy.keys import OOV_SENTENCES, OOV_WORDS, training_root
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.generation.sentences import request_keys, sample_tokens
from jaxpfl.text.metrics.oov import oov_rates


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    vocabulary, config, artifacts = study.vocabulary, study.config, workspace.artifacts()
    decide("the vocabulary", lambda: vocabulary.save(workspace.directory / "vocabulary.json"))
    begin = "character_start"
    start = stored_params(artifacts, begin, study.models["characters"], study.character_start)
    tokens = hashlib.sha256("\n".join(vocabulary.tokens).encode()).hexdigest()[:12]
    # What each model starts from, and what identifies it.
    starts = {"words": (None, tokens), "characters": (start, f"{tokens} {artifacts.sha256(begin)}")}
    worlds = {name: _world(study, workspace, name, starts) for name in study.worlds}
    return {
        **record_of(study, workspace, worlds, config.words.privacy.delta),
        "vocabulary": {"size": len(vocabulary), "source": vocabulary.source},
        "drawn": dataclasses.asdict(config.drawn),
    }


def _world(
    study: Study, workspace: Workspace, name: str, starts: Mapping[str, tuple[Any, str]]
) -> dict[str, Any]:
    """The record of one world, whose two models and count are charged to one ledger."""
    config, share, results = study.config, study.worlds[name], {}
    ledger = ledger_of(workspace.directory, name)
    clients = concatenate_first_words(study.clients, share, config.run.seed)
    for kind, (start, identity) in starts.items():
        results[kind] = workspace.train(
            study.algorithm(kind, start)._replace(name=f"{kind}_{name}"),
            study.examples(kind, clients),
            name=f"{kind}_{name}",
            privacy=getattr(config, kind).privacy,
            ledger=ledger,
            start=identity,
        )
    params = {kind: result.params for kind, result in results.items()}
    kind = f"{RATE}_{name}"
    results[RATE] = workspace.train(
        study.algorithm(RATE)._replace(name=kind),
        clients,
        name=kind,
        privacy=config.words.privacy,
        ledger=ledger,
        start=starts["words"][1],
        ask=lambda: study.examples(RATE, clients),
    )
    (rate,), (noise,) = Rates.of(study.plans[RATE], results[RATE].state)
    found = workspace.artifacts().load_or_compute(
        f"generated_{name}",
        lambda: Artifact(_generate(study, params, workspace.progress)),
        {kind: params_digest(each) for kind, each in params.items()},
    )
    return {
        "probability": share,
        "composed_guarantee": workspace.composed_guarantee([ledger], config.words.privacy.delta),
        "privacy": {kind: restate(result.out, ledger) for kind, result in results.items()},
        "oov_overall": rate,
        "oov_noise": noise,
        **found.record,
    }


def _generate(study: Study, params: Mapping[str, Any], progress: bool) -> dict[str, Any]:
    config, root = study.config, training_root(study.config.run.seed)
    sentences = sample_tokens(
        study.models["words"],
        params["words"],
        request_keys(jax.random.fold_in(root, OOV_SENTENCES), config.drawn.sentences),
        max_tokens=config.words.model.sequence_length,
        progress=progress,
    )
    rates = oov_rates(sentences)
    top = top_words(
        study.models["characters"],
        params["characters"],
        jax.random.fold_in(root, OOV_WORDS),
        number=config.drawn.top,
        draws=config.drawn.words,
        max_bytes=config.characters.model.max_bytes,
        # The model also generates words of the vocabulary, by mistake.
        excluding=study.vocabulary,
        progress=progress,
    )
    words = [{"word": each.word, "log_probability": each.log_probability} for each in top.words]
    return {"oov_by_position": rates.rate_T, "oov_generated": rates.overall, "top_words": words}
