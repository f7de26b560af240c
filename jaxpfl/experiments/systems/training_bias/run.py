"""Carries out the study of training bias: the public model, and each world's private one."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.federated_sums import COLUMN, Rates
from jaxpfl.data.corruptions import replace_texts
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.training_bias.study import MODEL, Study
from jaxpfl.experiments.systems.workspace import Workspace, params_digest, restate, stored_params
from jaxpfl.experiments.systems.worlds import RATE, ledger_of, record_of
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.privacy.keys import BIAS_SENTENCES, training_root
from jaxpfl.text.generation.sentences import request_keys, sample_tokens
from jaxpfl.text.metrics.prediction import log_densities, unlikely
from jaxpfl.text.tokenisers.vocabulary import BOS, SPECIALS


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    config, artifacts, vocabulary = study.config, workspace.artifacts(), study.vocabulary
    decide("the vocabulary", lambda: vocabulary.save(workspace.directory / "vocabulary.json"))
    public = stored_params(artifacts, "public_model", study.model, study.public_params)
    words = hashlib.sha256("\n".join(vocabulary.tokens).encode()).hexdigest()[:12]
    start = f"{words} {artifacts.sha256('public_model')}"

    def threshold() -> Artifact:
        log_N = log_densities(study.model, public, study.public[study.held_out])
        return Artifact({"threshold": float(np.quantile(log_N, config.public_model.rare))})

    limit = artifacts.load_or_compute("threshold", threshold, start).record["threshold"]
    worlds = {name: _world(study, workspace, name, public, start, limit) for name in study.worlds}
    return {
        **record_of(study, workspace, worlds, config.privacy.delta),
        "public": config.data.public,
        "bias": dataclasses.asdict(config.bias),
        "rare": config.public_model.rare,
        "drawn": dataclasses.asdict(config.drawn),
        "threshold": limit,
    }


def _world(
    study: Study, workspace: Workspace, name: str, public: Any, start: str, limit: float
) -> dict[str, Any]:
    """The record of one world, whose model and count are charged to one ledger."""
    config, share, privacy = study.config, study.worlds[name], study.config.privacy
    ledger = ledger_of(workspace.directory, name)
    planted = study.planted.column("text").to_pylist()
    texts = replace_texts(study.clients, planted, share, config.run.seed)
    clients = study.vocabulary.encode(texts, config.model.sequence_length)
    rare = unlikely(study.model, public, np.asarray(clients.columns["tokens"]), limit)
    counts = np.stack([rare, ~rare], axis=1).astype(np.float32)
    examples = {MODEL: clients.keeping(rare), RATE: clients.with_columns({COLUMN: counts})}
    results = {
        kind: workspace.train(
            study.algorithm(kind, public)._replace(name=f"{kind}_{name}"),
            examples[kind],
            name=f"{kind}_{name}",
            privacy=privacy,
            ledger=ledger,
            start=start,
        )
        for kind in study.plans
    }
    (rate,), (noise,) = Rates.of(study.plans[RATE], results[RATE].state)
    params = results[MODEL].params
    found = workspace.artifacts().load_or_compute(
        f"generated_{name}",
        lambda: Artifact(_generated(study, public, params, workspace.progress)),
        params_digest(params),
    )
    return {
        "share": share,
        "composed_guarantee": workspace.composed_guarantee([ledger], privacy.delta),
        "privacy": {kind: restate(result.out, ledger) for kind, result in results.items()},
        "rare_share": rate,
        "rare_noise": noise,
        **found.record,
    }


def _generated(study: Study, public: Any, params: Any, progress: bool) -> dict[str, Any]:
    """Sentences of the private model: how many the public one lacks, and which ones most."""
    config, vocabulary = study.config, study.vocabulary
    key = jax.random.fold_in(training_root(config.run.seed), BIAS_SENTENCES)
    drawn_NxT = sample_tokens(
        study.model,
        params,
        request_keys(key, config.drawn.sentences),
        max_tokens=config.model.sequence_length,
        progress=progress,
    )
    rows_NxL = np.pad(drawn_NxT, ((0, 0), (1, 0)), constant_values=BOS)
    private_N, public_N = (log_densities(study.model, p, rows_NxL) for p in (params, public))
    excess_N = private_N - public_N
    planted = vocabulary.encode(study.planted, config.model.sequence_length).columns["tokens"]
    planted_N = nearer(rows_NxL, np.asarray(planted), study.public, len(vocabulary))
    most = np.argsort(-excess_N, kind="stable")[: config.drawn.top]
    return {
        "missing_share": float(np.mean(excess_N > config.drawn.excess)),
        "planted_share": float(np.mean(planted_N)),
        "top": [
            {
                "text": vocabulary.decode(drawn_NxT[row]),
                "excess": float(excess_N[row]),
                "planted": bool(planted_N[row]),
            }
            for row in most
        ],
    }


def nearer(
    rows_NxL: np.ndarray, one_MxL: np.ndarray, other_KxL: np.ndarray, size: int
) -> np.ndarray:
    """Which rows are more probable by the word frequencies of `one` than by `other`, bool [N].

    Frequencies are add-one smoothed; special tokens do not count.
    """

    def log_frequencies(rows: np.ndarray) -> np.ndarray:
        counts = np.bincount(rows[rows >= len(SPECIALS)], minlength=size) + 1.0
        return np.log(counts / counts.sum())

    weight_V = log_frequencies(one_MxL) - log_frequencies(other_KxL)
    weight_V[: len(SPECIALS)] = 0.0
    return np.sum(np.where(rows_NxL >= 0, weight_V[rows_NxL], 0.0), axis=1) > 0
