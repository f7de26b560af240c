"""The outline of a study of joined words: what a dry run checks, see `engine.outline`."""

import dataclasses

import numpy as np

from jaxpfl.experiments.engine import outline as engine
from jaxpfl.experiments.engine.build import build_fed_avg, build_model
from jaxpfl.experiments.engine.outline import Clients, Outline, cached_plan, tracing
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig
from jaxpfl.federated.audits.rehearsal import column, rehearse
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.text.character.words import char_lm


def outline(config: OovConcatenationConfig) -> Outline:
    """What the config describes: the two models and their rounds, which are alike in all worlds."""
    clients = Clients.of(config.data)
    words, characters = config.words, config.characters
    sizes = dataclasses.asdict(characters.model)
    longest = sizes.pop("max_bytes")
    parts = {
        "words": (build_model(words.model, None), engine.example_columns(words.model), words),
        # Start and end of word.
        "characters": (char_lm(**sizes), {"tokens": column((longest + 2,), np.int32)}, characters),
    }
    models, rounds, releases, plans = {}, {}, {}, {}
    for name, (model, columns, settings) in parts.items():
        plan = cached_plan(settings.privacy, settings.training, clients.train)
        with tracing(f"a round of {name}"):
            models[name] = engine.outlined(model.name, engine.shapes_of(model))
            rounds[name] = rehearse(
                lambda model=model, settings=settings, plan=plan: build_fed_avg(
                    model, settings.training, plan
                ),
                columns,
            )
        plans[name], releases[name] = plan, engine.rounds_of(plan)
    assert config.data.public is not None
    sources = {"data.source": config.data.source, "data.public": config.data.public}
    if config.data.vocabulary is not None:
        sources["data.vocabulary"] = config.data.vocabulary
    together: dict[str, Guarantee] = {}
    delta = words.privacy.delta
    if delta is not None:
        world = [plan.event() for plan in plans.values()]
        number = len(config.bug.probabilities)
        together["both models of a world"] = Guarantee.of_events(world, delta)
        together[f"all {number} worlds"] = Guarantee.of_events(world * number, delta)
    scaled = study_runs.at_scale(config.scaled_up, plans)
    notes: tuple[str, ...] = ()
    if scaled is not None:
        notes = (
            f"both models of a world, scaled up to {scaled['population']:,} clients with "
            f"{scaled['factor']:g} times the clients per round: "
            f"{scaled['composed_guarantee']['statement']}",
        )
    return Outline(clients, sources, models, rounds, releases, together, notes)
