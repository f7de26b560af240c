"""The schemas of the examples of TensorFlow Federated's data sets.

Files store neither shapes nor widths. Features have the names, types and shapes that the loaders of
tensorflow-federated 0.87 (tff.simulation.datasets) give them. The canonical columns are those that
this library's models read:

| data set | canonical columns |
|---|---|
| emnist | image float32 [28, 28, 1], 0 = paper (the file has 1 = paper), label int32 |
| cifar100 | image uint8 [32, 32, 3], label int32, coarse_label int32 |
| shakespeare | text (the file's snippets) |
| stackoverflow | text (the file's tokens), and the others as they are |
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jaxpfl.data.columns import Column
from jaxpfl.data.readers.tff_examples import Feature

Columns = dict[str, Column]


@dataclass(frozen=True)
class Schema:
    """The features of one data set's examples; `canonical` maps them to canonical columns."""

    features: dict[str, Feature]
    unit: str
    canonical: Callable[[Columns], Columns] = dict
    splitting: str = "words"


def _emnist(columns: Columns) -> Columns:
    return {"image": np.float32(1) - columns["pixels"][..., None], "label": columns["label"]}


def _emnist_36(columns: Columns) -> Columns:
    # 10 digits, 26 capitals, 26 small letters: a small letter has the label of its capital.
    digits = _emnist(columns)
    label = digits["label"]
    return {**digits, "label": np.where(label < 36, label, label - 26).astype(label.dtype)}


def _cifar100(columns: Columns) -> Columns:
    labels = {name: columns[name].astype(np.int32) for name in ("label", "coarse_label")}
    return {"image": columns["image"], **labels}


def _text_of(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {"text": columns.pop(name), **columns}


_TEXT, _INT64 = Feature("text"), Feature("int64")
_EMNIST = {"label": Feature("int32"), "pixels": Feature("float32", (28, 28))}
_STACKOVERFLOW = ("creation_date", "score", "tags", "title", "tokens", "type")

SCHEMAS = MappingProxyType(
    {
        "cifar100": Schema(
            {"coarse_label": _INT64, "image": Feature("uint8", (32, 32, 3)), "label": _INT64},
            "dealt share of CIFAR-100",
            _cifar100,
        ),
        "emnist": Schema(_EMNIST, "writer", _emnist),
        "emnist_36": Schema(_EMNIST, "writer", _emnist_36),
        "shakespeare": Schema({"snippets": _TEXT}, "role in a play", _text_of("snippets")),
        "stackoverflow": Schema(
            {**dict.fromkeys(_STACKOVERFLOW, _TEXT), "score": _INT64},
            "user of Stack Overflow",
            _text_of("tokens"),
            # TFF's own preparation splits its tokens on spaces: `jquery-1.9` is one of them.
            splitting="spaces",
        ),
    }
)
"""The schemas by the data sets' names in `data.open`."""
