"""The config sections `model` of the field's baseline tasks (Reddi et al. 2021, appendix C), and of
rows of numbers."""

from dataclasses import dataclass
from typing import Literal

from jaxpfl import checks
from jaxpfl.errors import InputError


@dataclass(frozen=True)
class CharacterModelConfig:
    """`models.LSTMLanguageModel` on the characters of the field's Shakespeare task.

    The vocabulary of 90 ids is fixed (`text.tokenisers.characters`), so that no public corpus is
    needed. A text becomes as many examples of `sequence_length` characters as it fills.
    """

    name: Literal["character_lstm"]
    sequence_length: int = 80
    embedding: int = 8
    hidden: int = 256
    layers: int = 2

    def __post_init__(self) -> None:
        for name in ("sequence_length", "embedding", "hidden", "layers"):
            checks.positive_int(f"model.{name}", getattr(self, name))
        if self.layers > 100:
            raise InputError(f"model.layers must be at most 100, found {self.layers}")


@dataclass(frozen=True)
class TagModelConfig:
    """`models.TagPrediction`: which tags a post has, from a bag of its words.

    Attributes:
      word_counts, tag_counts: files of PUBLIC counts, see `data.readers.counts`; a path may contain
        an environment variable.
      words, tags: how many of the most frequent entries are the vocabularies.
      max_words, max_tags: how many of a post's words and tags are used at most.
    """

    name: Literal["tag_prediction"]
    word_counts: str
    tag_counts: str
    words: int = 10_000
    tags: int = 500
    max_words: int = 64
    max_tags: int = 5

    def __post_init__(self) -> None:
        for name in ("words", "tags", "max_words", "max_tags"):
            checks.positive_int(f"model.{name}", getattr(self, name))


@dataclass(frozen=True)
class ResNetConfig:
    """`models.ResNet`, with group norm. Nothing is read from the data, which is private."""

    name: Literal["resnet18"]
    image_shape: tuple[int, int, int] = (32, 32, 3)
    classes: int = 100
    crop: int = 24
    width: int = 64
    groups: int = 2

    def __post_init__(self) -> None:
        for side in self.image_shape:
            checks.positive_int("model.image_shape", side)
        for name in ("classes", "crop", "width", "groups"):
            checks.positive_int(f"model.{name}", getattr(self, name))
        if self.crop > min(self.image_shape[:2]):
            raise InputError(
                f"model.crop must fit into model.image_shape = {list(self.image_shape)}, found "
                f"{self.crop}"
            )
        if self.width % self.groups:
            raise InputError(
                f"model.width must be a multiple of model.groups = {self.groups}, found "
                f"{self.width}"
            )


@dataclass(frozen=True)
class FeatureModelConfig:
    """`models.MLP`, on the columns "features" and "label" of a table (`data.readers.examples`).

    `features`, how many there are, and `classes` are not read from the data, which is private.
    `hidden` is the width of the hidden layer; 0 is logistic regression.
    """

    name: Literal["classifier_mlp"]
    features: int
    classes: int
    hidden: int = 64

    def __post_init__(self) -> None:
        for name in ("features", "classes"):
            checks.positive_int(f"model.{name}", getattr(self, name))
        checks.non_negative_int("model.hidden", self.hidden)


BaselineModelConfig = CharacterModelConfig | TagModelConfig | ResNetConfig | FeatureModelConfig
