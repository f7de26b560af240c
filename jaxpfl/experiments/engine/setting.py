"""The settings of a run other than its algorithm and clients, its rounds, and its result."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.evaluate import Evaluator
from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.printable import facts
from jaxpfl.privacy.plan import Plan

NOT_PRIVATE = "NOT PRIVATE: trained without privacy"
REPRODUCIBLE = "NOT PRIVATE: the noise can be drawn again from the seed (reproducible_noise)"


def stamp_of(plans: Iterable[Plan], *, reproducible: bool) -> str:
    """The warning on everything that a run of these plans writes without a guarantee; else ""."""
    plans = list(plans)
    if not all(plan.private for plan in plans):
        return NOT_PRIVATE
    simulated = [plan.simulation for plan in plans if plan.simulates is not None]
    return "; ".join([*([REPRODUCIBLE] if reproducible else []), *simulated[:1]])


def mark_of(stamp: str) -> str:
    """The first words of a stamp, which stand in tables and on pictures; "" without one."""
    return stamp.partition(":")[0]


@dataclass(frozen=True)
class Result:
    """The public result of a run.

    Attributes:
      privacy: the guarantee in words, of this run and of all releases on its ledger.
      metrics: the latest value of each public metric, of the rounds up to that of `params`.
      state: the algorithm's final state, on the device.
      params: the model's parameters, on the device; None without a model.
      kept: the round of `params`, where `on_round` kept one; None for the last.
      evaluated_on: names the data of the scores in "evaluation"; None without an evaluation.
      epsilons: of "this run", and of "everything on its ledger".
      cautions: sentences on what the scores may be mistaken for, as the report has them.
      table: scores on the same data of the model before the rounds, of word frequencies where the
        vocabulary is known, and of "this run".
      run: the name of the run on its ledger.
    """

    privacy: str
    metrics: dict[str, Any]
    rounds: int
    out: Path
    state: Any = field(repr=False)
    params: Any = field(repr=False)
    kept: int | None = None
    evaluated_on: str | None = None
    epsilons: Mapping[str, float] = field(default_factory=dict)
    cautions: tuple[str, ...] = ()
    table: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    run: str = ""

    def __str__(self) -> str:
        """The result in lines, each score with its data and each epsilon with what it is of."""
        scores, on = self.metrics.get("evaluation") or {}, f"on {self.evaluated_on}"
        lines = [f"{name} {value:.4g} {on}" for name, value in scores.items()]
        for row in self.table:
            names = [name for name in scores if name != "count" and row.get(name) is not None]
            if row["model"] != OURS and names:
                values = ", ".join(f"{name} {row[name]:.4g}" for name in names)
                of = f", word frequencies of {row['frequencies']}" if "frequencies" in row else ""
                lines.append(f"{row['model']}: {values} {on}{of}")
        lines += [f"epsilon {value:.4g} of {whose}" for whose, value in self.epsilons.items()]
        lines += [f"caution: {caution}" for caution in self.cautions]
        return "\n".join([*lines, f"after {self.rounds} rounds: {self.privacy}"])

    def _repr_html_(self) -> str:
        *lines, stated = str(self).splitlines()
        scores = "\n".join(lines[: len(lines) - len(self.cautions)])
        shown = {"scores": scores, "cautions": "\n".join(self.cautions), "privacy": stated}
        return facts("Result", {**shown, "report": self.out / "report.html"})


@dataclass(frozen=True)
class Round:
    """What is public after a round, for the functions that are called then (`Tracking.on_round`).

    A run that is resumed calls them again from the last saved round on. It ends the same if their
    answers follow from the records alone, not from memory, a clock or chance.

    Attributes:
      number: the round; 0 before the first one.
      records: the lines of `metrics.jsonl` up to this round's. "evaluation" in one has the scores
        on declared-public data; all other metrics follow from charged releases.
      params: the model's, on the device, until the function returns; None without a model.
      statement: computes `privacy`.
    """

    number: int
    records: Sequence[Mapping[str, Any]] = field(repr=False)
    params: Any = field(repr=False)
    statement: Callable[[], str] = field(repr=False)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The record of this round."""
        return self.records[-1]

    @property
    def privacy(self) -> str:
        """The guarantee of all that was released so far; takes about as long as a round."""
        return self.statement()


OnRound = Callable[[Round], Literal["keep", "stop"] | None]
"""Returns None; "keep", so that the run ends with the parameters of this round, unless a later one
is kept; or "stop", so that this round, which is not round 0, is the last."""


def last_kept(records: Sequence[Mapping[str, Any]]) -> int | None:
    """The round whose parameters were kept last, of the records of the rounds 0, 1, ..."""
    return max((record["round"] for record in records if record.get("kept")), default=None)


@dataclass(frozen=True)
class KeepBest(Checked):
    """Ends a run with the parameters of its best round, and early if no better one comes.

    The scores are those on declared-public data, so that the choice costs no privacy. Round 0, the
    model before training, counts. The first of equal scores is the best, and one that is not finite
    is the worst.

    Attributes:
      score: accuracy is better if it is higher, the others if they are lower.
      patience: how many evaluations in a row without a better score end the run; None ends none.

    Raises:
      InputError: when it is called, if there is no such score.
    """

    score: Literal["loss", "perplexity", "accuracy"] = "loss"
    patience: PositiveInt | None = None

    def __call__(self, round: Round) -> Literal["keep", "stop"] | None:
        if not round.number and self.score not in (round.metrics.get("evaluation") or {}):
            needed = f"an evaluation of a model that has the score {self.score!r}"
            raise InputError(f"KeepBest needs {needed}, on data that is declared public")
        if "evaluation" not in round.metrics:
            return None
        sign = -1 if self.score == "accuracy" else 1
        scores = [r["evaluation"][self.score] for r in round.records if "evaluation" in r]
        # JSON has None for what is not finite.
        losses = [math.inf if score is None else sign * score for score in scores]
        since = len(losses) - 1 - losses.index(min(losses))
        if not since:
            return "keep"
        return "stop" if self.patience is not None and since >= self.patience else None


@dataclass(frozen=True)
class Tracking:
    """How a run is evaluated, saved and shown while it trains.

    Attributes:
      evaluate_every: rounds between two evaluations; others are before round 1 and at the end.
      sentences: `(params, round) -> sentences`, generated at each evaluation.
      checkpoint_every: rounds between two checkpoints; another is at the end.
      on_round: is called after each round, see `OnRound`; the device then waits for the host.
    """

    evaluate: Evaluator | None = None
    evaluate_every: int = 10
    sentences: Callable[[Any, int], list[str]] | None = None
    checkpoint_every: int = 10
    progress: bool = True
    on_round: Sequence[OnRound] = ()


@dataclass(frozen=True)
class Setting:
    """What a run is besides its algorithm and its clients.

    Attributes:
      config: the resolved config, which a resumed run must share.
      reproducible_noise: draws noise and cohorts from `seed`: NOT private.
      start: identifies the initial parameters; None for the model's own.
      prior: names, in the ledger, of runs that this one depends on; its cost includes theirs.
      note: a sentence appended to every privacy statement of the run.
      resumed_as: the directory that `jaxpfl resume` resumes; None for a run of `jaxpfl.run`.
    """

    config: Mapping[str, Any]
    seed: int = 0
    reproducible_noise: bool = False
    start: str | None = None
    prior: tuple[str, ...] = ()
    note: str = ""
    resumed_as: Path | None = None
