"""The door: the only way anything computed on clients' data reaches the server.

    broadcast + cohort --client_fn--> contributions --clip--> --sum--> --noise--> release

Every algorithm's contribution (a model delta, a histogram, a score vector, a moment) passes
through `private_sum`, so sensitivity, noise, padding, sharding and speed are settled once.

Guarantee. With a `Plan` of clip norm S and noise standard deviation sigma, the release is
sum_i clip_S(contribution_i) + N(0, sigma^2 I), where a client whose contribution is not finite
counts as zero. Adding or removing one client moves the sum by at most S in L2 norm, whatever
the data, the padding, the chunk size and the number of devices; noise is drawn once per
coordinate. Under `Plan(unit="example")` a client's contribution is a sum that its function bounds
example by example (`client.BoundedByExample`): it is added whole, and adding or removing one
EXAMPLE moves the sum by at most S. What that costs over the plan's rounds is `plan.epsilon()`; the
ledger is charged by the caller before the door is opened (`experiments.run`).

Reference: DP-FedAvg, McMahan et al. 2018, Algorithm 1; Augenstein et al. 2020, Algorithm 2.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl import checks
from jaxpfl.data.cohort import Bucket
from jaxpfl.errors import InputError
from jaxpfl.federated.accumulators import Accumulator, Compensated, Pair
from jaxpfl.federated.adaptive_clipping import next_clip_norm
from jaxpfl.federated.client import ClientFn, Examples
from jaxpfl.federated.mesh import CLIENTS, client_mesh
from jaxpfl.privacy.clipping import Clipping, clip_factors
from jaxpfl.privacy.keys import RoundKeys
from jaxpfl.privacy.mechanisms import gaussian_noise_like, weighted_noise_like
from jaxpfl.privacy.plan import Plan

PyTree = Any


class DoorState(NamedTuple):
    """What the mechanism carries from round to round; public.

    Attributes:
      clip_norm: float32 scalar, the L2 clip norm that the NEXT round uses.
    """

    clip_norm: jax.Array


class Door(Protocol):
    """`init() -> state` and `(broadcast, cohort, state, keys) -> (release, state)`."""

    @property
    def shards(self) -> int:
        """Devices over which a cohort is dealt."""
        ...

    def init(self) -> DoorState: ...

    def __call__(
        self, broadcast: PyTree, cohort: Iterable[Bucket], state: DoorState, keys: RoundKeys
    ) -> tuple[PyTree, DoorState]: ...


class _Sums(NamedTuple):
    """Partial sums per device, [devices, ...]."""

    contributions: PyTree
    below: jax.Array  # [devices], sum of (1[norm <= clip] - 1/2) over clients


@dataclasses.dataclass(frozen=True)
class _Engine:
    """What is compiled in. Doors with equal engines share their compiled functions."""

    client_fn: ClientFn
    clipping: Clipping
    clips: bool  # whether contributions are clipped here: not where each example is bounded
    accumulator: Accumulator
    chunk: int
    mesh: Mesh


@partial(jax.jit, static_argnames=("engine", "like"))
def _zero_sums(engine: _Engine, like: "_Shapes") -> _Sums:
    devices = engine.mesh.size
    sums = _Sums(engine.accumulator.zeros(like.tree(), devices), jnp.zeros((devices,), jnp.float32))
    return jax.lax.with_sharding_constraint(
        sums, NamedSharding(engine.mesh, PartitionSpec(CLIENTS))
    )


@partial(jax.jit, static_argnames=("engine",), donate_argnames=("sums",))
def _accumulate(
    engine: _Engine,
    broadcast: PyTree,
    sums: _Sums,
    bucket: Bucket,
    clip_norm: jax.Array,
    key: jax.Array,
) -> _Sums:
    """Adds one bucket's clipped contributions to the running sums."""

    accumulator = engine.accumulator
    bound = clip_norm if engine.clips else jnp.float32(jnp.inf)

    def on_one_device(broadcast, sums, bucket, clip_norm, bound, key):
        def add_chunk(index, carry):
            subtotal, below_sum = carry
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * engine.chunk, engine.chunk),
                bucket,
            )
            steps = jnp.max(part.steps)

            def one_client(batches, mask, client):
                examples = Examples(batches, mask, steps)
                contribution = engine.client_fn(
                    broadcast, examples, jax.random.fold_in(key, client)
                )
                return contribution, *clip_factors(contribution, engine.clipping, bound)

            if engine.chunk == 1:
                # Not vmapped: a batch axis of one would cost XLA its plain matrix products.
                alone = jax.tree.map(lambda leaf: leaf[0], part)
                outputs = one_client(alone.batches, alone.mask, alone.client)
                outputs = jax.tree.map(lambda leaf: leaf[None], outputs)
            else:
                outputs = jax.vmap(one_client)(part.batches, part.mask, part.client)
            leaves_C, factors_C, norm_C, finite_C = outputs
            real_C = part.weight > 0
            below_C = jnp.where(norm_C <= clip_norm, jnp.float32(0.5), jnp.float32(-0.5))
            below = jnp.sum(jnp.where(real_C, below_C, jnp.float32(0.0)))
            added = _add_all_that_count(
                accumulator, subtotal, leaves_C, factors_C, real_C & finite_C, clip_norm
            )
            return added, below_sum + below

        slots = bucket.weight.shape[0]
        last_real = jnp.max(jnp.where(bucket.weight > 0, jnp.arange(1, slots + 1), 0))
        # A traced bound: a bucket that is not full costs only what it holds.
        chunks = (last_real + engine.chunk - 1) // engine.chunk
        start = accumulator.start(sums.contributions), jnp.float32(0.0)
        subtotal, below = jax.lax.fori_loop(0, chunks, add_chunk, start)
        return _Sums(accumulator.merge(sums.contributions, subtotal), sums.below + below)

    everywhere, dealt = PartitionSpec(), PartitionSpec(CLIENTS)
    return jax.shard_map(
        on_one_device,
        mesh=engine.mesh,
        in_specs=(everywhere, dealt, dealt, everywhere, everywhere, everywhere),
        out_specs=dealt,
        # Gradients stay on their device: replication checking would insert sums over devices.
        check_vma=False,
    )(broadcast, sums, bucket, clip_norm, bound, key)


