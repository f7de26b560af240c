"""POPri's rounds in a study; then which round's adapters write the corpus, and after which prompts.

Both choices follow from the rounds' releases and from validation clients that are declared public,
so neither costs privacy.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.popri import Written, popri, prompts_of, respond, with_adapters
from jaxpfl.algorithms.stored_rounds import Arrays, Hooks, PublicDraws
from jaxpfl.experiments.systems.synthetic_text.config import PopriConfig
from jaxpfl.text.embed import Embedder
from jaxpfl.text.generation.language_model import LanguageModel

Ask = Callable[[Callable, Any, int], tuple[Any, Any]]
"""`ask(step, state, round)` runs a step that may ask clients, as `Releaser.step` does."""

Distance = Callable[[list[str]], float]
"""The Frechet distance of texts to those of clients that are declared public."""

DISTANCES = "distances"
"""The artifact that `nearest` stores: the distance of what was written with 0, 1, ... tunings."""


def all_states(algorithm: Algorithm, ask: Ask) -> list[Any]:
    """The algorithm's states: before the first round, and after each."""
    states = [algorithm.init(jax.random.key(0))]
    for round in range(1, algorithm.rounds + 1):
        states.append(ask(algorithm.step, states[-1], round)[0])
    return states


def tuned_by_scores(
    generator: LanguageModel,
    samples: list[str],
    scorer: Scorer,
    function: Embedder,
    settings: PopriConfig,
    *,
    seed: int,
    ask: Ask,
    distance: Distance,
    hooks: Hooks[Written],
) -> tuple[LanguageModel, list[str]]:
    """The generator that writes the corpus, and the texts that its prompts are made of.

    Args:
      samples: PUBLIC texts of the rounds' prompts.
      function: the embedder.
      distance: to validation clients that are declared public; called only where the choice of the
        round is neither stored nor simply the last.
      hooks: also stores what `nearest` measures.
    """
    rounds: list[Written] = []

    def on_round(found: Written) -> None:
        rounds.append(found)
        hooks.on_round(found)

    kept = dataclasses.replace(hooks, on_round=on_round)
    algorithm = popri(generator, samples, scorer, function, settings, seed=seed, hooks=kept)
    params_of = algorithm.params
    assert params_of is not None, "POPri tunes a model"
    writers = [
        with_adapters(generator, settings, params_of(state)) for state in all_states(algorithm, ask)
    ]
    writer = writers[-1]
    if settings.checkpoint == "nearest":

        def measured() -> Arrays:
            # The last adapters have written nothing yet.
            number = len(rounds) + 1
            prompts = prompts_of(generator, samples, settings.prompts, settings, seed, number)
            key = PublicDraws("popri", seed).key("responses", number)
            last, _ = respond(writers[-1], prompts, settings, key, hooks.progress)
            written = [*(found.responses for found in rounds), last]
            return {"distances": np.array([distance(_flat(texts)) for texts in written])}

        distances = hooks.load_or_compute(DISTANCES, measured)["distances"]
        writer = writers[int(np.argmin(distances))]
    if settings.final_prompts == "best_responses":
        samples = best_responses(rounds[-1])
    return writer, samples


def best_responses(written: Written) -> list[str]:
    """The response to each prompt of a round that clients scored highest, unless it is empty."""
    best = np.argmax(written.scores_KxJ, axis=1).tolist()
    texts = [row[index] for row, index in zip(written.responses, best, strict=True)]
    return [text for text in texts if text]


def _flat(texts: Sequence[Sequence[str]]) -> list[str]:
    return [text for row in texts for text in row]
