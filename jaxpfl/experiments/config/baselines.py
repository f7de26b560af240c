"""The config sections `model` of the field's baseline tasks (Reddi et al. 2021, appendix C), and of
rows of numbers."""

from dataclasses import dataclass
from typing import Literal

from jaxpfl.checked import Checked, NonNegativeInt, PositiveInt
from jaxpfl.errors import InputError


@dataclass(frozen=True)
class CharacterModelConfig(Checked):
    """`models.LSTMLanguageModel` on the characters of the field's Shakespeare task.

    The vocabulary of 90 ids is fixed (`text.tokenisers.characters`), so that no public corpus is
    needed. A text becomes as many examples of `sequence_length` characters as it fills.
    """

    name: Literal["character_lstm"]
    sequence_length: PositiveInt = 80
    embedding: PositiveInt = 8
    hidden: PositiveInt = 256
    layers: PositiveInt = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > 100:
            raise InputError(f"model.layers must be at most 100, found {self.layers}")


@dataclass(frozen=True)
class ResNetConfig(Checked):
    """`models.ResNet`, with group norm. Nothing is read from the data, which is private."""

    name: Literal["resnet18"]
    image_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (32, 32, 3)
    classes: PositiveInt = 100
    crop: PositiveInt = 24
    width: PositiveInt = 64
    groups: PositiveInt = 2

    def __post_init__(self) -> None:
        super().__post_init__()
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
class FeatureModelConfig(Checked):
    """`models.MLP`, on the columns "features" and "label" of a table (`data.readers.examples`).

    `features`, how many there are, and `classes` are not read from the data, which is private.
    `hidden` is the width of the hidden layer; 0 is logistic regression.
    """

    name: Literal["classifier_mlp"]
    features: PositiveInt
    classes: PositiveInt
    hidden: NonNegativeInt = 64


BaselineModelConfig = CharacterModelConfig | ResNetConfig | FeatureModelConfig