def _add_all_that_count(accumulator, subtotal, leaves_C, factors_C, counts_C, clip_norm):
    """Adds a chunk's contributions, leaving out padding and what is not finite.

    Rows are skipped, never masked: a select among the values keeps XLA's CPU backend from
    vectorising the sum (measured fifty times slower over [1000, 1 M] float32), and a product with
    zero would let NaN through. Chunks with a row to skip are rare and take the loop.
    """

    def everyone(subtotal):
        return accumulator.add(subtotal, leaves_C, factors_C, clip_norm)

    def one_by_one(subtotal):
        def add_row(index, subtotal):
            leaf_1, factor_1 = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), (leaves_C, factors_C)
            )
            return jax.lax.cond(
                counts_C[index],
                lambda total: accumulator.add(total, leaf_1, factor_1, clip_norm),
                lambda total: total,
                subtotal,
            )

        return jax.lax.fori_loop(0, counts_C.shape[0], add_row, subtotal)

    if counts_C.shape[0] == 1:
        return jax.lax.cond(counts_C[0], everyone, lambda total: total, subtotal)
    return jax.lax.cond(jnp.all(counts_C), everyone, one_by_one, subtotal)


@partial(jax.jit, static_argnames=("engine", "private"))
def _release(
    engine: _Engine,
    private: bool,
    sums: _Sums,
    clip_norm: jax.Array,
    value_std: jax.Array,
    below_std: jax.Array,
    key: jax.Array,
    terms: tuple[jax.Array, jax.Array] | None,
) -> tuple[PyTree, jax.Array]:
    """Joins devices and adds the noise, once: (noisy sum, noisy sum of indicators)."""
    sums = jax.lax.with_sharding_constraint(sums, NamedSharding(engine.mesh, PartitionSpec()))
    total = engine.accumulator.total(sums.contributions)
    below, noise = jnp.sum(sums.below), None
    if private:
        value_key, below_key = jax.random.split(key)
        like = jax.tree.map(lambda pair: pair.high, total, is_leaf=lambda x: isinstance(x, Pair))
        if terms is None:
            noise = gaussian_noise_like(value_key, like, value_std)
        else:
            noise = weighted_noise_like(*terms, like, value_std)
        noise = _drawn_in_shares(noise, engine.mesh)
        below = below + gaussian_noise_like(below_key, below, below_std)
    return engine.accumulator.released(total, noise, clip_norm), below


