"""POPri: policy optimisation for private data.

Source: Hou, Wang, Zhan, Shrivastava, Fanti, Liu et al. 2025, "Private federated learning using
preference-optimized synthetic data", Algorithm 1.

    for each round t:
        prompts    K, each of three public texts, drawn anew          lines 9 and 10
        responses  J to each prompt, by the language model            line 11
        scores     of every response, by sampled clients: charged     lines 13 to 20
        pairs      per prompt the best response over the l-th best    lines 21 to 26
        tuning     LoRA adapters by DPO against the public model      line 27
    the model writes the synthetic corpus                             line 30

Only the scores come from clients; whatever is done with them costs no more privacy. No checkpoint
is chosen by private data: the last round's adapters are the result.
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
from jaxpfl.algorithms.stored_rounds import Arrays, Hooks, PublicDraws
from jaxpfl.checks import non_negative, non_negative_int, positive_int, real
from jaxpfl.errors import InputError
from jaxpfl.federated.release import Release
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.text.embed import Embedder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.few_shot import POPRI, FewShot
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.preference.optimisation import PreferenceSettings, tune
from jaxpfl.text.preference.pairs import Pairs
from jaxpfl.text.preference.ranking import preferences
from jaxpfl.text.preference.responses import last_tokens, pairs_of_texts


@dataclass(frozen=True)
class PopriSettings:
    """POPri's settings; the defaults are the paper's (section 5, appendix B).

    Attributes:
      prompts: K, the number of prompts in a round.
      responses: J, the number of responses to each prompt.
      rejected_rank: l, the rank of the rejected response; the best response has rank 1.
      format: how public texts become a prompt.
      prompt_tokens: a longer prompt keeps its last `prompt_tokens` tokens.
      new_tokens: tokens that are generated of a response, at most.
      response_tokens: a longer response keeps its first `response_tokens` tokens.
      temperature, top_p: of the generation.
      preference: of the tuning; its `epochs` are those of one round, and its optimiser starts anew
        in every round.
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
    def decoding(self) -> Decoding:
        stop = (self.format.stop,) if self.format.stop else ()
        return Decoding(self.new_tokens, self.temperature, self.top_p, stop=stop)


@dataclass(frozen=True)
class Written:
    """One round's prompts, their responses and how the model was tuned on them; public.

    Attributes:
      prompts: K texts.
      responses: K lists of J texts.
      scores_KxJ: the clients' noisy scores.
      pairs: the number of preference pairs; fewer than K where two responses are the same.
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
    """Returns POPri, which tunes `generator` towards the clients' texts in the plan's rounds.

    Clients hold a column "embedding": the embeddings of their texts by `embedder`
    (`text.embed.embed`). A round is a function of the state, the seed and the released scores.

    Args:
      generator: PUBLIC, without adapters.
      samples: PUBLIC texts that prompts are made of.
      scorer: how clients score, and the plan.
      embedder: public; the one that the clients' texts were embedded with.
      seed: of adapters, prompts, responses and the order of pairs.
      hooks: stores "round 3 responses", "round 3 scores" and "round 3 adapters".

    Raises:
      InputError: `generator` has adapters already.

    Metrics of a step, all public: `pairs`, and of the tuning `loss`, `margin` and `accuracy` (their
    means over its steps; none without a pair).
    """
    draws = PublicDraws("popri", seed)
    model, params = lora.attach(
        generator.model, generator.params, settings.lora, draws.key("adapters")
    )
    first, base = lora.split(params)
    rounds = _Rounds(
        generator,
        model,
        base,
        samples,
        scorer,
        embedder,
        settings,
        draws,
        Hooks() if hooks is None else hooks,
    )

    def init(key):
        del key  # all draws follow from the seed
        return PopriState(jax.tree.map(jnp.array, first))

    def params_of(state):
        return lora.join(state.adapters, base)

    return Algorithm("popri", init, rounds.step, (scorer.query,), params_of)


@dataclass(frozen=True, eq=False)
class _Rounds:
    """The rounds of Algorithm 1, and the public things that all of them share.

    Attributes:
      model: the generator's network with adapters.
      base: the generator's parameters without adapters.
    """

    generator: LanguageModel
    model: Decoder
    base: Any
    samples: Sequence[str]
    scorer: Scorer
    embedder: Embedder
    settings: PopriSettings
    draws: PublicDraws
    hooks: Hooks[Written]

    def step(
        self, state: PopriState, release: Release, round: int
    ) -> tuple[PopriState, Mapping[str, Any]]:
        """One round of Algorithm 1; each of its lines is a method, in the same order, below."""
        stored = self.hooks.stored
        prompts = self.prompts(round)
        responses = stored(round, "responses", self.responses, state, prompts, round)
        scores = stored(round, "scores", self.scores, release, responses, round)
        pairs = self.pairs(prompts, responses, scores)
        tuned = stored(round, "adapters", self.tuned, state, pairs, round)

        adapters, record = _unflat(tuned, state.adapters)
        number = 0 if pairs is None else len(pairs)
        texts_KxJ, scores_KxJ = responses["texts"].tolist(), scores["scores"]
        self.hooks.on_round(Written(round, prompts, texts_KxJ, scores_KxJ, number, record))
        return PopriState(adapters), {"pairs": np.int32(number), **_means(record)}

    def prompts(self, round: int) -> list[str]:
        """K prompts, each of public texts drawn without replacement: lines 9 and 10."""
        settings = self.settings
        return prompts_of(
            self.generator, self.samples, settings.prompts, settings, self.draws.seed, round
        )

    def responses(self, state: PopriState, prompts: list[str], round: int) -> Arrays:
        """J responses to each prompt by the model as it is now: line 11."""
        writer = self.generator.replaced(self.model, lora.join(state.adapters, self.base))
        key = self.draws.key("responses", round)
        texts, ended_KxJ = respond(writer, prompts, self.settings, key, self.hooks.progress)
        return {"texts": np.array(texts), "ended": ended_KxJ}

    def scores(self, release: Release, responses: Arrays, round: int) -> Arrays:
        """The noisy sum of the clients' scores of every response: lines 13 to 20; charged."""
        texts_KxJ = responses["texts"]
        embeddings = np.asarray(self.embedder(texts_KxJ.reshape(-1).tolist()))
        candidates_KxJxD = embeddings.reshape(*texts_KxJ.shape, -1)
        return {"scores": self.scorer.release(release, candidates_KxJxD, round)}

    def pairs(self, prompts: list[str], responses: Arrays, scores: Arrays) -> Pairs | None:
        """Of each prompt the best response and the one of rank l: lines 21 to 26."""
        return preference_pairs(
            self.generator,
            prompts,
            responses["texts"],
            responses["ended"],
            scores["scores"],
            self.settings,
        )

    def tuned(self, state: PopriState, pairs: Pairs | None, round: int) -> Arrays:
        """The adapters after DPO on the pairs against the public model: line 27."""
        if pairs is None:
            return _flat(state.adapters, {})
        found = tune(
            self.model,
            lora.join(state.adapters, self.base),
            pairs,
            self.settings.preference,
            seed=self.draws.seed_of("pairs", round),
            mesh=self.generator.mesh,
            progress=self.hooks.progress,
        )
        return _flat(lora.split(found.params)[0], found.record)


