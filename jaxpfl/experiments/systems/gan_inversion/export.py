"""What a finished study made: its GANs, each in a folder of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine.description import Clients
from jaxpfl.experiments.engine.rounds import final_params, planned
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig
from jaxpfl.experiments.systems.gan_inversion.study import Study
from jaxpfl.experiments.systems.workspace import ledger_path


def made(
    directory: Path, config: GanInversionConfig, record: Mapping[str, Any], **_: Any
) -> base.Made:
    """See `systems.base.System`."""
    models, plan, runs = [], None, record["runs"]
    for name in runs:
        folder = directory / "runs" / name
        plan = planned(folder, {**to_mapping(config), "run name": name})
        study = Study(config, Clients(plan.population, plan.population, True).made_up())
        params = final_params(
            folder,
            study.gan(runs[name]["share"]),
            config.run.seed,
            ledger=ledger_path(config.privacy, directory),
            privacy=runs[name]["privacy"],
        )
        models.append(base.TrainedModel(name, config.gan.model, params))
    trained_on = base.trained_on(config.data.source)
    return base.Made(tuple(models), plan, record["stamp"], trained_on, scores={})
