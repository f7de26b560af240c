"""The config sections of published models, which are loaded and not trained here first."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.models.checkpoints import hub
from jaxpfl.models.decoder.config import LoRA
from jaxpfl.models.resnet import MultiLabelResNet

_ADDRESS = re.compile(r"https?://(\[[\da-f:]+\]|[\w.-]+)(:\d+)?(/[\w.~/-]*)?", re.ASCII)


@dataclass(frozen=True)
class PublishedWeights(Checked):
    """Weights in a folder, or on the Hugging Face hub, which a run replaces by NAME@COMMIT."""

    path: str | None
    hashed = "the file of its weights"  # of what the digest is that a run records

    def described(self, sha256: str) -> str:
        """The model in a sentence for others, who find a folder by its digest and not its path."""
        assert self.path is not None
        name = hub.public_name(self.path)
        if hub.with_commit(self.path)[1] is not None:
            return f"the published model {name}"
        return f"the model in a folder {name}; SHA-256 of {self.hashed}: {sha256}"


@dataclass(frozen=True)
class MultiLabelConfig(MultiLabelResNet, PublishedWeights):
    """`models.MultiLabelResNet`, for images of several labels.

    `path` has ImageNet's ResNet-18 with timm's names, whose batch norm is frozen, with its
    `statistics`; null draws parameters, with group norm of `groups` groups.
    """

    path: str | None = None
    statistics: tuple[tuple, ...] = field(default=(), init=False)


@dataclass(frozen=True)
class PublishedModelConfig(PublishedWeights):
    """A model in a folder, or on the Hugging Face hub, with its own tokeniser.

    Attributes:
      path: a folder with config.json, tokenizer.json and safetensors, or a hub NAME[@REVISION]. A
        run replaces a revision, or none, by the commit that it is when the run begins.
      dtype: of the computations, and of the weights that are not trained; trained ones are float32.
      int8: stores the linear maps of the layers as 8-bit integers, for weights that are not
        trained.
      adapters: a folder of PEFT with LoRA adapters, which are merged into the weights.
      is_decoder: makes a BERT or RoBERTa causal, as `is_decoder: true` in its config.json does, so
        that it predicts next tokens; it is then trained, and writes no texts.
    """

    hashed = "the parameters, as loaded"

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    int8: bool = False
    adapters: str | None = None
    is_decoder: bool = False

    def check_fields(self) -> None:
        if "" in (self.path, self.adapters):
            raise InputError(f"{'adapters' if self.path else 'path'} must name a folder, found ''")


@dataclass(frozen=True)
class PublishedGeneratorConfig(PublishedModelConfig):
    """A published language model that writes texts.

    `chat`: whether a prompt is given as a user's message, by the chat template of the folder, to a
    model that was trained to answer; None if the folder has a template. Say false for a base model
    whose folder has one all the same.
    """

    chat: bool | None = None


@dataclass(frozen=True)
class RemoteGeneratorConfig(Checked):
    """A language model behind an OpenAI-compatible address, see `text.generation.remote`.

    `api` is the address before /completions, and `model` the server's name of the model.
    """

    api: str
    model: str

    def check_fields(self) -> None:
        if not _ADDRESS.fullmatch(self.api):
            # A password in it is not shown.
            raise InputError("api must be http[s]://HOST[:PORT]/PATH, found another form")


@dataclass(frozen=True)
class PublishedDecoderConfig(PublishedModelConfig):
    """A published language model that clients train.

    Attributes:
      sequence_length: a client's text is cut to this many tokens.
      lora: the adapters that are trained and sent instead of the model; None trains all weights.
    """

    name: Literal["decoder"] = "decoder"
    sequence_length: PositiveInt = 64
    lora: LoRA | None = None


def pinned(config: Any) -> Any:
    """The config, in which every model on the Hugging Face hub is named with its commit."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return config
    changes: dict[str, Any] = {}
    for name in [setting.name for setting in dataclasses.fields(config) if setting.init]:
        value = getattr(config, name)
        of_model = isinstance(config, PublishedWeights) and name == "path" and value
        try:
            changes[name] = hub.pinned(value) if of_model else pinned(value)
        except InputError as error:
            raise InputError(f"{name}{': ' if of_model else '.'}{error}") from error
    return dataclasses.replace(config, **changes)
