"""Labels of clients' texts, from a PUBLIC list: texts with another label are left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpfl.data.columns import concatenated, take
from jaxpfl.data.population import Population, offsets_of
from jaxpfl.errors import InputError
from jaxpfl.experiments.systems.chosen_corpus.config import LabelsConfig
from jaxpfl.text.columns import text_column
from jaxpfl.text.cut import Cut


def labelled(clients: Population, labels: LabelsConfig, rule: Cut) -> Population:
    """The same clients with the pieces of their texts, and the column "label", int32.

    A label is its place in the list. The texts of each label are cut for themselves, so that no
    piece has text of two labels.
    """
    if labels.column not in clients.columns:
        raise InputError(
            f"data.source must have the column {labels.column!r}, which labels.column names: add "
            f"?columns={labels.column}, found {', '.join(map(repr, clients.columns))}"
        )
    kind = np.asarray(take(clients.column(labels.column), np.arange(0))).dtype.kind
    if kind == "f" or (kind == "b" and not set(labels.names) <= {"True", "False"}):
        expected = "be named True and False" if kind == "b" else "be texts or whole numbers"
        kinds = "booleans" if kind == "b" else "numbers with fractions"
        raise InputError(f"the labels in {labels.column!r} must {expected}, found {kinds}")
    values = take(clients.column(labels.column), np.arange(clients.num_examples)).tolist()
    label_N = np.array(list(map(str, values)))
    parts = [rule.population(clients.keeping(label_N == name)) for name in labels.names]
    owner_N = np.concatenate([np.repeat(np.arange(len(part)), part.sizes()) for part in parts])
    place_N = np.repeat(np.arange(len(parts), dtype=np.int32), [p.num_examples for p in parts])
    order_N = np.argsort(owner_N, kind="stable")
    texts = take(concatenated([text_column(part) for part in parts]), order_N)
    columns = {"text": texts, "label": place_N[order_N]}
    return clients.with_examples(columns, offsets_of(np.bincount(owner_N, minlength=len(clients))))


def shares_of(texts: int, counts: Sequence[float]) -> list[int]:
    """How many texts each label gets: one, and of the others as many as its released count says."""
    ends_K = np.cumsum(counts) / np.sum(counts) * (texts - len(counts))
    return (1 + np.diff(np.rint(ends_K), prepend=0)).astype(int).tolist()


def together(labels: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What is said of the texts of all labels: sums, and means by the number of texts."""
    parts = list(labels.values())
    sizes = [part["texts"] for part in parts]

    def means(name: str) -> dict[str, float]:
        values = [list(map(part[name].get, parts[0][name])) for part in parts]
        return dict(zip(parts[0][name], np.average(values, 0, sizes).tolist(), strict=True))

    return {
        "texts": sum(sizes),
        "pool": parts[0]["pool"],
        "effective_size": sum(part["effective_size"] for part in parts),
        "shares": means("shares"),
        "distances": means("distances"),
        "judged": means("judged"),
        "examples": [text for part in parts for text in part["examples"]],
    }
