"""The cards of an export: README.md of a model and of a data set, in the hub's format."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpfl.privacy.plan import Plan

_UNITS = {
    "client": "client: one client with everything that it holds, over the whole run",
    "example": "example: one example of a client",
}
_COVERED = (
    "The statement covers all that the run released from the clients, and so all that is here. It "
    "says nothing of other releases from the same clients that are on no ledger of this run."
)


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
        head = ["library_name: jaxpfl", "tags:", "- differential-privacy", "- federated-learning"]
        lines = [*self._top(head), "## What is here", "", *_table("file", self.contents)]
        lines += ["## What it was trained on", "", *_table("", self.trained_on)]
        if self.scores and self.tested_on:
            scores = {name: f"{value:.6g}" for name, value in self.scores.items()}
            lines += ["## Scores", "", f"On {self.tested_on}:", "", *_table("metric", scores)]
        return "\n".join(lines)

    def of_corpus(self, texts: int) -> str:
        """README.md of a data set of synthetic texts."""
        head = ["configs:", "- config_name: default", "  data_files: corpus.parquet"]
        lines = self._top([*head, "tags:", "- differential-privacy", "- synthetic"])
        lines += ["## What is here", ""]
        lines += [f"corpus.parquet has {texts} rows with one column, `text`. A model wrote all of"]
        lines += ["them: none is a text of a client.", "", "## What it was made from", ""]
        return "\n".join([*lines, *_table("", self.trained_on)])

    def _top(self, head: list[str]) -> list[str]:
        lines = ["---", *head, "---", "", f"# {self.title}", ""]
        lines += [f"**{self.stamp}**", ""] if self.stamp else []
        lines += ["## Privacy", "", "```text", self.statement, "```", ""]
        plan = self.plan
        if plan is None:
            return [*lines, "Nothing here follows from the data of private clients.", ""]
        terms = {
            "delta": f"{plan.delta:g}" if plan.private else "none: there is no noise",
            "unit": _UNITS[plan.unit],
            "adjacency": f"{plan.adjacency.replace('_', ' ')} {plan.unit}",
            "accountant": plan.chosen_accountant if plan.private else "none",
        }
        return [*lines, *_table("term", terms), _COVERED, ""]


def _table(first: str, rows: Mapping[str, str]) -> list[str]:
    cells = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows.items()]
    return [f"| {first} | |", "|---|---|", *cells, ""]
