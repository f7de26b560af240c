"""What clients are asked: one client's computation, how its examples are packed, what it costs."""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import AxisType, Mesh

from jaxpfl import checks
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.accumulators import Accumulator, Compensated
from jaxpfl.federated.client import ClientFn
from jaxpfl.privacy.plan import Plan

Prepare = Callable[[Population], Population]
CLIENTS = "clients"


def client_mesh(devices: int | None = None) -> Mesh:
    """Returns a mesh over the first `devices` devices (default: all) with one axis, `clients`.

    Clients are independent, so this one axis serves one CPU, several virtual CPU devices,
    several GPUs and several hosts alike.
    """
    available = jax.devices()
    chosen = available if devices is None else available[:devices]
    if devices is not None and len(available) < devices:
        raise ValueError(f"a mesh of {devices} devices was asked for, JAX sees {len(available)}")
    return jax.make_mesh((len(chosen),), (CLIENTS,), axis_types=(AxisType.Auto,), devices=chosen)


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a cohort is computed; what is released does not depend on it, up to rounding.

    Attributes:
      mesh: devices with one axis `clients`; None: all devices.
      chunk: clients vmapped together on one device; it must divide a device's share of a bucket.
        None: by backend, lowered to the nearest divisor.
      accumulator: how clipped contributions are added up.
    """

    mesh: Mesh | None = None
    chunk: int | None = None
    accumulator: Accumulator = Compensated()  # noqa: RUF009 (frozen, without state)

    def __post_init__(self) -> None:
        if self.chunk is not None:
            checks.positive_int("chunk", self.chunk)

    @property
    def devices(self) -> Mesh:
        """The mesh in use."""
        return client_mesh() if self.mesh is None else self.mesh


@dataclasses.dataclass(frozen=True)
class Query:
    """One question to clients; what an algorithm asks of them and at which price.

    Attributes:
      label: names the query among an algorithm's; public.
      client_fn: `(broadcast, examples, key) -> contribution` for one client.
      plan: who takes part, in how many rounds, with which clip and noise.
      cohort: how a client's examples are capped and batched.
      columns: the columns that `client_fn` reads; None: every numeric one.
      prepare: what each client computes once of its own data before the first round, such as the
        mean of its embeddings. It maps the population to one of as many clients, client by client:
        what it makes of one client must not depend on another, or the plan's sensitivity does not
        hold.
      execution: devices, chunk and accumulator.

    Where the plan's unit is the example, everyone takes part with all examples, once: they are
    dealt out in even blocks of `cohort.max_examples`, whoever holds them. A cap on a client's
    examples would put another one in a removed one's place, and so double the sensitivity.

    Raises:
      InputError: the plan's unit is the example, and `client_fn` states no bound for one or one
        above the plan's clip norm, or examples would be used more than once.
    """

    label: str
    client_fn: ClientFn
    plan: Plan
    cohort: CohortSpec
    columns: tuple[str, ...] | None = None
    prepare: Prepare | None = None
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not self.label:
            raise InputError(f"a query's label must be a string, found {self.label!r}")
        if self.plan.unit == "example":
            self._require_example_bound()

    def _require_example_bound(self) -> None:
        bound = getattr(self.client_fn, "example_bound", None)
        if bound is None:
            raise InputError(
                "a plan with unit = 'example' needs a client function with an example_bound: this "
                "one is bounded by client only"
            )
        if not bound <= self.plan.clip_norm:
            raise InputError(
                f"one example moves the sum by up to {bound:g}, the plan's clip_norm is "
                f"{self.plan.clip_norm:g}: its noise would be too small"
            )
        if self.cohort.epochs != 1:
            raise InputError(
                f"with unit = 'example' each is used once, found epochs = {self.cohort.epochs}"
            )
        if not isinstance(self.execution.accumulator, Compensated):
            raise InputError(
                "fixed-point sums need unit = 'client': their range is set by its clip"
            )
