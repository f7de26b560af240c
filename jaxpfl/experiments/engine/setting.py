"""What a run is besides its algorithm and its clients, and what it ends with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl.experiments.engine.evaluate import Scores

NOT_PRIVATE = "NOT PRIVATE: trained without privacy"
REPRODUCIBLE = "NOT PRIVATE: the noise can be drawn again from the seed (reproducible_noise)"


@dataclass(frozen=True)
class Result:
    """What a run ends with; all of it is public.

    Attributes:
      privacy: the statement: (epsilon, delta), unit, adjacency, accountant, of this run and of
        everything on its ledger.
      metrics: the last round's public metrics, the last evaluation among them.
      rounds: rounds done.
      out: the run directory.
      state: the algorithm's last state, on the device.
      params: the trained model's parameters, on the device; None without a model.
    """

    privacy: str
    metrics: dict[str, Any]
    rounds: int
    out: Path
    state: Any = field(repr=False)
    params: Any = field(repr=False)


@dataclass(frozen=True)
class Tracking:
    """What a run evaluates while it trains, how often it is saved, and whether it shows progress.

    Attributes:
      evaluate: scores parameters on public data, or None.
      evaluate_every: rounds between two evaluations; before the first round and after the last
        there always is one.
      sentences: `(params, round) -> sentences`, drawn at each evaluation, or None.
      checkpoint_every: rounds between two checkpoints; after the last round there always is one.
      progress: show a progress bar on stderr.
    """

    evaluate: Scores | None = None
    evaluate_every: int = 10
    sentences: Callable[[Any, int], list[str]] | None = None
    checkpoint_every: int = 10
    progress: bool = True


@dataclass(frozen=True)
class Setting:
    """What a run is besides its algorithm and its clients.

    Attributes:
      config: the resolved config, part of the run's identity.
      seed: of the start of the state.
      reproducible_noise: draws noise and cohorts from `seed`: NOT private.
      start: identifies the parameters that the run starts from; None for the model's own.
      prior: runs whose releases this one depends on, by their name in the ledger: its epsilons
        and statements include theirs.
      note: a sentence that everything the run writes about its privacy ends with.
      resumed_as: the directory to resume after an interruption; None for the run's own.
    """

    config: Mapping[str, Any]
    seed: int = 0
    reproducible_noise: bool = False
    start: str | None = None
    prior: tuple[str, ...] = ()
    note: str = ""
    resumed_as: Path | None = None
