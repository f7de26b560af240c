"""POPri: policy optimisation for private data.

Source: Hou, Wang, Zhu, Lazar, Fanti 2025, "Private federated learning using preference-optimized
synthetic data", Algorithm 1.

    for each round t:
        draw K prompts, each made of three public texts                        lines 9 and 10
        generate J responses to each prompt with the language model            line 11
        score every response on a sampled cohort: one charged release          lines 13 to 20
            (`candidate_scores`; or rewards from one earlier release, `one_look`)
        pair, for each prompt, the best response with the l-th best            lines 21 to 26
        tune LoRA adapters on the pairs by DPO against the public model        line 27
            (or by GRPO on all responses, which is not the paper's)
    generate the synthetic corpus with the tuned model                         line 30

Only the scores come from clients, so everything that is computed from them costs no further
privacy. The result is the last round's adapters: no checkpoint is chosen by private data.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.one_look import MomentRewards
from jaxpfl.algorithms.stored_rounds import Arrays, LoadOrCompute, PublicDraws, computed
from jaxpfl.checked import Checked, NonNegative, NonNegativeInt, PositiveFraction, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.federated.release.releaser import Release
from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.text.embed import Embedder
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.few_shot import POPRI, FewShot
from jaxpfl.text.generation.language_model import LanguageModel, Writer
from jaxpfl.text.microbatches import read
from jaxpfl.text.preference.groups import (
    Groups,
    advantages,
    groups_of_texts,
    last_tokens,
    preferences,
)
from jaxpfl.text.preference.optimisation import Carried, PreferenceSettings, Tuned, tune


@dataclass(frozen=True)
class PopriSettings(Checked):
    """POPri's settings; the defaults are the paper's (section 5, appendix B).

    Attributes:
      prompts: K, the number of prompts in a round.
      responses: J, the number of responses to each prompt.
      rejected_rank: l, the rank of the rejected response; the best response has rank 1. The loss
        "grpo", which takes all responses, has no use for it.
      format: how public texts become a prompt.
      prompt_tokens: a longer prompt is cut to its last `prompt_tokens` tokens.
      new_tokens: the largest number of tokens that are generated for a response.
      response_tokens: a longer response is cut to its first `response_tokens` tokens.
      least_words: a response of fewer words is no candidate: an empty text lies in the middle of
        all texts, and would be a favourite of clients that score by the mean cosine.
      preference: settings of the tuning. Its `epochs` are the epochs of one round.
      optimizer: "fresh": in every round the optimiser and its schedule start anew; "carried": both
        go on through all rounds, as in the released code.
    """

    prompts: PositiveInt = 1_800
    responses: PositiveInt = 10
    rejected_rank: PositiveInt = 5
    format: FewShot = POPRI
    prompt_tokens: PositiveInt = 256
    new_tokens: PositiveInt = 85
    response_tokens: PositiveInt = 64
    least_words: NonNegativeInt = 1
    temperature: NonNegative = 1.0
    top_p: PositiveFraction = 1.0
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
    optimizer: Literal["fresh", "carried"] = "fresh"
    lora: LoRA = field(default_factory=LoRA)

    def check_fields(self) -> None:
        if self.preference.loss == "grpo":
            if self.responses < 2:
                raise InputError("responses must be at least 2 with the loss 'grpo', found 1")
        elif not 2 <= self.rejected_rank <= self.responses:
            ranks = f"2 .. {self.responses}, the number of responses to a prompt"
            raise InputError(f"rejected_rank must lie in {ranks}, found {self.rejected_rank}")

    @property
    def decoding(self) -> Decoding:
        stop = (self.format.stop,) if self.format.stop else ()
        return Decoding(self.new_tokens, self.temperature, self.top_p, stop=stop)


@dataclass(frozen=True)
class Written:
    """The prompts (K), responses (K lists of J) and noisy scores of a round; public.

    Attributes:
      candidates: the share of the responses that are candidates (`PopriSettings.least_words`).
      pairs: the number of preference pairs, or of GRPO's groups, at most K (see `groups_by_score`).
      record: the tuning's record, see `text.preference.optimisation.Tuned`.
    """

    round: int
    prompts: list[str]
    responses: list[list[str]]
    scores_KxJ: np.ndarray
    candidates: float
    pairs: int
    record: dict[str, Any]

    @property
    def means(self) -> dict[str, float]:
        """The means over the tuning's steps of its records by step; none without a pair."""
        by_step = {name: value for name, value in self.record.items() if isinstance(value, list)}
        return {name: float(np.mean(values)) for name, values in by_step.items()}

    def compared(self, settings: PopriSettings) -> dict[str, list[str]]:
        """The chosen and the rejected texts of the pairs, if there are pairs, and not groups."""
        if not self.pairs or settings.preference.loss == "grpo":
            return {}
        texts_KxJ = np.array(self.responses)
        pairs_2xN = texts_KxJ[pairs_of(texts_KxJ, self.scores_KxJ, settings)]
        return dict(zip(("fid_chosen", "fid_rejected"), pairs_2xN.tolist(), strict=True))


