"""A query to clients: one client's computation, the packing of its examples, and its cost."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpfl import checks
from jaxpfl.data.cohort import CLIENTS_PER_BUCKET, CohortSpec
from jaxpfl.data.columns import Column
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import ClientFn, Stateful, Stepping
from jaxpfl.federated.flow.client_program import captured
from jaxpfl.federated.mesh import checked, client_mesh, default_chunk, replicas, splits_model
from jaxpfl.federated.release.accumulators import (
    BLOCKS,
    Accumulator,
    ClipSteps,
    Compensated,
    FixedPoint,
)
from jaxpfl.privacy.guarantee import EXAMPLE_ROUNDING
from jaxpfl.privacy.plan import Plan


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a cohort is computed; a release only depends on it by rounding.

    Attributes:
      mesh: devices with the axis `clients`, or `clients` and `model` (`client_mesh`); None = all
        devices, each with a copy of the model.
      chunk: clients vmapped together on one copy of the model, a divisor of its share of a bucket.
        None = the largest divisor up to the backend's default. 1, whatever is asked for, if the
        client function has an operation that was not tried side by side (`federated.flow.lanes`).

    Raises:
      InputError: a value out of range, or a mesh that clients cannot be dealt to.
    """

    mesh: Mesh | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            checks.positive_int("chunk", self.chunk)
        if self.mesh is not None:
            checked(self.mesh)

    @property
    def devices(self) -> Mesh:
        """The mesh in use."""
        return client_mesh() if self.mesh is None else self.mesh

    @property
    def platform(self) -> str:
        """The devices' platform: "cpu", "gpu" or "tpu"."""
        return self.devices.devices.flat[0].platform

    @property
    def replicas(self) -> int:
        """The copies of the model, among which each bucket's clients are dealt."""
        return replicas(self.devices)


