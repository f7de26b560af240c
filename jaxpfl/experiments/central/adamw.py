"""The settings of central training, AdamW with a schedule, and of a public decoder.

AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; with `weight_decay=0`
it is Adam. As usual, weight decay acts on kernels only, not on biases, norms and embeddings.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from jaxpfl.checked import Checked, NonNegative, Positive, PositiveInt
from jaxpfl.models.base import Params
from jaxpfl.models.decoder.config import DecoderConfig


@dataclass(frozen=True)
class Training(Checked):
    """How a model is trained. The defaults are those of POPri's downstream model, for one epoch.

    Each of the `epochs` takes the examples in a new order; a smaller last batch is padded and
    masked. The rate begins as `learning_rate`, and is zero after the last step if the schedule is
    "cosine". `weight_decay`, of kernels, is multiplied by it. `clip_norm` bounds the gradient's
    global L2 norm; None for no bound.
    """

    epochs: PositiveInt = 1
    batch_size: PositiveInt = 160
    learning_rate: Positive = 2e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: NonNegative = 0.01
    clip_norm: Positive | None = 1.0

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW for `steps` steps, without the clipping, which `training` does."""
        rates = optax.constant_schedule(self.learning_rate)
        if self.schedule == "cosine":
            rates = optax.cosine_decay_schedule(self.learning_rate, max(steps, 1))
        return optax.adamw(rates, weight_decay=self.weight_decay, mask=decayed)


def decayed(params: Params) -> Any:
    """Whether weight decay acts on each leaf: booleans in the structure of `params`."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(part, "key", part)) for part in path]
        ordinary = not names[-1].endswith("bias") and names[-1] != "scale"
        return ordinary and not any("embed" in name or "norm" in name for name in names)

    return jax.tree_util.tree_map_with_path(is_kernel, params)


@dataclass(frozen=True)
class DecoderModelConfig(Checked):
    """A decoder and its pretraining on public corpora.

    Attributes:
      architecture, hidden_size, layers, heads, inner_size: see `models.decoder.config`; its other
        sizes follow from the tokeniser and the longest sequence.
      sequence_length: tokens of a pretraining row.
      corpora: names of the corpora that it is pretrained on; None for all.
    """

    architecture: Literal["gpt2", "llama"] = "llama"
    hidden_size: int = 192
    layers: int = 4
    heads: int = 6
    inner_size: int = 512
    sequence_length: PositiveInt = 128
    corpora: tuple[str, ...] | None = None
    pretraining: Training = Training(batch_size=32, learning_rate=0.003, weight_decay=0.1)

    def check_fields(self) -> None:
        self.network(vocab_size=1, positions=self.sequence_length)

    def network(self, vocab_size: int, positions: int) -> DecoderConfig:
        """Returns the network's config for a vocabulary and sequences of up to `positions`."""
        names = "hidden_size", "layers", "heads", "inner_size"
        sizes = {name: getattr(self, name) for name in names}
        sizes |= {"vocab_size": vocab_size, "positions": positions}
        return DecoderConfig(self.architecture, tied=True, **sizes)