class PopriState(NamedTuple):
    """The state before a round, trees of arrays, public; `optimizer` is () unless it is carried."""

    adapters: Any
    optimizer: Any = ()


def popri(
    generator: LanguageModel,
    samples: Sequence[str],
    scorer: Scorer | MomentRewards,
    embedder: Embedder,
    settings: PopriSettings,
    *,
    seed: int = 0,
    load_or_compute: LoadOrCompute = computed,
    on_round: Callable[[Written], object] = lambda written: None,
    progress: bool = False,
    tune: Callable[..., Tuned] = tune,
) -> Algorithm:
    """Returns POPri, which tunes `generator` towards the clients' texts.

    The population must have the column "embedding", which `text.embed.embed` makes of the clients'
    texts. A round is a function of the state, the seed and the released scores.

    Args:
      generator: PUBLIC model; one with adapters is refused.
      samples: PUBLIC texts that prompts are made of.
      scorer: how clients score responses, by round; or rewards from one release, which ask nobody
        again. It gives the number of rounds.
      embedder: public; must be the one that the clients' texts were embedded with.
      seed: seed of the adapters, the prompts, the responses and the order of the pairs.
      load_or_compute: stores "round 3 responses", "round 3 scores" and "round 3 adapters".
      on_round: is called with the public results of each round.
      tune: the tuning, with the arguments of `text.preference.optimisation.tune`.

    Metrics of a step, all public: `pairs`, `candidates` (see `Written`), and `loss`, `margin` and
    `accuracy`, or of GRPO `loss`, `kl` and `clipped`: means over the steps of the tuning, absent in
    a round without pairs.
    """
    draws = PublicDraws("popri", seed)
    key = draws.key("adapters")
    model, params = lora.attach(generator.model, generator.params, settings.lora, key)
    first, base = adapter_trees.split(params)

    def all_steps():
        # As if every prompt gave a pair in every round.
        return scorer.rounds * settings.preference.steps(settings.prompts)

    def init(key):
        del key  # the seed decides all draws
        adapters, optimizer = jax.tree.map(jnp.array, first), ()
        if settings.optimizer == "carried":
            optimizer = jax.jit(settings.preference.optimizer(all_steps()).init)(adapters)
        return PopriState(adapters, optimizer)

    def params_of(state):
        return adapter_trees.join(state.adapters, base)

    def step(state, release, round):
        prompts = prompts_of(generator, samples, settings.prompts, settings, seed, round)
        compute = partial(written, state, prompts, round)
        responses = load_or_compute(f"round {round} responses", compute)
        texts_KxJ, ended_KxJ = responses["texts"], responses["ended"]
        compute = partial(scores, release, texts_KxJ, round)
        scores_KxJ = load_or_compute(f"round {round} scores", compute)["scores"]
        groups = groups_by_score(generator, prompts, texts_KxJ, ended_KxJ, scores_KxJ, settings)
        compute = partial(tuned, state, groups, round)
        following = load_or_compute(f"round {round} adapters", compute)
        state, record = _unflat(following, state)
        number = 0 if groups is None else len(groups)
        share = float(np.mean(candidates_of(texts_KxJ, settings)))
        results = Written(round, prompts, texts_KxJ.tolist(), scores_KxJ, share, number, record)
        on_round(results)
        means = {name: np.float32(mean) for name, mean in results.means.items()}
        return state, {"pairs": np.int32(number), "candidates": np.float32(share), **means}

    def written(state: PopriState, prompts: list[str], round: int) -> Arrays:
        writer, key = generator.replaced(model, params_of(state)), draws.key("responses", round)
        texts, ended_KxJ = respond(writer, prompts, settings, key, progress)
        return {"texts": np.array(texts), "ended": ended_KxJ}

    def scores(release: Release, texts_KxJ: np.ndarray, round: int) -> Arrays:
        embeddings = np.asarray(embedder(texts_KxJ.reshape(-1).tolist()))
        candidates_KxJxD = embeddings.reshape(*texts_KxJ.shape, -1)
        if isinstance(scorer, MomentRewards):
            used_KxJ = candidates_of(texts_KxJ, settings)
            return {"scores": scorer.of(candidates_KxJxD, used_KxJ)}
        return {"scores": scorer.release(release, candidates_KxJxD, round)}

    def tuned(state: PopriState, groups: Groups | None, round: int) -> Arrays:
        if groups is None:
            return _flat(state, {})
        carries = settings.optimizer == "carried"
        result = tune(
            model,
            params_of(state),
            groups,
            settings.preference,
            seed=draws.seed_of("pairs", round),
            carried=Carried(state.optimizer, all_steps()) if carries else None,
            mesh=generator.mesh,
            progress=progress,
        )
        optimizer = result.optimizer if carries else ()
        return _flat(PopriState(adapter_trees.split(result.params)[0], optimizer), result.record)

    return Algorithm("popri", init, step, scorer.queries, params_of)