def with_adapters(generator: LanguageModel, settings: PopriSettings, params: Any) -> LanguageModel:
    """Returns the generator with the adapters that `Algorithm.params` gives."""
    model = dataclasses.replace(generator.model, lora=settings.lora)
    return generator.replaced(model, params)


def _means(record: Mapping[str, Any]) -> dict[str, np.floating]:
    """Means over the steps of the tuning."""
    names = [name for name in ("loss", "margin", "accuracy") if name in record]
    return {name: np.float32(np.mean(record[name])) for name in names}


def respond(
    writer: LanguageModel,
    prompts: Sequence[str],
    settings: PopriSettings,
    key: jax.Array,
    progress: bool = False,
) -> tuple[list[list[str]], np.ndarray]:
    """Returns J texts for each prompt, cleaned and cut as `settings` say; some may be empty.

    Returns:
      The texts, and bool [K, J]: which of them ended by themselves and were cut nowhere.
    """
    raw, ended_KxJ = writer.write_to_end(
        prompts,
        key,
        decoding=settings.decoding,
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
) -> Pairs | None:
    """Returns pairs of token ids, or None where no prompt gives a pair.

    A prompt whose chosen and rejected texts are equal, or one of them empty, gives none: it would
    teach nothing. See `text.preference.responses.pairs_of_texts` for how responses end.
    """
    chosen_K, rejected_K = preferences(scores_KxJ, settings.rejected_rank)
    rows = np.arange(len(texts_KxJ))
    chosen, rejected = texts_KxJ[rows, chosen_K], texts_KxJ[rows, rejected_K]
    (used,) = np.nonzero((chosen != "") & (rejected != "") & (chosen != rejected))
    if not len(used):
        return None
    return pairs_of_texts(
        generator.tokeniser,
        [prompts[k] for k in used.tolist()],
        (chosen[used].tolist(), ended_KxJ[used, chosen_K[used]].tolist()),
        (rejected[used].tolist(), ended_KxJ[used, rejected_K[used]].tolist()),
        format=settings.format,
        prompt_tokens=settings.prompt_tokens,
        response_tokens=settings.response_tokens,
    )


def prompts_of(
    generator: LanguageModel,
    samples: Sequence[str],
    number: int,
    settings: PopriSettings,
    seed: int,
    round: int,
) -> list[str]:
    """Returns `number` prompts of a round, each cut to the tokens that the settings allow."""
    prompts = settings.format.prompts(samples, number, seed=seed, round=round)
    return last_tokens(generator.tokeniser, prompts, settings.prompt_tokens)


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
    """Returns the synthetic corpus: one text to each of `number` new prompts, without empty ones.

    Args:
      part: 0, 1, 2, ...; each part of a corpus has prompts and draws of its own.
    """
    positive_int("number", number)
    non_negative_int("part", part)
    # The algorithm's rounds count from 1, so none of them has these prompts.
    prompts = prompts_of(writer, samples, number, settings, seed, -part)
    key = PublicDraws("popri", seed).key("corpus", part)
    raw = writer.write(prompts, key, decoding=settings.decoding, progress=progress)
    clean = [settings.format.response(text) for (text,) in raw]
    return [text for text in writer.shortened(clean, settings.response_tokens) if text]


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
