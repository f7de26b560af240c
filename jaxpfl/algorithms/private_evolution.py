"""Private evolution: synthetic texts that clients vote on, and that the server varies.

Sources: PrE-Text (Hou, Shrivastava, Zhan, Conway, Le, Sagar, Fanti, Lazar 2024, "PrE-Text: Training
Language Models on Private Federated Data in the Age of LLMs", Algorithm 1) and Aug-PE (Xie, Lin,
Backurs, Gopi, Yu et al. 2024, "Differentially Private Synthetic Data via Foundation Model APIs 2:
Text", Algorithm 1).

    population  M texts that the server writes
    for each round t:
        lookahead   the mean embedding of each text's variations         (PrE-Text alone)
        votes       of sampled clients, each text for its nearest        charged, through the door
        select      PrE-Text: M draws in proportion to max(votes - H, 0)
                    Aug-PE: the M / variations texts of most votes
        vary        PrE-Text: one variation of every drawn text
                    Aug-PE: the selected texts, and variations of each
    the texts of the last selection are the result; an LLM expands them

A client votes once with each of at most `max_texts` of its texts, so its votes' L2 norm is at most
`max_texts` (`algorithms.candidate_scores`, kind nn_histogram). Texts only the server made are ever
varied, so nothing but the votes costs privacy.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np

from jaxpfl.algorithms.popri import Arrays, Keep, Scorer, nothing_kept
from jaxpfl.checks import non_negative, non_negative_int, one_of, positive_int
from jaxpfl.errors import InputError
from jaxpfl.text.embed import Embedder

Form = Literal["pre_text", "aug_pe"]


class Vary(Protocol):
    """Makes each text into another like it, with public models only (`text.variation`)."""

    def __call__(self, texts: Sequence[str], key: jax.Array) -> list[str]: ...


@dataclass(frozen=True)
class EvolutionSettings:
    """How texts evolve.

    Attributes:
      form: "pre_text" or "aug_pe".
      population: M, the texts that are voted on in a round.
      threshold: H, in votes: fewer count as none ("pre_text"). With Gaussian noise of standard
        deviation s, of M texts that nobody votes for M Q(H / s) pass.
      lookahead: variations of a text whose mean embedding is voted on, in its place; 0: its own
        embedding ("pre_text").
      variations: M / (1 + variations) texts are selected, each is kept and varied so often
        ("aug_pe").
    """

    form: Form = "pre_text"
    population: int = 1_800
    threshold: float = 0.0
    lookahead: int = 4
    variations: int = 3

    def __post_init__(self) -> None:
        one_of("form", self.form, ("pre_text", "aug_pe"))
        positive_int("population", self.population)
        non_negative("threshold", self.threshold)
        non_negative_int("lookahead", self.lookahead)
        positive_int("variations", self.variations)
        if self.form == "aug_pe" and self.population % (1 + self.variations):
            raise InputError(
                f"population must be a multiple of 1 + variations = {1 + self.variations} in "
                f"'aug_pe', found {self.population}"
            )


@dataclass(frozen=True)
class Evolved:
    """One round's texts, the noisy votes for them, and who was selected; public.

    Attributes:
      texts: M.
      votes_M: float32.
      selected: the selected texts, in order of selection; a text may occur more than once.
    """

    round: int
    texts: list[str]
    votes_M: np.ndarray
    selected: list[str]


def private_evolution(
    texts: Sequence[str],
    vary: Vary,
    scorer: Scorer,
    embedder: Embedder,
    settings: EvolutionSettings,
    *,
    rounds: int,
    seed: int,
    keep: Keep = nothing_kept,
    told: Callable[[Evolved], None] | None = None,
) -> list[str]:
    """The texts that clients voted for last, most votes first; a function of its arguments.

    Args:
      texts: PUBLIC or synthetic, `population` of them: the first round's.
      vary: see `Vary`.
      scorer: of the clients, of kind "nn_histogram".
      embedder: public; the one that the clients' texts were embedded with.
      seed: of selections and variations.
      keep: stores each phase's result, see `popri.Keep`.
      told: is called after each round.

    Raises:
      InputError: not as many texts as the population has.
      BudgetExhausted: the next round's votes do not fit the ledger's budget.
    """
    positive_int("rounds", rounds)
    current = list(texts)
    if len(current) != settings.population:
        raise InputError(
            f"private evolution starts from population = {settings.population} texts, found "
            f"{len(current)}"
        )
    selected: list[str] = []
    for round in range(1, rounds + 1):

        def voted(current=current, round=round) -> Arrays:
            ahead_MxD = _ahead(current, vary, embedder, settings, _key(seed, "lookahead", round))
            votes_M = scorer.release(ahead_MxD[:, None], round=round)[:, 0]
            return {"votes": votes_M}

        votes_M = keep(f"round {round} votes", voted)["votes"]
        selected = select(current, votes_M, settings, _generator(seed, round))
        if told is not None:
            told(Evolved(round, current, votes_M, selected))
        if round == rounds:
            break

        def varied(selected=selected, round=round) -> Arrays:
            key = _key(seed, "variation", round)
            if settings.form == "pre_text":
                return {"texts": np.array(vary(selected, key))}
            again = [text for text in selected for _ in range(settings.variations)]
            return {"texts": np.array([*selected, *vary(again, key)])}

        current = keep(f"round {round} texts", varied)["texts"].tolist()
    return selected


def select(
    texts: list[str],
    votes_M: np.ndarray,
    settings: EvolutionSettings,
    generator: np.random.Generator,
) -> list[str]:
    """The texts that live on, most votes first; see the head of this file.

    Where no text has more votes than the threshold, "pre_text" draws from all alike.
    """
    if settings.form == "aug_pe":
        count = settings.population // (1 + settings.variations)
        return [texts[i] for i in np.argsort(-votes_M, kind="stable")[:count]]
    weight_M = np.maximum(votes_M.astype(np.float64) - settings.threshold, 0.0)
    if not weight_M.sum() > 0:
        weight_M = np.ones(len(weight_M))
    drawn = generator.choice(len(texts), settings.population, p=weight_M / weight_M.sum())
    return [texts[i] for i in drawn[np.argsort(-votes_M[drawn], kind="stable")]]


def _ahead(
    texts: list[str],
    vary: Vary,
    embedder: Embedder,
    settings: EvolutionSettings,
    key: jax.Array,
) -> np.ndarray:
    """What is voted on, float32 [M, d]: texts, or the means of their variations."""
    if settings.form == "aug_pe" or not settings.lookahead:
        return np.asarray(embedder(texts))
    total: np.ndarray | float = 0.0
    for index in range(settings.lookahead):
        total = total + np.asarray(embedder(vary(texts, jax.random.fold_in(key, index))))
    return np.asarray(total, np.float32) / np.float32(settings.lookahead)


def _number(seed: int, purpose: str, round: int) -> int:
    digest = hashlib.sha256(f"private evolution {purpose} {seed} {round}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _key(seed: int, purpose: str, round: int) -> jax.Array:
    """A public key: what it draws is made from what clients' votes have released."""
    return jax.random.key(_number(seed, purpose, round) >> 33)


def _generator(seed: int, round: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=_number(seed, "selection", round)))
