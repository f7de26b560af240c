"""POPri: policy optimisation for private data.

Source: Hou, Wang, Zhan, Shrivastava, Fanti, Liu et al. 2025, "Private federated learning using
preference-optimized synthetic data", Algorithm 1.

    for each round t:
        prompts    K, each of three public texts, drawn anew
        responses  J to each prompt, by the language model
        scores     of every response, by sampled clients, through the door       charged
        pairs      of each prompt, the response of the best score over that of rank l
        tune       LoRA adapters by DPO against the public model
    the model writes the synthetic corpus

Only the scores come from clients; whatever is done with them costs nothing more. No checkpoint is
chosen by private data: the last round's adapters are the result.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxpfl.checks import non_negative, non_negative_int, positive_int, real
from jaxpfl.errors import InputError
from jaxpfl.models import lora
from jaxpfl.models.lora import LoRA
from jaxpfl.text.embed import Embedder
from jaxpfl.text.few_shot import POPRI, FewShot
from jaxpfl.text.generate import prompt_ids
from jaxpfl.text.language_model import LanguageModel
from jaxpfl.text.preference import PreferenceSettings, pairs_of, tune
from jaxpfl.text.ranking import preferences
from jaxpfl.text.sampling import Sampling

Arrays = Mapping[str, np.ndarray]
Keep = Callable[[str, Callable[[], Arrays]], Arrays]
"""`keep(name, make)` returns what `make()` made, now or in an earlier attempt at the same run."""


def nothing_kept(name: str, make: Callable[[], Arrays]) -> Arrays:
    del name
    return make()


class Scorer(Protocol):
    """Releases clients' noisy scores, as `algorithms.candidate_scores.CandidateScores` does."""

    def release(self, candidates_KxJxD: Any, *, round: int) -> np.ndarray: ...


@dataclass(frozen=True)
class PopriSettings:
    """POPri's numbers; the defaults are the paper's (section 5, appendix B).

    Attributes:
      prompts: K, a round.
      responses: J, to each prompt.
      rejected_rank: l; the best response has rank 1.
      format: how public texts become a prompt.
      prompt_tokens: a prompt is cut to its last tokens.
      new_tokens: so many are generated of a response ...
      response_tokens: ... and so many of its text are kept.
      temperature, top_p: of the generation.
      preference: of the tuning, `epochs` a round; its optimiser starts anew in every round.
      lora: the adapters.
    """

    prompts: int = 1_800
    responses: int = 10
    rejected_rank: int = 5
    format: FewShot = POPRI
    prompt_tokens: int = 256
    new_tokens: int = 85
    response_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
    lora: LoRA = field(default_factory=LoRA)

    def __post_init__(self) -> None:
        for name in ("prompts", "responses", "prompt_tokens", "new_tokens", "response_tokens"):
            positive_int(name, getattr(self, name))
        if not 2 <= positive_int("rejected_rank", self.rejected_rank) <= self.responses:
            raise InputError(
                f"rejected_rank must lie in 2 .. {self.responses}, the number of responses to a "
                f"prompt, found {self.rejected_rank}"
            )
        non_negative("temperature", self.temperature)
        if not 0 < real("top_p", self.top_p) <= 1:
            raise InputError(f"top_p must lie in 0 .. 1 and not be 0, found {self.top_p!r}")

    @property
    def sampling(self) -> Sampling:
        stop = (self.format.stop,) if self.format.stop else ()
        return Sampling(self.new_tokens, self.temperature, self.top_p, stop=stop)


@dataclass(frozen=True)
class Written:
    """One round's prompts, their responses and how the model was tuned on them; public.

    Attributes:
      prompts: K texts.
      responses: K lists of J texts.
      scores_KxJ: the clients' noisy scores.
      pairs: number of preference pairs; fewer than K where two responses are the same.
      record: of the tuning, see `text.preference.Tuned`.
    """

    round: int
    prompts: list[str]
    responses: list[list[str]]
    scores_KxJ: np.ndarray
    pairs: int
    record: dict[str, Any]