def with_adapters(generator: LanguageModel, settings: PopriSettings, params: Any) -> LanguageModel:
    """Returns the generator with the adapters that `Algorithm.params` gives."""
    model = dataclasses.replace(generator.model, lora=settings.lora)
    return generator.replaced(model, params)


def respond(
    writer: LanguageModel,
    prompts: Sequence[str],
    settings: PopriSettings,
    key: jax.Array,
    progress: bool = False,
) -> tuple[list[list[str]], np.ndarray]:
    """Returns J texts for each prompt, some perhaps empty, and whether each is whole: bool [K, J].

    A text is whole if the model ended it and nothing was cut off.
    """
    raw, ended_KxJ, _ = writer.write(
        prompts, key, decoding=settings.decoding, responses=settings.responses, progress=progress
    )
    clean = [settings.format.response(text) for row in raw for text in row]
    cut = writer.pieces(clean, settings.response_tokens)
    step = settings.responses
    whole_KxJ = np.array([a == b for a, b in zip(cut, clean, strict=True)]).reshape(-1, step)
    return [cut[i : i + step] for i in range(0, len(cut), step)], ended_KxJ & whole_KxJ


def groups_by_score(
    generator: LanguageModel,
    prompts: Sequence[str],
    texts_KxJ: np.ndarray,
    ended_KxJ: np.ndarray,
    scores_KxJ: np.ndarray,
    settings: PopriSettings,
) -> Groups | None:
    """Returns the groups to tune on, as token ids, or None where no prompt teaches anything.

    With the loss "grpo" a group is all candidates of a prompt that are not empty, unless their
    scores are equal; else a pair. See `text.preference.groups.groups_of_texts` for how they end.
    """
    advantage_NxG = None
    if settings.preference.loss == "grpo":
        candidates_KxJ = candidates_of(texts_KxJ, settings) & (texts_KxJ != "")
        rows_N, advantage_NxG = advantages(scores_KxJ, candidates_KxJ)
        texts_NxG = np.where(candidates_KxJ, texts_KxJ, "")[rows_N]
        ended_NxG = (ended_KxJ & candidates_KxJ)[rows_N]
    else:
        rows_N, places_2xN = pairs_of(texts_KxJ, scores_KxJ, settings)
        texts_NxG, ended_NxG = texts_KxJ[rows_N, places_2xN].T, ended_KxJ[rows_N, places_2xN].T
    if not len(rows_N):
        return None
    compared = [prompts[int(k)] for k in rows_N], texts_NxG, ended_NxG, advantage_NxG
    most = {"prompt_tokens": settings.prompt_tokens, "response_tokens": settings.response_tokens}
    return groups_of_texts(generator.tokeniser, *compared, format=settings.format, **most)


