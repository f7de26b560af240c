"""What the examples of TensorFlow Federated's data sets hold.

Files store neither shapes nor widths. Features have the names, types and shapes that the loaders of
tensorflow-federated 0.87 (tff.simulation.datasets) give them. The canonical columns are those that
this library's models read:

| data set | canonical columns |
|---|---|
| emnist | image float32 [28, 28, 1], 0 = paper (the file has 1 = paper), label int32 |
| cifar100 | image uint8 [32, 32, 3], label int32, coarse_label int32 |
| celeba | image uint8 [84, 84, 3], 40 attributes bool |
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
    """What the examples of one data set hold.

    Attributes:
      features: name -> dtype and shape, in the order in which TFF gives them.
      unit: what a client is, in words.
      canonical: maps the features to the canonical columns.
      splitting: of its texts, see `Population`.
    """

    features: dict[str, Feature]
    unit: str
    canonical: Callable[[Columns], Columns] = dict
    splitting: str = "words"


def _emnist(columns: Columns) -> Columns:
    return {"image": np.float32(1) - columns["pixels"][..., None], "label": columns["label"]}


def _emnist_36(columns: Columns) -> Columns:
    # 10 digits, 26 capitals, 26 small letters: a small letter has the label of its capital.
    found = _emnist(columns)
    label = found["label"]
    return {**found, "label": np.where(label < 36, label, label - 26).astype(label.dtype)}


def _cifar100(columns: Columns) -> Columns:
    labels = {name: columns[name].astype(np.int32) for name in ("label", "coarse_label")}
    return {"image": columns["image"], **labels}


def _celeba(columns: Columns) -> Columns:
    return {"image": columns.pop("image").astype(np.uint8), **columns}


def _shakespeare(columns: Columns) -> Columns:
    return {"text": columns["snippets"]}


def _stackoverflow(columns: Columns) -> Columns:
    return {"text": columns.pop("tokens"), **columns}


# fmt: off
_ATTRIBUTES = (
    "five_o_clock_shadow", "arched_eyebrows", "attractive", "bags_under_eyes", "bald", "bangs",
    "big_lips", "big_nose", "black_hair", "blond_hair", "blurry", "brown_hair",
    "bushy_eyebrows", "chubby", "double_chin", "eyeglasses", "goatee", "gray_hair",
    "heavy_makeup", "high_cheekbones", "male", "mouth_slightly_open", "mustache", "narrow_eyes",
    "no_beard", "oval_face", "pale_skin", "pointy_nose", "receding_hairline", "rosy_cheeks",
    "sideburns", "smiling", "straight_hair", "wavy_hair", "wearing_earrings", "wearing_hat",
    "wearing_lipstick", "wearing_necklace", "wearing_necktie", "young",
)
# fmt: on

_TEXT, _INT64 = Feature("text"), Feature("int64")
# TFF does not convert the pixels, which lie in 0 .. 255.
_CELEBA = {"image": Feature("int64", (84, 84, 3)), **dict.fromkeys(_ATTRIBUTES, Feature("bool"))}
_EMNIST = {"label": Feature("int32"), "pixels": Feature("float32", (28, 28))}
_STACKOVERFLOW = ("creation_date", "score", "tags", "title", "tokens", "type")

SCHEMAS = MappingProxyType(
    {
        "celeba": Schema(dict(sorted(_CELEBA.items())), "celebrity", _celeba),
        "cifar100": Schema(
            {"coarse_label": _INT64, "image": Feature("uint8", (32, 32, 3)), "label": _INT64},
            "dealt share of CIFAR-100",
            _cifar100,
        ),
        "emnist": Schema(_EMNIST, "writer", _emnist),
        "emnist_36": Schema(_EMNIST, "writer", _emnist_36),
        "shakespeare": Schema({"snippets": _TEXT}, "role in a play", _shakespeare),
        "stackoverflow": Schema(
            {**dict.fromkeys(_STACKOVERFLOW, _TEXT), "score": _INT64},
            "user of Stack Overflow",
            _stackoverflow,
            # TFF's own preparation splits its tokens on spaces: `jquery-1.9` is one of them.
            splitting="spaces",
        ),
    }
)
"""The schemas by the data sets' names in `data.open`."""