def _drawn_in_shares(noise: PyTree, mesh: Mesh) -> PyTree:
    """Lets each device draw a share of the noise; its values do not depend on who draws them."""

    def share(leaf):
        even = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
        spec = PartitionSpec(CLIENTS) if even else PartitionSpec()
        leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(share, noise)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """A pytree of shapes that can be hashed, so that it can be static under jit."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, like: PyTree) -> "_Shapes":
        leaves, structure = jax.tree.flatten(like)
        return cls(structure, tuple(tuple(leaf.shape) for leaf in leaves))

    def tree(self) -> PyTree:
        leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        return jax.tree.unflatten(self.structure, leaves)


def default_chunk() -> int:
    """Clients trained side by side on one device, by backend.

    On a CPU one after the other is fastest (benchmarks/results/round.jsonl): a client's matrix
    products already fill the cores and its weights stay in cache. An accelerator needs many.
    """
    return 1 if jax.default_backend() == "cpu" else 32


def private_sum(
    client_fn: ClientFn,
    plan: Plan,
    contribution: PyTree,
    *,
    mesh: Mesh | None = None,
    chunk: int | None = None,
    accumulator: Accumulator | None = None,
) -> Door:
    """Returns the door for `client_fn` under `plan`.

    The cohort is any iterable of `data.Bucket`s of one capacity; they are consumed one at a
    time, so memory is bounded by the bucket and not by the cohort. One function is compiled for
    each bucket shape, and it is shared by all doors whose client function, clipping, chunk,
    accumulator and mesh are equal, whatever their cohort size, clip norm and noise.

    Args:
      client_fn: `(broadcast, examples, key) -> contribution` for one client.
      plan: makes the clip norm, the noise and the event.
      contribution: a pytree of arrays (or shapes) like the contribution.
      mesh: devices with one axis `clients`; default all devices.
      chunk: clients vmapped together on one device; must divide a device's share of a bucket.
        Default: by backend, lowered to the nearest divisor.
      accumulator: default `Compensated()`.

    Raises:
      InputError: the plan's unit is the example, and `client_fn` states no bound for one, or one
        above the plan's clip norm.

    Returns:
      A `Door`: `(broadcast, cohort, state, keys) -> (release, state)`, where `release` is
      the noisy SUM (float32, shaped like `contribution`); divide by `plan.denominator`.
    """
    mesh = client_mesh() if mesh is None else mesh
    if chunk is not None:
        checks.positive_int("chunk", chunk)
    accumulator = Compensated() if accumulator is None else accumulator
    if plan.unit == "example":
        _require_example_bound(client_fn, plan, accumulator)
    return _Door(client_fn, plan, _Shapes.of(contribution), mesh, chunk, accumulator)


def _require_example_bound(client_fn: ClientFn, plan: Plan, accumulator: Accumulator) -> None:
    bound = getattr(client_fn, "example_bound", None)
    if bound is None:
        raise InputError(
            "a plan with unit = 'example' needs a client function with an example_bound: this one "
            "is bounded by client only"
        )
    if not bound <= plan.clip_norm:
        raise InputError(
            f"one example moves the sum by up to {bound:g}, the plan's clip_norm is "
            f"{plan.clip_norm:g}: its noise would be too small"
        )
    if not isinstance(accumulator, Compensated):
        raise InputError("fixed-point sums need unit = 'client': their range is set by its clip")


@dataclasses.dataclass(frozen=True)
class _Door:
    client_fn: ClientFn
    plan: Plan
    like: _Shapes
    mesh: Mesh
    chunk: int | None
    accumulator: Accumulator

    @property
    def shards(self) -> int:
        return self.mesh.size

    def init(self) -> DoorState:
        return DoorState(jnp.float32(self.plan.clip_norm))

    def __call__(
        self, broadcast: PyTree, cohort: Iterable[Bucket], state: DoorState, keys: RoundKeys
    ) -> tuple[PyTree, DoorState]:
        plan, sums = self.plan, None
        if plan.private and plan.noise_name != keys.made_for:
            raise InputError(
                f"the plan's noise is {plan.noise_name!r}, its keys must be made by Plan.keys: "
                f"these are for {keys.made_for!r}"
            )
        for bucket in cohort:
            engine = self._engine(self._chunk_of(bucket.weight.shape[0]))
            if sums is None:
                sums = _zero_sums(engine, self.like)
            bucket = jax.device_put(bucket, NamedSharding(self.mesh, PartitionSpec(CLIENTS)))
            sums = _accumulate(engine, broadcast, sums, bucket, state.clip_norm, keys.train)
        # Noise does not depend on the chunk: an empty round compiles nothing new.
        engine = self._engine(chunk=1)
        if sums is None:
            sums = _zero_sums(engine, self.like)
        release, noisy_below = _release(
            engine,
            plan.private,
            sums,
            state.clip_norm,
            jnp.float32(plan.value_noise_std(1.0)) * state.clip_norm,
            jnp.float32(plan.indicator_noise_std),
            keys.noise,
            keys.terms,
        )
        return release, DoorState(next_clip_norm(plan, state.clip_norm, noisy_below))

    def _engine(self, chunk: int) -> _Engine:
        plan = self.plan
        clips = plan.unit == "client"
        return _Engine(self.client_fn, plan.clipping, clips, self.accumulator, chunk, self.mesh)

    def _chunk_of(self, slots: int) -> int:
        """The chunk for buckets of this many slots; it divides a device's share of them."""
        if slots % self.mesh.size:
            raise InputError(
                f"a bucket of {slots} clients cannot be dealt to {self.mesh.size} devices: "
                "make CohortSpec.clients_per_bucket a multiple of the number of devices"
            )
        share = slots // self.mesh.size
        if self.chunk is None:
            return next(c for c in range(min(default_chunk(), share), 0, -1) if share % c == 0)
        if share % self.chunk:
            raise InputError(
                f"chunk = {self.chunk} does not divide the {share} clients that a device gets "
                "of each bucket"
            )
        return self.chunk
