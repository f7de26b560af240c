"""What one release of metrics contains, its noise and its privacy cost."""

import dataclasses
import math
from typing import Any, Self

import dp_accounting

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.privacy import gaussian
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan

TWENTIETHS = tuple(i / 20 for i in range(21))


@dataclasses.dataclass(frozen=True)
class MetricsPlan:
    """What one release of metrics contains and costs; every field is public.

    Attributes:
      population: N, the number of clients.
      noise_multiplier: z.
      delta: delta of the guarantee; below 1 / N.
      edges: edges of the histogram's bins, increasing from 0 to 1. A bin includes its lower edge,
        and the last bin includes both. All bins have equal noise, so narrow bins where thresholds
        are expected cost little.
      slices: names of slice 0, slice 1 and so on, where the number is an example's value in the
        column that examples are sliced by.
      histogram_share: h, the histogram's share of a contribution's squared norm. With 1 no slices
        are released, with 0 no histogram.
      max_examples: a client with more examples uses a uniform subset of this many.
      private: False only for plans made by `without_privacy`.

    Raises:
      InputError: a field has the wrong type, is out of range, or contradicts another field.
    """

    population: int
    noise_multiplier: float
    delta: float
    edges: tuple[float, ...] = TWENTIETHS
    slices: tuple[str, ...] = ("all",)
    histogram_share: float = 0.5
    max_examples: int = 1024
    private: bool = True

    def __post_init__(self) -> None:
        for name in ("population", "max_examples"):
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name)))
        edges = tuple(checks.real("edges", edge) for edge in self.edges)
        rising = all(low < high for low, high in zip(edges, edges[1:], strict=False))
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != 1 or not rising:
            raise InputError(f"edges must increase from 0 to 1, found {list(edges)}")
        object.__setattr__(self, "edges", edges)
        slices = tuple(self.slices)
        named = all(isinstance(name, str) and name for name in slices)
        if isinstance(self.slices, str) or not slices or not named:
            raise InputError(f"slices must be names, at least one of them, found {self.slices!r}")
        if len(set(slices)) != len(slices):
            raise InputError(f"slices must have different names, found one twice in {slices}")
        object.__setattr__(self, "slices", slices)
        checks.fraction("histogram_share", self.histogram_share)
        if not self.private and self.noise_multiplier != 0:
            raise InputError(
                "noise_multiplier must be 0 in a plan without privacy, found "
                f"{self.noise_multiplier:g}; make such a plan by MetricsPlan.without_privacy"
            )
        self.plan()  # checks noise and delta, as for any plan

    @classmethod
    def calibrated(cls, epsilon: float, delta: float, population: int, **settings: Any) -> Self:
        """Returns the plan with the least noise that is (epsilon, delta)-private.

        The noise follows from the exact analysis of the Gaussian mechanism (Balle and Wang 2018)
        and is confirmed by a second formula.

        Args:
          settings: the other fields of the plan.

        Raises:
          InputError: a value is refused by the plan.
        """
        trial = cls(population=population, noise_multiplier=1.0, delta=delta, **settings)
        z = gaussian.smallest_multiplier(
            lambda z: dataclasses.replace(trial.plan(), noise=Noise(z)).guarantee(), epsilon
        )
        return dataclasses.replace(trial, noise_multiplier=z)

    @classmethod
    def without_privacy(cls, population: int, **settings: Any) -> Self:
        """Returns the plan of the same metrics without noise: NOT private, and marked so."""
        return cls(
            population=population, noise_multiplier=0.0, delta=0.0, private=False, **settings
        )

    @property
    def weights(self) -> tuple[float, float]:
        """The factors of histogram and slices before the noise: square roots of their shares."""
        return (math.sqrt(self.histogram_share), math.sqrt(1 - self.histogram_share))

    def plan(self) -> Plan:
        """Returns the plan of the release: one round in which every client takes part."""
        return Plan(
            rounds=1,
            clip=Clip(1.0),  # the norm that the `weights` give a client
            noise=Noise(self.noise_multiplier) if self.private else None,
            participation=Poisson(self.population, self.population),
            delta=self.delta,
        )

    def event(self) -> dp_accounting.DpEvent:
        """Returns the release as an event for accounting."""
        return self.plan().charge_event()

    def epsilon(self) -> float:
        """Returns the exact epsilon of the release at `delta`."""
        return self.plan().epsilon()

    def statement(self) -> str:
        """Returns the guarantee in one sentence."""
        return self.plan().statement()

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values for JSON."""
        return dataclasses.asdict(self)
