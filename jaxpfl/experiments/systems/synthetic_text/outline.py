"""The outline of a study of synthetic text: what a dry run checks, see `engine.outline`."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.canaries import ScoreCanaries
from jaxpfl.algorithms.candidate_scores import ScoreKind, Scorer
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.published import PublishedModelConfig
from jaxpfl.experiments.engine import outline as engine
from jaxpfl.experiments.engine.build import build_fed_avg
from jaxpfl.experiments.engine.outline import (
    Clients,
    Outline,
    OutlinedModel,
    Published,
    cached_plan,
    tracing,
)
from jaxpfl.experiments.systems.synthetic_text.config import (
    EVOLVING,
    SCORING,
    WRITING,
    SyntheticTextConfig,
)
from jaxpfl.federated.audits.rehearsal import Rehearsed, ask, column, rehearse
from jaxpfl.models.checkpoints.pretrained import DTYPES
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.preference.log_probabilities import sums
from jaxpfl.text.preference.pairs import Pairs, padded_lengths, rows


def outline(config: SyntheticTextConfig) -> Outline:
    """What the config describes: its models, their training, and what clients send."""
    clients = Clients.of(config.data)
    sources = {"data.source": config.data.source}
    if config.evaluation.source is not None:
        sources["evaluation.source"] = config.evaluation.source
    sources |= {f"corpora.{name}": source for name, source in (config.corpora or {}).items()}
    found = {name: _model(config, name) for name in config.models}
    models: dict[str, OutlinedModel] = {
        name: each.outlined if isinstance(each, Published) else each for name, each in found.items()
    }
    at_hand = {name: each for name, each in found.items() if isinstance(each, Published)}
    rounds: dict[str, Rehearsed] = {}
    notes: list[str] = []
    if "downstream" in at_hand:
        _check_fine_tuning(config, at_hand["downstream"])
    sends = config.method in (*SCORING, "fed_avg")
    plan = cached_plan(config.client_privacy, config.training, clients.train, config.simulated)
    if config.method == "fed_avg" and "downstream" in at_hand:
        rounds["fed_avg"] = _fed_avg(config, plan, at_hand["downstream"])
    if config.method in SCORING:
        dimension = engine.embedding_size(config.embedder)
        if dimension is None:
            notes.append(engine.embedder_note(config.embedder))
        else:
            rounds["scores"] = _scores(config, plan, dimension)
    if config.method == "popri" and "generator" in at_hand:
        models["adapters"] = _check_tuning(config, at_hand["generator"])
    if config.method in WRITING and "generator" in at_hand:
        notes += _cache_note(config, at_hand["generator"])
    questions = None
    if config.method in SCORING and plan.adjacency == "add_or_remove_one":
        questions = partial(ScoreCanaries, _kind(config), config.evolution.max_texts)
    releases = {"rounds": engine.rounds_of(plan, questions)} if sends else {}
    return Outline(clients, sources, models, rounds, releases, {}, tuple(notes))


def _model(config: SyntheticTextConfig, name: str) -> Published | OutlinedModel:
    """A public model as shapes: pretrained here or published."""
    settings, needed = config.models[name], config.positions[name]
    if isinstance(settings, PublishedModelConfig):

        def check(model: Any) -> None:
            if name == "generator" and not isinstance(model, Decoder):
                raise InputError(
                    f"generator.path = {settings.path!r} must hold a decoder, found a "
                    f"{model.name}, which writes no texts"
                )
            if needed > model.config.positions:
                raise InputError(
                    f"{name}.path = {settings.path!r} has {model.config.positions} positions, "
                    f"expected at least {needed}"
                )

        trained = name == "downstream"
        return engine.published(settings, name, trained=trained, check=check)
    model = Decoder(settings.network(config.vocab_size, max(settings.sequence_length, needed)))
    with tracing(name):
        shapes = engine.shapes_of(model)
    about = f"{settings.architecture}, pretrained on the corpora"
    return Published(model, shapes, engine.outlined(about, shapes))


def _tokens(config: SyntheticTextConfig) -> tuple[int, ...]:
    """The longest row of the downstream model, with a start token."""
    return (config.corpus.tokens + 1,)


def _check_fine_tuning(config: SyntheticTextConfig, found: Published) -> None:
    size = config.corpus.fine_tuning.batch_size
    batch = {"tokens": jax.ShapeDtypeStruct((size, *_tokens(config)), np.int32)}
    mask = jax.ShapeDtypeStruct((size,), np.bool_)
    with tracing("the training of the downstream model"):
        jax.eval_shape(found.model.loss, found.params, batch, mask)


def _fed_avg(config: SyntheticTextConfig, plan: Plan, found: Published) -> Rehearsed:
    with tracing("a round of fed_avg"):
        return rehearse(
            lambda start: build_fed_avg(found.model, config.training, plan, start),
            {"tokens": column(_tokens(config), np.int32)},
            found.params,
        )


def _kind(config: SyntheticTextConfig) -> ScoreKind:
    return "nn_histogram" if config.method in EVOLVING else config.popri.score


def _scores(config: SyntheticTextConfig, plan: Plan, dimension: int) -> Rehearsed:
    """A round of scores or of votes; its server computes with numpy."""
    kind = _kind(config)
    scorer = Scorer(plan, kind=kind, max_texts=config.evolution.max_texts)
    candidates = config.popri.prompts * config.popri.responses
    if config.method in EVOLVING:
        candidates = config.evolution.population
    by_text = kind == "nn_histogram"
    rows_of_broadcast = candidates if by_text else dimension
    broadcast = jax.ShapeDtypeStruct((rows_of_broadcast, dimension), np.float32)
    name = "embedding" if by_text else "mean_embedding"
    with tracing("a round of scores"):
        found, _ = ask(scorer.query, broadcast, {name: column((dimension,), np.float32)})
    return Rehearsed(0, (found,))


def _check_tuning(config: SyntheticTextConfig, found: Published) -> OutlinedModel:
    """Traces a microbatch of POPri's tuning of adapters, which the result describes."""
    popri, settings, made = config.popri, config.popri.preference, []
    size = min(settings.microbatch_size or settings.batch_size, settings.batch_size)
    longest = np.zeros((size, popri.prompt_tokens), np.int32)
    response = np.zeros((size, popri.response_tokens), np.int32)
    pairs = Pairs(longest, response, response)
    width, places = padded_lengths(pairs, settings.multiple)

    def attached(key: Any, params: Any) -> Any:
        model, whole = lora.attach(found.model, params, popri.lora, key)  # pyright: ignore
        made.append(model)
        return whole

    with tracing("POPri's tuning of the generator"):
        params = jax.eval_shape(attached, engine.KEY, found.params)
        model = settings.computing(made[0])
        read = rows(pairs, int(np.max(width)), places)

        def loss(adapters: Any, base: Any) -> jax.Array:
            return sums(model, lora.join(adapters, base), read).sum()

        adapters, base = lora.split(params)
        jax.eval_shape(jax.grad(loss), adapters, base)
    return engine.outlined(f"of rank {popri.lora.rank}, tuned by preference", adapters)


def _cache_note(config: SyntheticTextConfig, found: Published) -> list[str]:
    """What the keys and values of one text take while it is written."""
    assert isinstance(found.model, Decoder)
    network = found.model.config
    dtype = getattr(config.generator, "dtype", "float32")
    number = 2 * network.layers * network.kv_heads * network.head_size
    size = number * config.positions["generator"] * DTYPES[dtype].itemsize
    return [f"the generator's cache takes {size / 1e6:,.1f} MB for each text it writes at a time"]
