"""Contributions of two parts, each clipped to a norm of its own."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import PyTree
from jaxpfl.privacy.clipping import clip_factors
from jaxpfl.privacy.plan import Plan


@dataclasses.dataclass(frozen=True)
class TwoParts:
    """How the parts share a contribution of norm S at most.

    The first is clipped to S and multiplied by sqrt(1 - a), the second to C and by sqrt(a) S / C.
    Their sum costs what that of the plan costs; in their own clip norms, the noise of the parts is
    z / sqrt(1 - a) and z / sqrt(a) for a plan with noise multiplier z.

    Attributes:
      bounds: S and C, positive.
      share: a, between 0 and 1.
    """

    bounds: tuple[float, float]
    share: float

    @property
    def scales(self) -> tuple[float, float]:
        """The factors of the clipped parts."""
        first, second = self.bounds
        return math.sqrt(1 - self.share), math.sqrt(self.share) * first / second

    @classmethod
    def of(cls, plan: Plan, name: str, second: float, share: float) -> "TwoParts":
        """The parts of a plan whose clip norm is S."""
        if plan.clip.adaptive is not None:
            raise InputError(
                f"a {name} beside the change needs a plan with a constant clip norm, found an "
                "adaptive one"
            )
        bound = checks.positive(f"{name}_clip", second)
        return cls((plan.clip_norm, bound), checks.open_fraction(f"{name}_share", share))

    def sent(self, first: PyTree, second: PyTree) -> tuple[PyTree, PyTree]:
        """The parts of one client, clipped and scaled."""
        return self._scaled(first, 0), self._scaled(second, 1)

    def _scaled(self, part: PyTree, place: int) -> PyTree:
        factors, _, _ = clip_factors(part, jnp.float32(self.bounds[place]))
        return jax.tree.map(lambda d, f: d * f * self.scales[place], part, factors)
