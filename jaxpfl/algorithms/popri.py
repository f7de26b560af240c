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

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.rounds_of_text import Arrays, Hooks, number_of
from jaxpfl.checks import non_negative, non_negative_int, positive_int, real
from jaxpfl.errors import InputError
from jaxpfl.models.layers import lora
from jaxpfl.models.layers.lora import LoRA
from jaxpfl.text.embed import Embedder
from jaxpfl.text.generation.few_shot import POPRI, FewShot
from jaxpfl.text.generation.generate import prompt_ids
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.sampling import Sampling
from jaxpfl.text.preference.optimisation import PreferenceSettings, pairs_of, tune
from jaxpfl.text.preference.ranking import preferences


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
      record: of the tuning, see `text.preference.optimisation.Tuned`.
    """

    round: int
    prompts: list[str]
    responses: list[list[str]]
    scores_KxJ: np.ndarray
    pairs: int
    record: dict[str, Any]


class PopriState(NamedTuple):
    """What a round starts from; public.

    Attributes:
      adapters: LoRA's, a tree of arrays.
    """

    adapters: Any


def popri(
    generator: LanguageModel,
    samples: Sequence[str],
    scorer: Scorer,
    embedder: Embedder,
    settings: PopriSettings,
    *,
    seed: int = 0,
    hooks: Hooks[Written] | None = None,
) -> Algorithm:
    """Returns POPri: it tunes `generator` towards the clients' texts, in the rounds of the plan.

    Clients hold the column "embedding", of their texts by `embedder` (`text.embed.embed`). A round
    is a function of the state, the seed and the scores that are released.

    Args:
      generator: PUBLIC, without adapters.
      samples: PUBLIC texts that prompts are made of.
      scorer: how clients score, and the plan.
      embedder: public; the one that the clients' texts were embedded with.
      seed: of adapters, prompts, responses and the order of pairs.
      hooks: stores "round 3 responses", "round 3 scores", "round 3 adapters".

    Raises:
      InputError: a generator with adapters.

    Metrics of a step, all public: `pairs`, and of the tuning `loss`, `margin` and `accuracy` (their
    means over its steps; none without a pair).
    """
    hooks = Hooks() if hooks is None else hooks
    model, params = lora.attach(
        generator.model, generator.params, settings.lora, _key(seed, "adapters")
    )
    first, base = lora.split(params)

    def init(key):
        del key  # all draws follow from the seed
        return PopriState(jax.tree.map(jnp.array, first))

    def step(state, release, round):
        prompts = settings.format.prompts(samples, settings.prompts, seed=seed, round=round)
        prompts = _last_tokens(generator, prompts, settings.prompt_tokens)

        def responses() -> Arrays:
            writer = generator.replaced(model, lora.join(state.adapters, base))
            key = _key(seed, "responses", round)
            texts, ended_KxJ = respond(writer, prompts, settings, key, hooks.progress)
            return {"texts": np.array(texts), "ended": ended_KxJ}

        written = hooks.keep(f"round {round} responses", responses)
        texts_KxJ = written["texts"]

        def scores() -> Arrays:
            embeddings = np.asarray(embedder(texts_KxJ.reshape(-1).tolist()))
            candidates_KxJxD = embeddings.reshape(*texts_KxJ.shape, -1)
            return {"scores": scorer.release(release, candidates_KxJxD, round)}

        scores_KxJ = hooks.keep(f"round {round} scores", scores)["scores"]
        pairs = preference_pairs(
            generator, prompts, texts_KxJ, written["ended"], scores_KxJ, settings
        )

        def tuned() -> Arrays:
            if pairs is None:
                return _flat(state.adapters, {})
            found = tune(
                model,
                lora.join(state.adapters, base),
                pairs,
                settings.preference,
                seed=_number(seed, "pairs", round),
                mesh=generator.mesh,
                progress=hooks.progress,
            )
            return _flat(lora.split(found.params)[0], found.record)

        adapters, record = _unflat(hooks.keep(f"round {round} adapters", tuned), state.adapters)
        count = 0 if pairs is None else len(pairs)
        texts = texts_KxJ.tolist()
        hooks.on_round(Written(round, prompts, texts, scores_KxJ, count, record))
        return PopriState(adapters), {"pairs": np.int32(count), **_means(record)}

    def params_of(state):
        return lora.join(state.adapters, base)

    return Algorithm("popri", init, step, (scorer.query,), params_of)


def with_adapters(generator: LanguageModel, settings: PopriSettings, params: Any) -> LanguageModel:
    """The generator with adapters, as `Algorithm.params` gives them."""
    model = dataclasses.replace(generator.model, lora=settings.lora)
    return generator.replaced(model, params)


def _means(record: Mapping[str, Any]) -> dict[str, np.floating]:
    """The tuning's record as scalars."""
    names = [name for name in ("loss", "margin", "accuracy") if name in record]
    return {name: np.float32(np.mean(record[name])) for name in names}


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
    """Pairs of token ids (`text.preference.optimisation.Pairs`), or None where no prompt gives one.

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
    return number_of("popri", purpose, seed, round) >> 33


def _key(seed: int, purpose: str, round: int = 0) -> jax.Array:
    """A public key: what it draws goes to the clients anyhow."""
    return jax.random.key(_number(seed, purpose, round))
