"""The settings of central training: AdamW with a schedule.

AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; with `weight_decay=0`
it is Adam. As usual, weight decay acts on kernels only, not on biases, norms and embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from jaxpfl.checked import Checked, NonNegative, Positive, PositiveInt
from jaxpfl.models.base import Params


@dataclass(frozen=True)
class Training(Checked):
    """How a model is trained. The defaults are those of POPri's downstream model, for one epoch.

    Attributes:
      epochs: passes over the examples, each in a new order.
      batch_size: examples per step; a smaller last batch is padded and masked.
      learning_rate: in the first step.
      schedule: "cosine", down to zero at the last step, or "constant".
      weight_decay: of kernels; it is multiplied by the learning rate.
      clip_norm: bound of the gradient's global L2 norm; None for no bound.
    """

    epochs: PositiveInt = 1
    batch_size: PositiveInt = 160
    learning_rate: Positive = 2e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: NonNegative = 0.01
    clip_norm: Positive | None = 1.0

    def learning_rates(self, steps: int) -> Callable[[Any], Any]:
        """The learning rate as a function of the step, 0 .. steps - 1."""
        if self.schedule == "constant":
            return optax.constant_schedule(self.learning_rate)
        return optax.cosine_decay_schedule(self.learning_rate, max(steps, 1))

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW for `steps` steps, without the clipping, which `training` does."""
        rates = self.learning_rates(steps)
        return optax.adamw(rates, weight_decay=self.weight_decay, mask=decayed)


def decayed(params: Params) -> Any:
    """Whether weight decay acts on each leaf: booleans in the structure of `params`."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(part, "key", part)) for part in path]
        ordinary = not names[-1].endswith("bias") and names[-1] != "scale"
        return ordinary and not any("embed" in name or "norm" in name for name in names)

    return jax.tree_util.tree_map_with_path(is_kernel, params)
