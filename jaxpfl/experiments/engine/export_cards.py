"""The cards of an export: README.md of a model and of a data set, in the hub's format."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpfl import files
from jaxpfl.privacy.plan import Plan

_UNITS = {
    "client": "client: one client with everything that it holds, over the whole run",
    "example": "example: one example of a client",
}


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
      title: heads it.
      stamp: NOT PRIVATE and why; "" for a private run.
      statement: the run's privacy statement, word for word.
      plan: of what the clients sent; None if they sent nothing.
      trained_on: by what it was used for.
      scores: by metric.
      tested_on: where the scores were measured; None if they were not.
      contents: file or folder -> what it is.
    """

    title: str
    stamp: str
    statement: str
    plan: Plan | None
    trained_on: Mapping[str, str]
    scores: Mapping[str, float]
    tested_on: str | None
    contents: Mapping[str, str]

    def of_model(self) -> str:
        """README.md of a model."""
        return self._rendered()

    def of_corpus(self, texts: int) -> str:
        """README.md of a data set of synthetic texts."""
        return self._rendered(texts)

    def _rendered(self, texts: int | None = None) -> str:
        plan, terms = self.plan, {}
        if plan is not None:
            terms = {
                "delta": f"{plan.delta:g}" if plan.private else "none: there is no noise",
                "unit": _UNITS[plan.unit],
                "adjacency": f"{plan.adjacency.replace('_', ' ')} {plan.unit}",
                "accountant": plan.chosen_accountant if plan.private else "none",
            }
        return files.template("jaxpfl.experiments.engine", "card.md.jinja").render(
            card=self, texts=texts, terms=terms
        )
