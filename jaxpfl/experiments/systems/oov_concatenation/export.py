"""What a finished study made: the two models of each world, each in a folder of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.data.open import fields_of
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine.description import Clients
from jaxpfl.experiments.engine.rounds import final_params, planned
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig
from jaxpfl.experiments.systems.oov_concatenation.study import Study
from jaxpfl.experiments.systems.worlds import ledger_of
from jaxpfl.text.tokenisers.vocabulary import Vocabulary


def made(
    directory: Path, config: OovConcatenationConfig, record: Mapping[str, Any], **_: Any
) -> base.Made:
    """See `systems.base.System`."""
    models, plan = [], None
    words = {"words": Vocabulary.load(directory / "vocabulary.json")}
    for world, about in record["worlds"].items():
        for kind in ("words", "characters"):
            name = f"{kind}_{world}"
            folder = directory / "runs" / name
            plan = planned(folder, {**to_mapping(config), "run name": name})
            study = Study(config, Clients(plan.population, plan.population, True).made_up())
            params = final_params(
                folder,
                study.algorithm(kind),
                config.run.seed,
                ledger=ledger_of(directory, world),
                privacy=about["privacy"][kind],
            )
            fields = fields_of(config.data.source) if kind in words else {}
            of = study.kinds[kind].model, params, words.get(kind)
            models.append(base.TrainedModel(name, *of, fields=fields))
    return base.Made(
        models=tuple(models),
        plan=plan,
        stamp=record["stamp"],
        trained_on=base.trained_on(config.data.source),
        scores={},
    )
