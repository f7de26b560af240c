"""Carries out the study of joined words: each world's models, what they generate, its count."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl.data.corruptions import concatenate_first_words
from jaxpfl.data.population import Population
from jaxpfl.experiments.systems.oov_concatenation.study import Study
from jaxpfl.experiments.systems.workspace import Workspace, stored_params
from jaxpfl.experiments.systems.worlds import RATE, carried_out, store_vocabulary
from jaxpfl.privacy.keys import OOV_SENTENCES, OOV_WORDS, training_root
from jaxpfl.text.character.top_words import top_words
from jaxpfl.text.generation.sentences import sample_tokens
from jaxpfl.text.metrics.oov import oov_rates


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    vocabulary, artifacts, begin = study.vocabulary, workspace.artifacts(), "character_start"
    words, model = store_vocabulary(study, workspace), study.kinds["characters"].model
    start = stored_params(artifacts, begin, model, study.character_start)
    letters = f"{words} {artifacts.sha256(begin)}"
    starts = {"words": (None, words), "characters": (start, letters), RATE: (None, words)}

    def changed(share: float) -> tuple[Population, Callable[[str], Population]]:
        clients = concatenate_first_words(study.clients, share, study.config.run.seed)
        return clients, partial(study.examples, clients)

    drawn = partial(_generated, study, workspace.progress)
    return {
        **carried_out(study, workspace, starts, changed, drawn),
        "vocabulary": {"size": len(vocabulary), "source": vocabulary.source},
    }


def _generated(study: Study, progress: bool, params: Mapping[str, Any]) -> dict[str, Any]:
    config, root = study.config, training_root(study.config.run.seed)
    sentences = sample_tokens(
        study.kinds["words"].model,
        params["words"],
        jax.random.fold_in(root, OOV_SENTENCES),
        np.arange(config.drawn.sentences),
        max_tokens=config.words.model.sequence_length,
        progress=progress,
    )
    rates = oov_rates(sentences)
    top = top_words(
        study.kinds["characters"].model,
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
