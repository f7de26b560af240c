"""The outline of a config of federated training: what a dry run checks, see `engine.outline`."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.canaries import MomentCanaries
from jaxpfl.algorithms.fred import FredPlan, fred
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.published import PublishedDecoderConfig
from jaxpfl.experiments.engine import outline as engine
from jaxpfl.experiments.engine.build import build_fed_avg, build_model, build_plan
from jaxpfl.experiments.engine.outline import Clients, Outline, OutlinedModel, Published, tracing
from jaxpfl.experiments.systems.federated_training.build import build_fred_plan
from jaxpfl.experiments.systems.federated_training.config import Config
from jaxpfl.federated.audits.rehearsal import QuerySize, Rehearsed, ask, column, rehearse
from jaxpfl.models.decoder import lora
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.plan import Plan


def outline(config: Config) -> Outline:
    """What the config describes: its model, FreD's release and the rounds of training."""
    clients = Clients.of(config.data)
    chosen_by = build_fred_plan(config)
    prior = chosen_by.event() if chosen_by is not None and chosen_by.private else None
    plan = build_plan(config.privacy, config.training, clients.train, prior, config.simulated)
    models, rounds = _training(config, plan)
    releases = {}
    notes: tuple[str, ...] = ()
    if chosen_by is not None and config.fred is not None:
        releases["FreD"] = engine.PlannedRelease(
            chosen_by.guarantee(),
            "count, mean and covariance",
            chosen_by.multipliers[1],
            chosen_by.plans(clients.train),
            partial(MomentCanaries, chosen_by) if chosen_by.mode == "exact" else None,
        )
        dimension = engine.embedding_size(config.fred.embedder)
        if dimension is None:
            notes = (engine.embedder_note(config.fred.embedder),)
        else:
            with tracing("FreD's release"):
                rounds = {"FreD": fred_release(chosen_by, clients.train, dimension)} | rounds
    releases["rounds"] = engine.rounds_of(plan)
    together = {}
    if prior is not None:
        both = Guarantee.of_events([prior, plan.event()], plan.delta)
        together["FreD and rounds"] = both
    return Outline(clients, _sources(config), models, rounds, releases, together, notes)


def fred_release(plan: FredPlan, clients: int, dimension: int) -> Rehearsed:
    """FreD's release, traced; its server computes with numpy."""
    algorithm = fred(plan, units=clients, dimension=dimension)
    centre = jax.ShapeDtypeStruct((dimension,), np.float32)
    columns = {"embedding": column((dimension,), np.float32)}
    queries: list[QuerySize] = [ask(query, centre, columns)[0] for query in algorithm.queries]
    return Rehearsed(sum(each.up for each in queries), tuple(queries))


def _sources(config: Config) -> dict[str, str]:
    found = {"data.source": config.data.source}
    if config.data.public is not None:
        found["data.public"] = config.data.public
    if config.data.vocabulary is not None:
        found["data.vocabulary"] = config.data.vocabulary
    if config.evaluation.source is not None:
        found["evaluation.source"] = config.evaluation.source
    if config.fred is not None:
        for name, source in config.fred.sources.items():
            found[f"fred.candidates.{name}"] = source
    return found


def _training(config: Config, plan: Plan) -> tuple[dict[str, OutlinedModel], dict[str, Rehearsed]]:
    """The model and the rounds that train it."""
    settings, training = config.model, config.training
    if not isinstance(settings, PublishedDecoderConfig):
        model = build_model(settings, None)
        with tracing("a round of training"):
            shapes = engine.shapes_of(model)
            found = rehearse(
                lambda: build_fed_avg(model, training, plan), engine.example_columns(settings)
            )
        return {"model": engine.outlined(settings.name, shapes)}, {"rounds": found}
    adapters = settings.lora

    def check(model: Any) -> None:
        needed, positions = settings.sequence_length, model.config.positions
        if needed > positions:
            raise InputError(
                f"model.path = {settings.path!r} has {positions} positions, expected at least "
                f"{needed}, for model.sequence_length"
            )

    base = engine.published(settings, "model", trained=adapters is None, check=check)
    if not isinstance(base, Published):
        return {"model": base}, {}
    columns = {"tokens": column((settings.sequence_length + 1,), np.int32)}
    algorithm = partial(build_fed_avg, training=training, plan=plan)
    with tracing("a round of training"):
        if adapters is None:
            model = base.model
            found = rehearse(
                lambda start: algorithm(model, start=start),  # pyright: ignore[reportArgumentType]
                columns,
                base.params,
            )
            return {"model": base.outlined}, {"rounds": found}
        made: list[Any] = []

        def attached(key: Any, params: Any) -> Any:
            model, whole = lora.attach(base.model, params, adapters, key)  # pyright: ignore
            made.append(model)
            return lora.split(whole)

        start, frozen = jax.eval_shape(attached, engine.KEY, base.params)
        found = rehearse(
            lambda start, frozen: algorithm(made[0], start=start, frozen=frozen),
            columns,
            start,
            frozen,
        )
    about = f"adapters of rank {adapters.rank}"
    return {"model": base.outlined, "adapters": engine.outlined(about, start)}, {"rounds": found}
