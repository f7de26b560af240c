"""The setting of a plan's noise (`Noise`), and the guarantee of sums without a plan.

Nothing is drawn here: `privacy.mechanisms`, `exact_noise` and `correlated_noise` draw.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Self, get_args

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy.guarantee import Guarantee, Unit
from jaxpfl.privacy.participation import MinSeparation, Participation

if TYPE_CHECKING:
    # Noise without a strategy needs none of it.
    from jaxpfl.privacy.strategies import BufferedToeplitz

Trust = Literal["central", "local"]
NoiseKind = Literal["independent", "exact", "banded", "exact_banded", "blt", "tree"]


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise on the sum: its standard deviation is z S.

    Attributes:
      multiplier: z.
      kind: "independent" for new noise in every round, in float32; "exact" for the same in whole
        numbers (see `privacy.exact_noise`); "banded" and "exact_banded", with cyclic participation,
        for DP-FTRL's (see `privacy.correlated_noise`); "blt" and "tree", with a minimum separation
        (see `privacy.strategies`).
      blt: of kind "blt"; None = a `Plan` finds the best with three buffers.
      trust: who adds it: "central", the server, or "local", each client: see `privacy.local_trust`.
    """

    multiplier: float
    kind: NoiseKind = "independent"
    blt: "BufferedToeplitz | None" = None
    trust: Trust = "central"

    def __post_init__(self) -> None:
        z = checks.positive("noise_multiplier", self.multiplier)
        if not 1e-6 <= z <= 1e6:
            # Beyond, the accountants leave the range of their numbers.
            raise InputError(f"noise_multiplier must lie in 1e-6 .. 1e6, found {z:g}")
        object.__setattr__(self, "multiplier", z)
        checks.one_of("noise", self.kind, get_args(NoiseKind))
        checks.one_of("trust", self.trust, get_args(Trust))
        if self.trust == "local" and self.kind != "independent":
            raise InputError(f"trust = 'local' needs noise = 'independent', found {self.kind!r}")
        if self.blt is not None:
            from jaxpfl.privacy.strategies import BufferedToeplitz

            checks.instance("blt", self.blt, BufferedToeplitz, "a BufferedToeplitz")
            if self.kind != "blt":
                raise InputError(f"noise = {self.kind!r} takes no blt, found one")

    @property
    def correlated(self) -> bool:
        return self.kind in ("banded", "exact_banded", "blt", "tree")

    @property
    def overlaps(self) -> bool:
        """Whether noise of one epoch reaches into the next ones: see `privacy.strategies`."""
        return self.kind in ("blt", "tree")

    @property
    def exact(self) -> bool:
        return self.kind in ("exact", "exact_banded")

    def fitted(self, rounds: int, participation: Participation) -> Self:
        """Returns noise that overlaps with its strategy, whose cost is computed twice."""
        from jaxpfl.privacy import strategies

        if not isinstance(participation, MinSeparation):
            raise InputError(
                f"noise = {self.kind!r} needs sampling = 'min_separation', found "
                f"{participation.sampling!r}"
            )
        blt = self.blt
        if self.kind == "blt" and blt is None:
            blt = strategies.BufferedToeplitz.best(rounds, participation.separation)
        strategies.unit(blt, rounds, participation.separation)
        return dataclasses.replace(self, blt=blt)


def on_everyone(multipliers: Iterable[float], delta: float, unit: Unit = "client") -> Guarantee:
    """Returns the guarantee of noisy sums over everyone, with these multipliers (noise / shift).

    Infinity stands for a sum that is not released, and 0 for one without noise. Others z_i are
    together exactly as private as one with mu = shift / noise = sqrt(sum 1 / z_i^2) (Dong, Roth, Su
    2022, Corollary 3.3).
    """
    event = dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(z) for z in multipliers if math.isfinite(z)]
    )
    return Guarantee(event, delta, unit)
