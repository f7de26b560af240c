"""The settings of central training: AdamW with a schedule.

AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; with `weight_decay=0`
it is Adam. As usual, weight decay acts on kernels only, not on biases, norms and embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.models.base import Params


@dataclass(frozen=True)
class Training:
    """How a model is trained. The defaults are those of POPri's downstream model, for one epoch.

    Attributes:
      epochs: passes over the examples, each in a new order.
      batch_size: examples per step; a smaller last batch is padded and masked.
      learning_rate: the peak, reached after `warmup_steps`.
      schedule: "cosine", down to `final_learning_rate` at the last step, or "constant".
      weight_decay: of kernels; it is multiplied by the learning rate.
      clip_norm: bound of the gradient's global L2 norm; None for no bound.
      accumulate: number of microbatches, which must divide `batch_size`: the same gradient up to
        rounding, in less memory.
      validate_every: steps between two validations; None validates after each epoch.
      save_every: steps between two checkpoints; None saves after each epoch.
    """

    epochs: int = 1
    batch_size: int = 160
    learning_rate: float = 2e-4
    schedule: str = "cosine"
    final_learning_rate: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    accumulate: int = 1
    validate_every: int | None = None
    save_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate"):
            checks.positive_int(name, getattr(self, name))
        for name in ("validate_every", "save_every"):
            if getattr(self, name) is not None:
                checks.positive_int(name, getattr(self, name))
        checks.non_negative_int("warmup_steps", self.warmup_steps)
        for name in ("learning_rate", "epsilon"):
            checks.positive(name, getattr(self, name))
        for name in ("weight_decay", "final_learning_rate"):
            checks.non_negative(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            checks.open_fraction(name, getattr(self, name))
        checks.one_of("schedule", self.schedule, ("cosine", "constant"))
        if self.clip_norm is not None:
            checks.positive("clip_norm", self.clip_norm)
        if self.final_learning_rate > self.learning_rate:
            raise InputError(
                f"final_learning_rate must be at most learning_rate, {self.learning_rate:g}, "
                f"found {self.final_learning_rate:g}"
            )
        if self.batch_size % self.accumulate:
            raise InputError(
                f"accumulate must divide batch_size, {self.batch_size}, found {self.accumulate}"
            )

    def learning_rates(self, steps: int) -> Callable[[Any], Any]:
        """The learning rate as a function of the step, 0 .. steps - 1."""
        if self.schedule == "constant":
            tail = optax.constant_schedule(self.learning_rate)
        else:
            tail = optax.cosine_decay_schedule(
                self.learning_rate,
                max(steps - self.warmup_steps, 1),
                self.final_learning_rate / self.learning_rate,
            )
        if not self.warmup_steps:
            return tail
        # The ramp does not begin at zero, which would waste the first step.
        first = self.learning_rate / self.warmup_steps
        ramp = optax.linear_schedule(first, self.learning_rate, max(self.warmup_steps - 1, 1))
        return optax.join_schedules([ramp, tail], [self.warmup_steps])

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW for `steps` steps, without the clipping, which `step.run` does."""
        return optax.adamw(
            self.learning_rates(steps),
            self.beta1,
            self.beta2,
            self.epsilon,
            weight_decay=self.weight_decay,
            mask=decayed,
        )


def decayed(params: Params) -> Any:
    """Whether weight decay acts on each leaf: booleans in the structure of `params`."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(part, "key", part)) for part in path]
        ordinary = not names[-1].endswith("bias") and names[-1] != "scale"
        return ordinary and not any("embed" in name or "norm" in name for name in names)

    return jax.tree_util.tree_map_with_path(is_kernel, params)