def pairs_of(
    texts_KxJ: np.ndarray, scores_KxJ: np.ndarray, settings: PopriSettings
) -> tuple[np.ndarray, np.ndarray]:
    """The prompts with a pair, int64 [N], and the places of its chosen and rejected text, [2, N].

    Candidates alone are ranked. A prompt gives no pair where it has too few of them, or where its
    chosen and rejected texts are equal or one of them is empty: it would teach nothing.
    """
    candidates_KxJ = candidates_of(texts_KxJ, settings)
    rows_N, *places = preferences(scores_KxJ, settings.rejected_rank, candidates_KxJ)
    chosen, rejected = (texts_KxJ[rows_N, place_N] for place_N in places)
    used_N = (chosen != "") & (rejected != "") & (chosen != rejected)
    return rows_N[used_N], np.stack(places)[:, used_N]


def candidates_of(texts_KxJ: np.ndarray, settings: PopriSettings) -> np.ndarray:
    """Whether a response is long enough to be a candidate: bool [K, J]."""
    words = [len(text.split()) for text in texts_KxJ.reshape(-1)]
    return np.array(words).reshape(texts_KxJ.shape) >= settings.least_words


def prompts_of(
    generator: Writer,
    samples: Sequence[str],
    number: int,
    settings: PopriSettings,
    seed: int,
    round: int,
) -> list[str]:
    """Returns `number` prompts for a round, cut to their last `settings.prompt_tokens` tokens."""
    prompts = settings.format.prompts(samples, number, seed=seed, round=round)
    return last_tokens(generator.tokeniser, prompts, settings.prompt_tokens)


def synthesise(
    writer: Writer,
    samples: Sequence[str],
    number: int,
    settings: PopriSettings,
    *,
    seed: int,
    part: int = 0,
    progress: bool = False,
) -> tuple[list[str], int]:
    """Returns a synthetic corpus: the text for each of `number` new prompts, unless it is empty.

    And how many of the prompts a server refused. Every `part`, 0, 1, 2, ..., has its own prompts
    and its own random draws.
    """
    # Rounds count from 1, so no round has used these prompts.
    prompts = prompts_of(writer, samples, number, settings, seed, -part)
    key = PublicDraws("popri", seed).key("corpus", part)
    raw = writer.write(prompts, key, decoding=settings.decoding, progress=progress)
    clean = [settings.format.response(text) for (text,) in raw.texts]
    texts = [text for text in writer.pieces(clean, settings.response_tokens) if text]
    return texts, raw.refused


def _flat(state: PopriState, record: Mapping[str, Any]) -> Arrays:
    leaves = enumerate(jax.tree.leaves(state))
    arrays = {f"state.{index}": read(leaf) for index, leaf in leaves}
    return arrays | {f"record.{name}": np.asarray(value) for name, value in record.items()}


def _unflat(arrays: Arrays, like: PopriState) -> tuple[PopriState, dict[str, Any]]:
    leaves, tree = jax.tree.flatten(like)
    state = [jnp.asarray(arrays[f"state.{index}"]) for index in range(len(leaves))]
    recorded = {name: value for name, value in arrays.items() if name.startswith("record.")}
    record = {name.removeprefix("record."): value.tolist() for name, value in recorded.items()}
    return jax.tree.unflatten(tree, state), record
