"""Noise as if more clients took part than there are: a SIMULATION, and no guarantee for anybody.

A few thousand clients cannot hide in the noise that a useful model bears, but a million can. To see
how good a model of the million would be, n clients a round train with the noise of C > n:

    the larger population    sum of C clients + N(0, (z S)^2)            mean: noise z S / C
    the simulation           sum of n clients + N(0, (z S n / C)^2)      mean: noise z S / C

Both means have equal noise, and so about equal utility. The simulation's noise multiplier is z n /
C, by which it is charged to the ledger of its clients. The epsilon of z, C and the larger
population is not theirs.

Reference: Augenstein et al. 2020, "Privacy at scale".
"""

import dataclasses

from jaxpfl.checked import Checked, OpenFraction, PositiveInt
from jaxpfl.errors import InputError
from jaxpfl.privacy.clipping import AdaptiveClip
from jaxpfl.privacy.participation import Participation

SIMULATED = "SIMULATED"
"""The word that every statement on such a run begins with."""


def both_statements(larger: str, here: str) -> str:
    """Joins the statements of the larger population and of the actual clients."""
    return f"the larger population would have {larger}; these clients have {here}"


@dataclasses.dataclass(frozen=True)
class LargerPopulation(Checked):
    """The larger population that a simulation's noise is scaled for; public.

    As the section `simulated` of a config: `privacy.epsilon`, or `privacy.noise_multiplier`, and
    this `delta` are then the larger population's. The guarantee of the run's own clients is stated,
    too, at `privacy.delta`, and charged to the ledger, which `privacy.epsilon` does not limit.

    Attributes:
      population: N.
      clients_per_round: C.
      delta: of the larger population's guarantee, below 1 / N.
    """

    population: PositiveInt
    clients_per_round: PositiveInt
    delta: OpenFraction

    def label(self, clients_per_round: int) -> str:
        """Says that the noise of `clients_per_round` clients simulates this population's."""
        return (
            f"{SIMULATED}: noise of {clients_per_round:,} clients scaled as if "
            f"{self.clients_per_round:,} of {self.population:,} took part; no guarantee for these "
            "clients' data"
        )

    def check(self, participation: Participation, adaptive: AdaptiveClip | None) -> None:
        """Refuses a plan of more clients than these, and one whose noise or clip does not scale."""
        for name in ("population", "clients_per_round"):
            here, there = getattr(participation, name), getattr(self, name)
            if there < here:
                raise InputError(
                    f"simulated.{name} must be at least that of the run, {here}, found {there}: "
                    "what is simulated is a larger population"
                )
        if participation.sampling not in ("poisson", "fixed"):
            raise InputError(
                f"sampling = {participation.sampling!r} cannot be simulated by fewer clients, "
                "found a larger population: how often a client takes part, or is left out, does "
                "not scale with population / clients_per_round"
            )
        if adaptive is not None and adaptive.indicator_noise is not None:
            raise InputError(
                "a simulated larger population needs AdaptiveClip.indicator_noise = None, which "
                f"grows with the clients per round, found {adaptive.indicator_noise:g}"
            )
