"""Adaptive quantile clipping: the clip norm follows a quantile of the update norms.

Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with
Adaptive Clipping", Algorithm 1. Each client adds b_i - 1/2, where b_i says whether its update's
norm is at most the current clip norm C; the noisy sum is part of the round's release and of its
event (`privacy.Plan`: the values' noise is raised so that the two together cost what the plan
says). Round t is clipped and noised with round t's C.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.privacy.clipping import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM
from jaxpfl.privacy.plan import Plan

# As float32, rounded into the range: 1e-12 itself would be rounded to less.
_SMALLEST = np.nextafter(np.float32(SMALLEST_CLIP_NORM), np.float32(1))
_LARGEST = np.nextafter(np.float32(LARGEST_CLIP_NORM), np.float32(1))


def next_clip_norm(plan: Plan, clip_norm: jax.Array, noisy_below: jax.Array) -> jax.Array:
    """Returns the next round's clip norm (float32 scalar); unchanged without adaptive clipping.

    Args:
      plan: gives the target quantile gamma, the learning rate eta and the public denominator n.
      clip_norm: C, float32 scalar.
      noisy_below: sum_i (b_i - 1/2) + N(0, sigma_b^2), float32 scalar.

    C <- C exp(-eta (b - gamma)) with b = noisy_below / n + 1/2, kept between SMALLEST_CLIP_NORM
    and LARGEST_CLIP_NORM, where clipping is exact. Where most updates are zero no C has a share of
    gamma above it, and C would go on falling until squares underflow.
    """
    adaptive = plan.adaptive_clip
    if adaptive is None:
        return clip_norm
    below = jnp.clip(noisy_below / plan.denominator + 0.5, 0.0, 1.0)
    step = jnp.exp(-adaptive.learning_rate * (below - adaptive.target_quantile))
    return jnp.clip(clip_norm * step, _SMALLEST, _LARGEST)
