"""The door: clip, sum, noise. Private to `federated.release`, which charges before it is opened.

    broadcast + cohort --client_fn--> contributions --clip--> --sum--> --noise--> release

Guarantee. With a `Plan` of clip norm S and noise standard deviation sigma, the release is
sum_i clip_S(contribution_i) + N(0, sigma^2 I), where a contribution that is not finite counts as
zero. Adding or removing one client moves the sum by at most S in L2 norm, whatever the data, the
padding, the chunk size and the number of devices; noise is drawn once per coordinate. Under
`Plan(unit="example")` the client function bounds each example's share of a contribution
(`client.BoundedByExample`): contributions are not clipped, and adding or removing one EXAMPLE moves
the sum by at most S.

The noise's key is a function of a secret key and of THE EXACT SUM (the idea of deterministic
signatures, RFC 6979): a keyed checksum of the sum's bits, computed on the device, is folded into
it. Equal sums give the same release again, which reveals nothing new. Sums that differ in one bit,
for whatever reason (code, data, flags, another rounding), get independent noise, so that the
difference of two releases always has noise.

Reference: DP-FedAvg, McMahan et al. 2018, Algorithm 1; Augenstein et al. 2020, Algorithm 2.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.data.cohort import Bucket
from jaxpfl.errors import InputError
from jaxpfl.federated.accumulators import Accumulator, Pair
from jaxpfl.federated.adaptive_clipping import next_clip_norm
from jaxpfl.federated.checksum import bound_to_bits
from jaxpfl.federated.client import ClientFn, Examples
from jaxpfl.federated.query import CLIENTS, Query
from jaxpfl.privacy.clipping import Clipping, clip_factors
from jaxpfl.privacy.mechanisms import coordinates, cut, standard_normal

PyTree = Any


class Keys(NamedTuple):
    """The secret keys of one release.

    Attributes:
      train: typed key of clients' draws.
      noise: typed key of the noise, before it is bound to the sum.
      checksum: uint32 [4], secrets of the checksum that binds it.
    """

    train: jax.Array
    noise: jax.Array
    checksum: jax.Array


class Summed(NamedTuple):
    """The result of the door; public once it was charged.

    Attributes:
      value: the noisy SUM, float32, shaped like the contribution.
      clip_norm: float32 scalar, the L2 clip norm of the next round.
      name: uint32 [4], a pseudorandom function of the secret key and the exact sum: equal for the
        same release and different for others, without revealing anything of the sum.
    """

    value: PyTree
    clip_norm: jax.Array
    name: jax.Array


class _Sums(NamedTuple):
    """Partial sums per device, [devices, ...]."""

    contributions: PyTree
    below: jax.Array  # [devices], sum of (1[norm <= clip] - 1/2) over clients


@dataclasses.dataclass(frozen=True)
class _Engine:
    """The static part of compiled functions, which doors with equal engines share."""

    client_fn: ClientFn
    clipping: Clipping
    clips: bool  # False where the client function bounds each example itself
    accumulator: Accumulator
    chunk: int
    mesh: Mesh


@partial(jax.jit, static_argnames=("accumulator", "mesh", "like"))
def _zero_sums(accumulator: Accumulator, mesh: Mesh, like: "_Shapes") -> _Sums:
    sums = _Sums(accumulator.zeros(like.tree(), mesh.size), jnp.zeros((mesh.size,), jnp.float32))
    return jax.lax.with_sharding_constraint(sums, NamedSharding(mesh, PartitionSpec(CLIENTS)))


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
                # Not vmapped: with a batch axis of one, XLA would not use plain matrix products.
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
        # A traced bound, so that empty slots at the end of a bucket cost nothing.
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
        # Replication checking would insert sums of gradients over devices.
        check_vma=False,
    )(broadcast, sums, bucket, clip_norm, bound, key)


def _add_all_that_count(accumulator, subtotal, leaves_C, factors_C, counts_C, clip_norm):
    """Adds a chunk's contributions, leaving out padding and what is not finite.

    Rows are skipped and not masked: with a select among the values, XLA's CPU backend does not
    vectorise the sum (fifty times slower over [1000, 1 M] float32), and a product with zero would
    let NaN through. Only chunks with a row to skip, which are rare, take the loop.
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