@dataclasses.dataclass(frozen=True)
class Query:
    """One question to the clients, and what it may cost.

    Attributes:
      label: names the query among an algorithm's; public.
      client_fn: what one client computes, by steps or whole, see `federated.clients.client`.
      plan: who takes part, in how many rounds, with which clip and noise.
      cohort: how a client's examples are capped and batched. Without a number of clients per bucket
        it gets 64 of them, or more if these do not fill the chunks of all devices and the plan has
        so many; it is a multiple of the devices (or of the copies of the model on them). A bucket
        has at most twice the plan's blocks of examples. For a whole client function all buckets
        have one shape.
      columns: the columns that `client_fn` reads; None = all numeric ones.
      prepare: what each client computes once from its own data before the first round, such as the
        mean of its embeddings: a map from a population to one with as many clients. It is called on
        blocks of clients (of examples, where these are the unit), each time as it was given, and
        must remember nothing: see `release.preparation`.
      execution: devices and chunk.

    Where the plan's unit is the example, those that take part do so once, in blocks of
    `cohort.max_examples`, whoever holds them. With a cap on a client's examples, another one could
    replace a removed one, which would double the sensitivity.

    Raises:
      InputError: the plan's unit is the example, and `client_fn` has no `example_bound` or one that
        exceeds the clip norm, examples would be used more than once, rounding could exceed what the
        plan's noise is for, or noise is exact; or exact noise is too small for the population.
    """

    label: str
    client_fn: ClientFn
    plan: Plan
    cohort: CohortSpec
    columns: tuple[str, ...] | None = None
    prepare: Callable[[Population], Population] | None = None
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not self.label:
            raise InputError(f"a query's label must be a string, found {self.label!r}")
        checks.instance("plan", self.plan, Plan, "a jaxpfl.Plan")
        checks.instance("cohort", self.cohort, CohortSpec, "a jaxpfl.CohortSpec")
        checks.instance("columns", self.columns or (), tuple, "a tuple of names")
        try:
            hash(self.client_fn)
        except TypeError:
            raise InputError(
                f"the client function of query {self.label!r} must be hashable (functions, or a "
                f"frozen dataclass without arrays), found {type(self.client_fn).__name__}"
            ) from None
        if self.cohort.clients_per_bucket is None:
            fitting = dataclasses.replace(self.cohort, clients_per_bucket=self._fitting())
            object.__setattr__(self, "cohort", fitting)
        if not isinstance(self.client_fn, Stepping) or self.plan.unit == "example":
            # One public shape: which of several a client gets would depend on other clients. Blocks
            # of examples are all computed by one program, which rounds them alike.
            one_shape = dataclasses.replace(self.cohort, one_shape=True)
            object.__setattr__(self, "cohort", one_shape)
        if self.plan.exact:
            if self.plan.unit == "example":
                raise InputError(
                    "exact noise needs unit = 'client': sums of clipped examples are rounded as "
                    "float32 within a client's program, and are not whole"
                )
            FixedPoint.require_room(self.plan)
        keeps = isinstance(self.client_fn, Stateful)
        if self.plan.local and (keeps or splits_model(self.execution.devices)):
            raise InputError(
                "trust = 'local' needs a client function without a state of each client, and "
                "devices that each hold the whole model"
            )
        if self.plan.unit == "client":
            return
        if keeps:
            raise InputError(
                "a client function that keeps a state of each client needs unit = 'client': an "
                "example that was not drawn in a round would still act through the state"
            )
        bound = getattr(self.client_fn, "example_bound", None)
        if bound is None:
            raise InputError(
                "a plan with unit = 'example' needs a client function with an example_bound, found "
                "one without"
            )
        if not bound <= self.plan.clip_norm:
            raise InputError(
                f"one example moves the sum by up to {bound:g}, but the plan's noise is for a "
                f"clip_norm of {self.plan.clip_norm:g}"
            )
        if self.cohort.epochs != 1:
            raise InputError(
                f"with unit = 'example' each is used once, found epochs = {self.cohort.epochs}"
            )
        if self.plan.private and self.rounding > EXAMPLE_ROUNDING:
            raise InputError(
                f"by rounding, one example could add more than {EXAMPLE_ROUNDING:.3g} of the clip "
                f"norm to what it moves the sum of query {self.label!r} by, and the plan's noise "
                "is not for that: choose fewer examples in a block "
                f"(CohortSpec.max_examples = {self.cohort.max_examples:,}), or fewer in a round"
            )

    @property
    def rounding(self) -> float:
        """The most that rounding adds to what one example moves the sum by, in clip norms."""
        # Only where the unit is the example.
        from jaxpfl.federated.release.example_rounding import example_rounding

        replicas = self.execution.replicas
        return example_rounding(self.client_fn, self.cohort, replicas, self.plan)

    @property
    def accumulator(self) -> Accumulator:
        """How clipped contributions are added up."""
        if self.plan.exact:
            return FixedPoint()
        if self.plan.unit == "example":
            return Compensated(BLOCKS)
        if self.plan.local:
            # Seldom used, and therefore loaded here.
            from jaxpfl.federated.release.local_noise import Messages

            return Messages()
        return ClipSteps() if self.plan.private else Compensated()

    @property
    def captured(self) -> list[str]:
        """The values that its functions capture, by name and kind: public by declaration."""
        return [*captured(self.client_fn), *captured(self.prepare)]

    def _fitting(self) -> int:
        """The capacity of buckets that keep all devices busy."""
        replicas, given = self.execution.replicas, self.execution.chunk
        planned = self.plan.clients_per_round
        if self.plan.unit == "example":
            planned = -(-planned // self.cohort.max_examples)
        # Twice the plan's clients, because a sampled cohort may be larger, and a second bucket for
        # a few of them would take as long as the first. No more, because empty slots are copied.
        most = -(-2 * planned // replicas)
        chunk = given or default_chunk(self.execution.devices)
        share = min(most, max(chunk, -(-CLIENTS_PER_BUCKET // replicas)))
        return replicas * (share if given is None else -(-share // given) * given)


def require_population(query: Query, population: Population) -> None:
    """Refuses a population of another size than the plan's."""
    plan = query.plan
    units = len(population) if plan.unit == "client" else population.num_examples
    if plan.population != units:
        raise InputError(
            f"the plan of query {query.label!r} is for a population of {plan.population} "
            f"{plan.unit}s, the data has another number, for which its epsilon is not valid"
        )


def read_columns(query: Query, population: Population) -> dict[str, Column]:
    """The columns that a query reads."""
    numeric = population.numeric()
    wanted = tuple(numeric) if query.columns is None else query.columns
    missing = [repr(name) for name in wanted if name not in numeric]
    if missing or (query.columns is None and not numeric):
        what = " ".join(["a numeric column", *missing[:1]])
        names = ", ".join(population.columns) or "none"
        raise InputError(f"query {query.label!r} needs {what}, found {names}")
    return {name: numeric[name] for name in wanted}


def arrays(query: Query, broadcast: Any) -> Any:
    """The broadcast's numbers as arrays; `InputError` if one is no number or exceeds 32 bits."""

    def converted(leaf: Any) -> Any:
        kind = {bool: bool, int: np.int32, float: np.float32}.get(type(leaf))
        try:
            array = jnp.asarray(leaf, kind) if kind or isinstance(leaf, np.generic) else leaf
            accepted = np.number, bool, jax.dtypes.prng_key
            numbers = any(jnp.issubdtype(array.dtype, dtype) for dtype in accepted)
        except (AttributeError, OverflowError, TypeError, ValueError):
            numbers = False
        if not numbers:
            raise InputError(
                f"the broadcast of query {query.label!r} must be a pytree of arrays of numbers or "
                f"of numbers that fit 32 bits, found a leaf of type {type(leaf).__name__}"
            )
        return array

    return jax.tree.map(converted, broadcast)


LARGEST_BUCKET = 2**37
"""The largest bucket that is traced for another machine: 128 GiB."""


def require_room(query: Query, columns: Mapping[str, Any], *, elsewhere: bool = False) -> None:
    """Refuses a query of whose clients' examples not even one bucket fits this machine's memory.

    Args:
      columns: that the client function reads; only shapes and dtypes are used.
      elsewhere: accepts up to `LARGEST_BUCKET` whatever this machine has. Without any limit, a
        program of a size that nobody means would be traced for hours.
    """
    spec = query.cohort
    # Each example has one more byte that says whether there is one, and eight that say which one.
    row = 9 + sum(math.prod(c.shape[1:]) * c.dtype.itemsize for c in columns.values())
    slots = spec.capacity * spec.rungs[-1] * spec.batch_size
    size = slots * row // jax.process_count()
    if elsewhere and size <= LARGEST_BUCKET:
        return
    checks.fits_memory(
        f"query {query.label!r}: a bucket of {spec.capacity:,} clients with {spec.rungs[-1]:,} "
        f"steps of {spec.batch_size:,} examples",
        size,
    )
