"""The setting of a plan's noise (`Noise`), and the smallest noise multiplier for an epsilon.

Nothing is drawn here: `privacy.mechanisms`, `exact_noise` and `correlated_noise` draw. The cost of
a round, sampled or on everyone, is that of its `privacy.participation`. `on_everyone` is for sums
without a plan: with multipliers z_i (noise / shift) they are together exactly as private as one
with mu = shift / noise = sqrt(sum 1 / z_i^2) (Dong, Roth, Su 2022, Corollary 3.3).
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, get_args

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy.guarantee import Guarantee, Unit

NoiseKind = Literal["independent", "exact", "banded", "exact_banded"]


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise on the sum: its standard deviation is z S.

    Attributes:
      multiplier: z.
      kind: "independent" for new noise in every round, in float32; "exact" for the same in whole
        numbers (see `privacy.exact_noise`); "banded" and "exact_banded", with cyclic participation,
        for DP-FTRL's (see `privacy.correlated_noise`).
    """

    multiplier: float
    kind: NoiseKind = "independent"

    def __post_init__(self) -> None:
        z = checks.positive("noise_multiplier", self.multiplier)
        if not 1e-6 <= z <= 1e6:
            # Beyond, the accountants leave the range of their numbers.
            raise InputError(f"noise_multiplier must lie in 1e-6 .. 1e6, found {z:g}")
        object.__setattr__(self, "multiplier", z)
        checks.one_of("noise", self.kind, get_args(NoiseKind))

    @property
    def correlated(self) -> bool:
        return self.kind in ("banded", "exact_banded")

    @property
    def exact(self) -> bool:
        return self.kind in ("exact", "exact_banded")


def on_everyone(multipliers: Iterable[float], delta: float, unit: Unit = "client") -> Guarantee:
    """Returns the guarantee of noisy sums over everyone, with these multipliers (noise / shift).

    Infinity stands for a sum that is not released, and 0 for one without noise.
    """
    finite = [z for z in multipliers if math.isfinite(z)]
    if not all(finite):
        return Guarantee(dp_accounting.NonPrivateDpEvent(), delta, unit)
    event = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(z) for z in finite])
    return Guarantee(event, delta, unit)