@partial(jax.jit, static_argnames=("accumulator", "mesh", "private"))
def _release(
    accumulator: Accumulator,
    mesh: Mesh,
    private: bool,
    sums_DxW: Pair,
    below_D: jax.Array,
    clip_norm: jax.Array,
    value_std: jax.Array,
    below_std: jax.Array,
    keys: "Keys",
    shared_P: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds up the devices and the noise: (noisy sum [W], noisy sum of indicators, name).

    The sum is one vector of padded length, whatever the shapes of the contributions, so that doors
    with vectors of equal length share one compiled program.

    Args:
      sums_DxW: each device's sum, as `_side_by_side` makes it.
      shared_P: noise of unit scale that several rounds share; None = drawn for this release alone.
    """
    total_W = accumulator.join_devices(sums_DxW)
    below = jnp.sum(below_D)
    # With the scales, because the same noise at two scales would reveal the noise.
    scales = (below, clip_norm, value_std, below_std)
    key = bound_to_bits(keys.noise, keys.checksum, (total_W, scales), mesh)
    # Both at once, which compiles one program instead of two.
    noise_key, name_key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(2))
    noise_W = None
    if private:
        padded = total_W.high.size
        if shared_P is None:
            # XLA's CPU backend only vectorises even shares (17 ms instead of 150).
            even = -(-padded // mesh.size) * mesh.size
            drawn_W = _dealt(mesh, standard_normal(noise_key, (even,)))[:padded]
        else:
            own = standard_normal(noise_key, (padded - shared_P.size,))
            drawn_W = jnp.concatenate([shared_P, own])
        noise_W = drawn_W * value_std
        # Of a coordinate of the padding, which is used for nothing else.
        below = below + drawn_W[-1] * below_std
    value_W = accumulator.add_noise(total_W, noise_W, clip_norm)
    # Not split among devices: a server would add it up in another order than a resumed one.
    value_W = jax.lax.with_sharding_constraint(value_W, NamedSharding(mesh, PartitionSpec()))
    # An output of threefry like any other, which is used for nothing else.
    return value_W, below, jax.random.key_data(name_key)


@partial(jax.jit, static_argnames=("like",))
def _cut(value_W: jax.Array, like: "_Shapes") -> PyTree:
    return cut(value_W, like.tree())


# All sums are joined to one vector, whose length is a multiple of this number, which most numbers
# of devices divide. It is padded with at least one zero.
_WIDTH = 128


@partial(jax.jit, static_argnames=("mesh",))
def _side_by_side(mesh: Mesh, contributions: PyTree) -> Pair:
    """The devices' sums [devices, ...] as one pair [devices, W]; each device gets a share of W."""
    pairs = jax.tree.leaves(contributions, is_leaf=_is_pair)
    width = sum(math.prod(pair.high.shape[1:]) for pair in pairs)
    spare = _WIDTH - width % _WIDTH

    def joined(*leaves):
        rows = [leaf.reshape(mesh.size, -1) for leaf in leaves]
        rows.append(jnp.zeros((mesh.size, spare), leaves[0].dtype))
        return _dealt(mesh, jnp.concatenate(rows, axis=1))

    return jax.tree.map(joined, *pairs)


def _is_pair(node: Any) -> bool:
    return isinstance(node, Pair)


def _dealt(mesh: Mesh, array: jax.Array) -> jax.Array:
    """Splits the last axis evenly among the devices."""
    spec = PartitionSpec(*[None] * (array.ndim - 1), CLIENTS)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """A hashable pytree of shapes, for a static argument of jit."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, like: PyTree) -> "_Shapes":
        leaves, structure = jax.tree.flatten(like)
        return cls(structure, tuple(tuple(leaf.shape) for leaf in leaves))

    def tree(self) -> PyTree:
        leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        return jax.tree.unflatten(self.structure, leaves)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def default_chunk() -> int:
    """The number of clients that one device trains side by side, by backend.

    On a CPU, 1 is fastest (benchmarks/results/round.jsonl): a client's matrix products already fill
    the cores, and its weights stay in the cache. An accelerator needs many.
    """
    return 1 if jax.default_backend() == "cpu" else 32


class Door:
    """The door of one query, for contributions of given shapes.

    One function is compiled for each bucket shape, and shared by all doors with equal client
    functions, clipping, chunks, accumulators and meshes, whatever their cohort sizes, clip norms
    and noise. Only one bucket is in memory at a time, and not the cohort.

    Args:
      query: what clients compute, and the plan.
      contribution: a pytree of arrays (or shapes) like one client's contribution.
    """

    def __init__(self, query: Query, contribution: PyTree) -> None:
        self.query = query
        self.mesh = query.execution.devices
        self._like = _Shapes.of(contribution)

    def __call__(
        self,
        broadcast: PyTree,
        cohort: Iterable[Bucket],
        clip_norm: jax.Array,
        keys: Keys,
        shared_noise_P: jax.Array | None = None,
    ) -> Summed:
        """Sums a cohort's contributions to `broadcast`, noisily.

        Args:
          clip_norm: float32 scalar, S of this round.
          keys: of this release alone.
          shared_noise_P: this round's noise of unit scale, for all coordinates of all leaves in
            their order, if the plan's noise is correlated between rounds.

        Raises:
          InputError: a bucket cannot be split evenly among devices, or a share into chunks.
        """
        plan, accumulator = self.query.plan, self.query.execution.accumulator
        sums = _zero_sums(accumulator, self.mesh, self._like)
        for bucket in cohort:
            engine = self._engine(self._chunk_of(bucket.weight.shape[0]))
            bucket = jax.device_put(bucket, NamedSharding(self.mesh, PartitionSpec(CLIENTS)))
            sums = _accumulate(engine, broadcast, sums, bucket, clip_norm, keys.train)
        value_W, noisy_below, name = _release(
            accumulator,
            self.mesh,
            plan.private,
            _side_by_side(self.mesh, sums.contributions),
            sums.below,
            clip_norm,
            jnp.float32(plan.value_noise_std(1.0)) * clip_norm,
            jnp.float32(plan.indicator_noise_std),
            keys,
            shared_noise_P,
        )
        value = _cut(value_W, self._like)
        return Summed(value, next_clip_norm(plan, clip_norm, noisy_below), name)

    def trace(self, broadcast: PyTree, columns: Mapping[str, np.ndarray]) -> tuple[int, int]:
        """Traces the sum of a bucket of the largest shape, without data, compiling or running.

        Args:
          broadcast, columns: only shapes and dtypes are used.

        Returns:
          The bytes of the bucket, and the clients that one device trains side by side.

        Raises:
          InputError: as `__call__`.
        """
        spec = self.query.cohort
        slots, shape = spec.clients_per_bucket, (spec.rungs[-1], spec.batch_size)
        parts: dict[str, Any] = {
            "batches": {
                name: _shape((slots, *shape, *column.shape[1:]), column.dtype)
                for name, column in columns.items()
            },
            "mask": _shape((slots, *shape), np.bool_),
            "steps": _shape((slots,), np.int32),
            "weight": _shape((slots,), np.float32),
            "client": _shape((slots,), np.uint32),
        }
        bucket = Bucket(**parts)
        chunk = self._chunk_of(slots)
        sums = jax.eval_shape(
            partial(_zero_sums, self.query.execution.accumulator, self.mesh, self._like)
        )
        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry4x32"))
        accumulate = partial(_accumulate, self._engine(chunk))
        jax.eval_shape(accumulate, broadcast, sums, bucket, _shape((), np.float32), key)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(bucket)), chunk

    @property
    def coordinates(self) -> int:
        """The number of coordinates of a release."""
        return coordinates(self._like.tree())

    def _engine(self, chunk: int) -> _Engine:
        query = self.query
        clips = query.plan.unit == "client"
        accumulator = query.execution.accumulator
        return _Engine(query.client_fn, query.plan.clipping, clips, accumulator, chunk, self.mesh)

    def _chunk_of(self, slots: int) -> int:
        """The chunk for buckets of this many slots; it divides a device's share of them."""
        if slots % self.mesh.size:
            raise InputError(
                f"a bucket of {slots} clients cannot be split evenly among {self.mesh.size} "
                "devices: make CohortSpec.clients_per_bucket a multiple of their number"
            )
        share, chunk = slots // self.mesh.size, self.query.execution.chunk
        if chunk is None:
            return next(c for c in range(min(default_chunk(), share), 0, -1) if share % c == 0)
        if share % chunk:
            which = f"the {share} clients that a device gets of each bucket"
            raise InputError(f"chunk = {chunk} does not divide {which}")
        return chunk