def popri(
    generator: LanguageModel,
    samples: Sequence[str],
    scorer: Scorer,
    embedder: Embedder,
    settings: PopriSettings,
    *,
    rounds: int,
    seed: int,
    keep: Keep = nothing_kept,
    told: Callable[[Written], None] | None = None,
    progress: bool = False,
) -> LanguageModel:
    """Tunes `generator` towards the clients' texts; returns it with adapters.

    A function of its arguments and of the scores that are released: a run that was stopped goes on
    from what `keep` has of it, to the same bits.

    Args:
      generator: PUBLIC, without adapters.
      samples: PUBLIC texts that prompts are made of.
      scorer: of the clients, whose plan has at least `rounds` rounds.
      embedder: public; the one that the clients' texts were embedded with.
      seed: of prompts, responses and the order of pairs.
      keep: stores each phase's result: "round 3 responses", "round 3 scores", "round 3 adapters".
      told: is called after each round.
      progress: show bars on stderr.

    Raises:
      InputError: too few samples, or a generator with adapters.
      BudgetExhausted: the next round's scores do not fit the ledger's budget.
    """
    positive_int("rounds", rounds)
    model, params = lora.attach(
        generator.model, generator.params, settings.lora, _key(seed, "adapters")
    )
    adapters, base = lora.split(params)
    for round in range(1, rounds + 1):
        prompts = settings.format.prompts(samples, settings.prompts, seed=seed, round=round)
        prompts = _last_tokens(generator, prompts, settings.prompt_tokens)

        def responses(prompts=prompts, adapters=adapters, round=round) -> Arrays:
            writer = generator.replaced(model, lora.join(adapters, base))
            key = _key(seed, "responses", round)
            texts, ended_KxJ = respond(writer, prompts, settings, key, progress)
            return {"texts": np.array(texts), "ended": ended_KxJ}

        written = keep(f"round {round} responses", responses)
        texts_KxJ = written["texts"]

        def scores(texts_KxJ=texts_KxJ, round=round) -> Arrays:
            embeddings = np.asarray(embedder(texts_KxJ.reshape(-1).tolist()))
            candidates_KxJxD = embeddings.reshape(*texts_KxJ.shape, -1)
            return {"scores": scorer.release(candidates_KxJxD, round=round)}

        scores_KxJ = keep(f"round {round} scores", scores)["scores"]
        pairs = preference_pairs(
            generator, prompts, texts_KxJ, written["ended"], scores_KxJ, settings
        )

        def tuned(pairs=pairs, adapters=adapters, round=round) -> Arrays:
            if pairs is None:
                return _flat(adapters, {})
            found = tune(
                model,
                lora.join(adapters, base),
                pairs,
                settings.preference,
                seed=_number(seed, "pairs", round),
                mesh=generator.mesh,
                progress=progress,
            )
            return _flat(lora.split(found.params)[0], found.record)

        adapters, record = _unflat(keep(f"round {round} adapters", tuned), adapters)
        if told is not None:
            texts = texts_KxJ.tolist()
            count = 0 if pairs is None else len(pairs)
            told(Written(round, prompts, texts, scores_KxJ, count, record))
    return generator.replaced(model, lora.join(adapters, base))


def respond(
    writer: LanguageModel,
    prompts: Sequence[str],
    settings: PopriSettings,
    key: jax.Array,
    progress: bool = False,
) -> tuple[list[list[str]], np.ndarray]:
    """J texts for each prompt, cleaned and cut as `settings` say; some may be empty.

    Returns:
      The texts, and bool [K, J]: which are as they ended by themselves, cut nowhere.
    """
    raw, ended_KxJ = writer.write_to_end(
        prompts,
        key,
        sampling=settings.sampling,
        responses=settings.responses,
        progress=progress,
    )
    clean = [settings.format.response(text) for row in raw for text in row]
    cut = writer.shortened(clean, settings.response_tokens)
    step = settings.responses
    whole_KxJ = np.array([a == b for a, b in zip(cut, clean, strict=True)]).reshape(-1, step)
    return [cut[i : i + step] for i in range(0, len(cut), step)], ended_KxJ & whole_KxJ


def preference_pairs(
    generator: LanguageModel,
    prompts: Sequence[str],
    texts_KxJ: np.ndarray,
    ended_KxJ: np.ndarray,
    scores_KxJ: np.ndarray,
    settings: PopriSettings,
) -> Any:
    """Pairs of token ids (`text.preference.Pairs`), or None where no prompt gives one.

    A prompt whose chosen and rejected texts are the same, or one of them empty, gives none: it
    would teach nothing. A response that ended by itself is followed by what ended it: the format's
    stop string, with what stands before that in a prompt, or else end-of-text, if the tokeniser has
    it. Where that does not fit beside the prompt it is left out.
    """
    chosen_K, rejected_K = preferences(scores_KxJ, settings.rejected_rank)
    rows = np.arange(len(texts_KxJ))
    chosen, rejected = texts_KxJ[rows, chosen_K].tolist(), texts_KxJ[rows, rejected_K].tolist()
    used = [k for k in rows.tolist() if chosen[k] and rejected[k] and chosen[k] != rejected[k]]
    if not used:
        return None
    prompt_rows = prompt_ids(generator.tokeniser, [prompts[k] for k in used])
    longest = settings.prompt_tokens + settings.response_tokens
    room = [longest - min(len(row), settings.prompt_tokens) for row in prompt_rows]

    def ids(texts: list[str], place_K: np.ndarray) -> list[np.ndarray]:
        ended = ended_KxJ[used, place_K[used]].tolist()
        return _with_ends(generator, [texts[k] for k in used], ended, room, settings)

    return pairs_of(
        prompt_rows,
        ids(chosen, chosen_K),
        ids(rejected, rejected_K),
        prompt_tokens=settings.prompt_tokens,
        total_tokens=longest,
    )


