"""Functions that are called after each round: they look on, keep its parameters or end the run.

They get what is public. A run that is resumed calls them again from the last saved round on, so
what they answer must follow from the records that they are given, and not from their own memory,
from a clock or from chance. Then it ends at the same round, with the same parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError


@dataclass(frozen=True)
class Round:
    """What is public after a round.

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
    return max((each["round"] for each in records if each.get("kept")), default=None)


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
            raise InputError(
                f"KeepBest needs the score {self.score!r} on data that is declared public: give "
                "an evaluation of a model that has it"
            )
        if "evaluation" not in round.metrics:
            return None
        sign = -1 if self.score == "accuracy" else 1
        scores = [each["evaluation"][self.score] for each in round.records if "evaluation" in each]
        # JSON has None for what is not finite.
        losses = [math.inf if score is None else sign * score for score in scores]
        since = len(losses) - 1 - losses.index(min(losses))
        if not since:
            return "keep"
        return "stop" if self.patience is not None and since >= self.patience else None
