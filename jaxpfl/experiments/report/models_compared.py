"""Models, and word frequencies, scored on the same data: for a page and for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpfl.experiments.records.cautions import OURS
from jaxpfl.experiments.records.numbers import number, percent
from jaxpfl.experiments.report.page import Cell, Section, Table

_KNOWN = {
    "model", "private", "frequencies", "count", "loss", "perplexity", "accuracy", "recall_at_5",
}  # fmt: skip


def share_of(scores: Mapping[str, Any], language: bool) -> tuple[str, str]:
    """The key, in a model's scores, and the title of the share of targets that it predicts."""
    if "recall_at_5" in scores:
        return "recall_at_5", "recall@5"
    return "accuracy", "next-token accuracy" if language else "accuracy"


def compared_models(table: Sequence[Mapping[str, Any]], tested_on: str, language: bool) -> Section:
    """The table of a page.

    Args:
      table: rows with "model", "private" and scores; of word frequencies, with "frequencies", the
        data that they were counted on.
    """
    metric = "perplexity" if language else "loss"
    share, title = share_of(table[0], language)
    # Metrics of models of one's own, under whatever names.
    own = [
        name
        for name, value in table[0].items()
        if name not in _KNOWN and isinstance(value, int | float)
    ]
    shares = [share] if any(share in row for row in table) else []
    rows = [
        (
            Cell(
                row["model"],
                note=f"word frequencies of {row['frequencies']}" if "frequencies" in row else "",
                stamps=[] if row["private"] else ["NOT PRIVATE"],
            ),
            number(row[metric]) if metric in row else "",
            *(percent(row.get(name)) for name in shares),
            *(number(row[name]) if name in row else "" for name in own),
        )
        for row in table
    ]
    columns = ("model", metric, *([title] if shares else []), *own)
    ours = [row["model"] for row in table].index(OURS)
    numbers = tuple(range(1, len(columns)))
    return Section(f"Compared on {tested_on}", table=Table(columns, rows, numbers, ours))
