"""What bounds a contribution, as a plan states it; how it is done: `privacy.clipping`."""

import dataclasses

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy.clipping import Clipping


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """Adaptive quantile clipping (Andrew et al. 2021, Algorithm 1).

    A client adds b_i - 1/2, where b_i says whether its update's norm is within the clip norm. The
    values get the multiplier z_D = (z^-2 - (2 sigma_b)^-2)^(-1/2) instead of z, so that values and
    quantile together cost what z alone would (Theorem 1).

    Attributes:
      target_quantile: the share of clients whose update should be within the clip norm.
      learning_rate: of the geometric update.
      indicator_noise: sigma_b, the noise's standard deviation on the sum of (b_i - 1/2), in
        clients; None = 0.05 times the planned clients per round.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    indicator_noise: float | None = None

    def __post_init__(self):
        checks.open_fraction("target_quantile", self.target_quantile)
        checks.positive("adaptive learning_rate", self.learning_rate)
        if self.indicator_noise is not None:
            checks.positive("indicator_noise", self.indicator_noise)

    def indicator_noise_std(self, clients_per_round: int) -> float:
        """Returns sigma_b, in clients."""
        given = self.indicator_noise
        return 0.05 * clients_per_round if given is None else given

    def check_noise(self, multiplier: float, clients_per_round: int) -> None:
        """Refuses a z for which no z_D exists."""
        std = self.indicator_noise_std(clients_per_round)
        if not 2 * std > multiplier:
            raise InputError(
                f"indicator_noise = {std:g} is too small for noise_multiplier = {multiplier:g}: "
                "the quantile alone would cost more than the plan; it must exceed half the noise "
                "multiplier"
            )

    def value_multiplier(self, multiplier: float, clients_per_round: int) -> float:
        """Returns z_D for the z of the plan."""
        return (multiplier**-2 - (2 * self.indicator_noise_std(clients_per_round)) ** -2) ** -0.5


@dataclasses.dataclass(frozen=True)
class Clip:
    """What bounds a client's contribution (see `privacy.clipping`).

    Attributes:
      norm: S, the L2 bound (the first round's, under adaptive clipping).
      kind: "flat" or "per_layer".
      adaptive: None for a constant norm.
    """

    norm: float
    kind: Clipping = "flat"
    adaptive: AdaptiveClip | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", checks.positive("clip_norm", self.norm))
        if not 1e-12 <= self.norm <= 1e12:
            raise InputError(
                f"clip_norm must lie in [1e-12, 1e12], found {self.norm:g}: the square of a "
                "norm outside that range does not fit float32"
            )
        checks.one_of("clipping", self.kind, ("flat", "per_layer"))
        if self.adaptive is None:
            return
        if not isinstance(self.adaptive, AdaptiveClip):
            raise InputError(f"adaptive_clip must be an AdaptiveClip, found {self.adaptive!r}")
        if self.kind == "per_layer":
            raise InputError(
                "adaptive_clip follows a quantile of the whole update's norm, so it needs "
                "clipping = 'flat', found 'per_layer'"
            )