def _with_ends(
    generator: LanguageModel,
    texts: list[str],
    ended: list[bool],
    room: list[int],
    settings: PopriSettings,
) -> list[np.ndarray]:
    """Token ids of responses, each with what ended it, unless it was cut or there is no room."""
    tokeniser = generator.tokeniser
    rows = tokeniser.encode(texts)
    if settings.format.stop:
        # Tokenised as one text: a token may hold the last characters of one and the next's first.
        ending = _ending(settings.format)
        longer = tokeniser.encode([text + ending for text in texts])
    elif tokeniser.end_of_text is not None:
        longer = [np.append(row, np.int32(tokeniser.end_of_text)) for row in rows]
    else:
        return rows
    return [
        longest if by_itself and len(longest) <= left else row
        for row, longest, by_itself, left in zip(rows, longer, ended, room, strict=True)
    ]


def _ending(format: FewShot) -> str:
    """What follows a text in a prompt, to the end of the stop string that it holds."""
    following = format.after + format.heading.format(number=format.shots + 2)
    before, found, _ = following.partition(format.stop)
    return before + found if found else format.stop


def synthesise(
    writer: LanguageModel,
    samples: Sequence[str],
    number: int,
    settings: PopriSettings,
    *,
    seed: int,
    part: int = 0,
    progress: bool = False,
) -> list[str]:
    """The synthetic corpus: about `number` texts from new prompts, one to each, none empty.

    Another `part`, 0, 1, 2, ..., has prompts and draws of its own.
    """
    positive_int("number", number)
    non_negative_int("part", part)
    # The algorithm's rounds count from 1: none has these prompts.
    prompts = settings.format.prompts(samples, number, seed=seed, round=-part)
    prompts = _last_tokens(writer, prompts, settings.prompt_tokens)
    key = _key(seed, "corpus", part)
    raw = writer.write(prompts, key, sampling=settings.sampling, progress=progress)
    clean = [settings.format.response(text) for (text,) in raw]
    return [text for text in writer.shortened(clean, settings.response_tokens) if text]


def _last_tokens(generator: LanguageModel, prompts: list[str], tokens: int) -> list[str]:
    """Prompts cut to their last tokens, as they are tokenised again."""
    tokeniser = generator.tokeniser
    room = tokens - (tokeniser.start is not None)

    def fitting(prompt: str, row: np.ndarray) -> str:
        kept = room
        # What is left of a word, or of a character, may be more tokens than it was.
        while len(row) > room:
            prompt = tokeniser.decode(row[-kept:] if kept else []).lstrip("\ufffd")
            (row,) = tokeniser.encode([prompt])
            kept = min(kept, len(row)) - 1
        return prompt

    rows = tokeniser.encode(prompts)
    return [fitting(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]


def _flat(adapters: Any, record: Mapping[str, Any]) -> Arrays:
    """Adapters and the tuning's record as plain arrays with names."""
    arrays = {
        f"{name}.{leaf}": np.asarray(value)
        for name, part in adapters.items()
        for leaf, value in part.items()
    }
    return arrays | {f"record.{name}": np.asarray(value) for name, value in record.items()}


def _unflat(arrays: Arrays, like: Any) -> tuple[Any, dict[str, Any]]:
    adapters = {
        name: {leaf: jax.numpy.asarray(arrays[f"{name}.{leaf}"]) for leaf in part}
        for name, part in like.items()
    }
    record = {
        name.removeprefix("record."): value.tolist()
        for name, value in arrays.items()
        if name.startswith("record.")
    }
    return adapters, record


def _number(seed: int, purpose: str, round: int = 0) -> int:
    digest = hashlib.sha256(f"popri {purpose} {seed} {round}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _key(seed: int, purpose: str, round: int = 0) -> jax.Array:
    """A public key: what it draws goes to the clients anyhow."""
    return jax.random.key(_number(seed, purpose, round))
