"""Adaptive quantile clipping: the clip norm follows a quantile of the update norms.

Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with Adaptive
Clipping", Algorithm 1. The noisy sum of the clients' b_i - 1/2 (see `privacy.clipping`) is part of
a round's release and of its event. Round t's clipping and noise use round t's clip norm C.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.privacy.clipping import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM
from jaxpfl.privacy.plan import Plan

# Rounded into the range: as float32, 1e-12 would be rounded down, and so out of it.
_SMALLEST = np.nextafter(np.float32(SMALLEST_CLIP_NORM), np.float32(1))
_LARGEST = np.nextafter(np.float32(LARGEST_CLIP_NORM), np.float32(1))


def next_clip_norm(plan: Plan, clip_norm: jax.Array, noisy_below: jax.Array) -> jax.Array:
    """Returns the next round's clip norm (float32 scalar); unchanged without adaptive clipping.

    Args:
      plan: gives the target quantile gamma, the learning rate eta and the public denominator n.
      clip_norm: C, float32 scalar.
      noisy_below: sum_i (b_i - 1/2) + N(0, sigma_b^2), float32 scalar.

    C <- C exp(-eta (b - gamma)) with b = noisy_below / n + 1/2, kept between SMALLEST_CLIP_NORM
    and LARGEST_CLIP_NORM, where clipping is exact. Without these bounds, C would fall until squares
    underflow if most updates are zero.
    """
    adaptive = plan.adaptive_clip
    if adaptive is None:
        return clip_norm
    below = jnp.clip(noisy_below / plan.denominator + 0.5, 0.0, 1.0)
    step = jnp.exp(-adaptive.learning_rate * (below - adaptive.target_quantile))
    return jnp.clip(clip_norm * step, _SMALLEST, _LARGEST)
