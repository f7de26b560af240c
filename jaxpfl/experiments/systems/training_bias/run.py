"""Carries out the study of training bias: the public model, and each world's private one."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.federated_metrics import COLUMN
from jaxpfl.data.corruptions import replace_texts
from jaxpfl.data.population import Population
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.training_bias.study import MODEL, Study
from jaxpfl.experiments.systems.workspace import Workspace, stored_params
from jaxpfl.experiments.systems.worlds import RATE, carried_out, store_vocabulary
from jaxpfl.privacy.keys import BIAS_SENTENCES, training_root
from jaxpfl.text.generation.sentences import sample_tokens
from jaxpfl.text.metrics.prediction import log_densities, unlikely
from jaxpfl.text.tokenisers.vocabulary import BOS, SPECIALS


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    config, artifacts = study.config, workspace.artifacts()
    words = store_vocabulary(study, workspace)
    public = stored_params(artifacts, "public_model", study.model, study.public_params)
    start = f"{words} {artifacts.sha256('public_model')}"

    def threshold() -> Artifact:
        log_N = log_densities(study.model, public, study.public[study.held_out])
        return Artifact({"threshold": float(np.quantile(log_N, config.public_model.rare))})

    limit = artifacts.load_or_compute("threshold", threshold, start).record["threshold"]
    planted = study.planted.column("text").to_pylist()

    def changed(share: float) -> tuple[Population, Callable[[str], Population]]:
        texts = replace_texts(study.clients, planted, share, config.run.seed)
        clients = study.vocabulary.encode(texts, config.model.sequence_length)
        rare = unlikely(study.model, public, np.asarray(clients.columns["tokens"]), limit)
        counts = np.stack([rare, ~rare], axis=1).astype(np.float32)
        examples = {MODEL: clients.keeping(rare), RATE: clients.with_columns({COLUMN: counts})}
        return clients, examples.__getitem__

    starts = {MODEL: (public, start), RATE: (None, start)}
    drawn = partial(_generated, study, workspace.progress, public)
    return {
        **carried_out(study, workspace, starts, changed, drawn),
        "public": config.data.public,
        "bias": dataclasses.asdict(config.bias),
        "rare": config.public_model.rare,
        "threshold": limit,
    }


def _generated(
    study: Study, progress: bool, public: Any, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Sentences of the private model: how many the public one lacks, and which ones most."""
    config, vocabulary = study.config, study.vocabulary
    key = jax.random.fold_in(training_root(config.run.seed), BIAS_SENTENCES)
    drawn_NxT = sample_tokens(
        study.model,
        params[MODEL],
        key,
        np.arange(config.drawn.sentences),
        max_tokens=config.model.sequence_length,
        progress=progress,
    )
    rows_NxL = np.pad(drawn_NxT, ((0, 0), (1, 0)), constant_values=BOS)
    private_N, public_N = (log_densities(study.model, p, rows_NxL) for p in (params[MODEL], public))
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
    log_frequencies = []
    for rows in (one_MxL, other_KxL):
        counts = np.bincount(rows[rows >= len(SPECIALS)], minlength=size) + 1.0
        log_frequencies.append(np.log(counts / counts.sum()))
    weight_V = log_frequencies[0] - log_frequencies[1]
    weight_V[: len(SPECIALS)] = 0.0
    return np.sum(np.where(rows_NxL >= 0, weight_V[rows_NxL], 0.0), axis=1) > 0
