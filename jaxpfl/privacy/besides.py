"""What is released on the same clients beside a plan, and counts in the same epsilon."""

import dataclasses
import math
from typing import Self

import dp_accounting

from jaxpfl.errors import InputError
from jaxpfl.privacy import confirmation, events


@dataclasses.dataclass(frozen=True)
class BesidesGaussians:
    """Releases on everyone beside a plan, as ONE Gaussian of shift / std = mu."""

    mu: float

    @classmethod
    def of(cls, event: dp_accounting.DpEvent | None) -> Self:
        releases = {} if event is None else events.counts(event)
        for leaf in releases:
            if not isinstance(leaf, dp_accounting.GaussianDpEvent):
                raise InputError(
                    f"a plan can come after Gaussian releases on everyone, found "
                    f"{type(leaf).__name__}"
                )
        # Gaussians compose to a Gaussian: the squares of their mu add up (Dong et al. 2022).
        squares = [count / leaf.noise_multiplier**2 for leaf, count in releases.items()]  # pyright: ignore
        return cls(math.sqrt(math.fsum(squares)))

    def and_then(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        if not self.mu:
            return event
        return dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(1 / self.mu), event])

    def epsilon(self, delta: float) -> float:
        return confirmation.gaussian_epsilon(self.mu, delta)
