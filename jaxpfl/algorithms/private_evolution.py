"""Private evolution: clients vote on synthetic texts, and the server varies the texts they chose.

Sources: PrE-Text (Hou, Shrivastava, Zhan, Conway, Le, Sagar, Fanti, Lazar 2024, "PrE-Text: Training
Language Models on Private Federated Data in the Age of LLMs", Algorithm 1) and Aug-PE (Xie, Lin,
Backurs, Gopi, Yu et al. 2024, "Differentially Private Synthetic Data via Foundation Model APIs 2:
Text", Algorithm 1).

    the server writes a population of M texts
    for each round t:
        lookahead   PrE-Text only: the mean embedding of each text's variations
        votes       each text of a sampled client votes for the synthetic text nearest to it; the
                    noisy sum of the votes is one charged release
        select      PrE-Text: M draws in proportion to max(votes - H, 0)
                    Aug-PE: the M / (1 + variations) texts with the most votes
        vary        PrE-Text: one variation of every drawn text
                    Aug-PE: the selected texts, and `variations` variations of each
    the result, which a language model may expand:
                    PrE-Text: the selections of all rounds
                    Aug-PE: the last selection

H is the standard deviation of the votes' noise, times `threshold`. The two forms' variations are
`MaskAndFill` and `Rephrase` of `text.generation.variation`; any other is a substitute.

A client votes once with each of at most `max_texts` texts, which bounds the L2 norm of its votes
(`algorithms.candidate_scores`, kind nn_histogram). Nothing but the votes costs privacy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.stored_rounds import Arrays, LoadOrCompute, PublicDraws, computed
from jaxpfl.checked import Checked, NonNegative, NonNegativeInt, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.federated.release.releaser import Release
from jaxpfl.text.columns import from_byte_rows, to_byte_rows
from jaxpfl.text.embed import Embedder

Vary = Callable[[Sequence[str], jax.Array], list[str]]
"""Returns a similar text for each text, by public models (`text.generation.variation`)."""


@dataclass(frozen=True)
class EvolutionSettings(Checked):
    """How texts evolve.

    Attributes:
      form: which of the two published forms: "pre_text" or "aug_pe".
      population: M, the number of texts that are voted on in a round.
      threshold: "pre_text" only: H in units of the standard deviation of the noise of a text's
        votes, as the plan accounts for it; without noise H is 0. H is subtracted from the noisy
        votes for each text, and a negative difference counts as 0. Of M texts without votes about
        M Q(threshold) remain, where Q is the upper tail of the standard normal distribution.
      lookahead: "pre_text" only: clients vote on the mean embedding of this many variations of a
        text. With 0 they vote on the embedding of the text itself.
      variations: "aug_pe" only: the number of variations of each selected text.
      max_bytes: a longer text is cut to this many bytes of UTF-8.
    """

    form: Literal["pre_text", "aug_pe"] = "pre_text"
    population: PositiveInt = 1_024
    threshold: NonNegative = 1.0
    lookahead: NonNegativeInt = 4
    variations: PositiveInt = 3
    max_bytes: PositiveInt = 4_096

    def check_fields(self) -> None:
        if self.form == "aug_pe" and self.population % (1 + self.variations):
            expected = f"a multiple of 1 + variations = {1 + self.variations} in 'aug_pe'"
            raise InputError(f"population must be {expected}, found {self.population}")

    @property
    def selected(self) -> int:
        if self.form == "aug_pe":
            return self.population // (1 + self.variations)
        return self.population


@dataclass(frozen=True)
class Evolved:
    """The texts of one round, the noisy votes for them, and the selected texts; public.

    Attributes:
      texts: M texts.
      votes_M: float32.
      selected: the selected texts, most votes first; a text may occur more than once.
    """

    round: int
    texts: list[str]
    votes_M: np.ndarray
    selected: list[str]


class EvolutionState(NamedTuple):
    """Texts as rows of bytes (`text.columns`); public.

    Attributes:
      texts: uint8 [M, max_bytes], the texts that the next round votes on.
      selected: uint8 [rounds * M, max_bytes] in "pre_text", the selections of all rounds, of which
        those to come are empty; in "aug_pe" [selected, max_bytes], the last round's. In each the
        text of most votes is first.
    """

    texts: np.ndarray
    selected: np.ndarray


def private_evolution(
    texts: Sequence[str],
    vary: Vary,
    scorer: Scorer,
    embedder: Embedder,
    settings: EvolutionSettings,
    *,
    seed: int = 0,
    load_or_compute: LoadOrCompute = computed,
    on_round: Callable[[Evolved], object] = lambda evolved: None,
) -> Algorithm:
    """Returns private evolution; `selected_texts` reads the result from the final state.

    The population must have the column "embedding", which `text.embed.embed` makes of the clients'
    texts.

    Args:
      texts: PUBLIC or synthetic texts of the first round, `settings.population` of them.
      vary: makes the variations.
      scorer: must be of kind "nn_histogram"; its plan gives the number of rounds.
      embedder: public; must be the one that the clients' texts were embedded with.
      seed: seed of the selections and variations.
      load_or_compute: stores "round 3 lookahead", "round 3 votes" and "round 3 texts".
      on_round: is called with the public results of each round.

    Metrics of a step, all public: `votes` (float32, the noisy sum of votes). Another number of
    texts, and a scorer of another kind, are refused.
    """
    if len(texts) != settings.population:
        expected = f"must start from population = {settings.population} texts"
        raise InputError(f"private evolution {expected}, found {len(texts)}")
    if scorer.kind != "nn_histogram":
        raise InputError(f"the scorer must be of kind 'nn_histogram', found {scorer.kind!r}")
    draws, width = PublicDraws("private evolution", seed), settings.max_bytes
    first, plan = to_byte_rows(texts, width), scorer.plan
    union = settings.form == "pre_text"
    noise_std = plan.value_noise_std(plan.clip_norm) if plan.private else 0.0
    threshold = settings.threshold * noise_std

    def init(key):
        del key  # the seed decides all draws
        number = settings.selected * (plan.rounds if union else 1)
        return EvolutionState(first, np.zeros((number, width), np.uint8))

    def step(state, release, round):
        texts = from_byte_rows(state.texts)
        compute = partial(votes, texts, release, round)
        votes_M = load_or_compute(f"round {round} votes", compute)["votes"]
        generator = draws.generator("selection", round)
        selected = select(texts, votes_M, settings, threshold, generator)
        on_round(Evolved(round, texts, votes_M, selected))
        following = texts
        if round < plan.rounds:
            compute = partial(variations, selected, round)
            following = load_or_compute(f"round {round} texts", compute)["texts"].tolist()
        rows = to_byte_rows(selected, width)
        if union:
            before, after = np.split(state.selected, [len(rows) * (round - 1)])
            rows = np.concatenate([before, rows, after[len(rows) :]])
        state = EvolutionState(to_byte_rows(following, width), rows)
        return state, {"votes": np.float32(votes_M.sum())}

    def votes(texts: list[str], release: Release, round: int) -> Arrays:
        # Stored first: another writing of the same variations would be charged as another release.
        compute = partial(ahead, texts, round)
        ahead_MxD = load_or_compute(f"round {round} lookahead", compute)["embeddings"]
        return {"votes": scorer.release(release, ahead_MxD[:, None], round)[:, 0]}

    def ahead(texts: list[str], round: int) -> Arrays:
        """The candidates of the vote, float32 [M, d]: texts' embeddings, or means of variations."""
        if settings.form == "aug_pe" or not settings.lookahead:
            return {"embeddings": np.asarray(embedder(texts))}
        key, total = draws.key("lookahead", round), np.float32(0)
        for index in range(settings.lookahead):
            total = total + np.asarray(embedder(vary(texts, jax.random.fold_in(key, index))))
        return {"embeddings": np.asarray(total, np.float32) / np.float32(settings.lookahead)}

    def variations(selected: list[str], round: int) -> Arrays:
        key = draws.key("variation", round)
        if settings.form == "pre_text":
            return {"texts": np.array(vary(selected, key))}
        repeated = [text for text in selected for _ in range(settings.variations)]
        return {"texts": np.array([*selected, *vary(repeated, key)])}

    return Algorithm("private_evolution", init, step, (scorer.query,))


def selected_texts(state: EvolutionState) -> list[str]:
    """Returns the result, as the head of this file describes; a text may occur more than once."""
    return [text for text in from_byte_rows(state.selected) if text]


def select(
    texts: list[str],
    votes_M: np.ndarray,
    settings: EvolutionSettings,
    threshold: float,
    generator: np.random.Generator,
) -> list[str]:
    """Returns the selected texts, most votes first, as the head of this file describes.

    `threshold` is H, in votes. Where no text has more, "pre_text" draws uniformly from all texts.
    """
    if settings.form == "aug_pe":
        return [texts[i] for i in np.argsort(-votes_M, kind="stable")[: settings.selected]]
    weight_M = np.maximum(votes_M.astype(np.float64) - threshold, 0.0)
    if not weight_M.sum() > 0:
        weight_M = np.ones(len(weight_M))
    drawn = generator.choice(len(texts), settings.population, p=weight_M / weight_M.sum())
    return [texts[i] for i in drawn[np.argsort(-votes_M[drawn], kind="stable")]]
