"""Models, and word frequencies, scored on the same data: for a page and for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.numbers import number, percent
from jaxpfl.experiments.report.page import Cell, Section, Table

_KNOWN = {"model", "private", "frequencies", "count", "loss", "perplexity", "accuracy"}


def accuracy_title(language: bool) -> str:
    """The title of the share of targets that a model predicts."""
    return "next-token accuracy" if language else "accuracy"


def compared_models(table: Sequence[Mapping[str, Any]], tested_on: str, language: bool) -> Section:
    """The table of a page.

    Args:
      table: rows with "model", "private" and scores; of word frequencies, with "frequencies", the
        data that they were counted on.
    """
    metric = "perplexity" if language else "loss"
    # Metrics of models of one's own, under whatever names.
    own = [
        name
        for name, value in table[0].items()
        if name not in _KNOWN and isinstance(value, int | float)
    ]
    scored = any("accuracy" in row for row in table)
    rows = [
        (
            Cell(
                row["model"],
                note=f"word frequencies of {row['frequencies']}" if "frequencies" in row else "",
                stamps=[] if row["private"] else ["NOT PRIVATE"],
            ),
            number(row[metric]) if metric in row else "",
            *([percent(row.get("accuracy"))] if scored else []),
            *(number(row[name]) if name in row else "" for name in own),
        )
        for row in table
    ]
    columns = ("model", metric, *([accuracy_title(language)] if scored else []), *own)
    ours = [row["model"] for row in table].index(OURS)
    numbers = tuple(range(1, len(columns)))
    return Section(f"Compared on {tested_on}", table=Table(columns, rows, numbers, ours))
