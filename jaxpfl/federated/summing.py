"""The first half of the door: clients' contributions, clipped and summed on each device.

Private to `federated.door`, which adds the noise: nothing here may be released.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.data.cohort import Bucket
from jaxpfl.federated.accumulators import Accumulator
from jaxpfl.federated.client import ClientFn, Examples
from jaxpfl.federated.query import CLIENTS
from jaxpfl.privacy.clipping import Clipping, clip_factors

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A hashable pytree of shapes, for a static argument of jit."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, like: PyTree) -> "Shapes":
        leaves, structure = jax.tree.flatten(like)
        return cls(structure, tuple(tuple(leaf.shape) for leaf in leaves))

    def tree(self) -> PyTree:
        leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        return jax.tree.unflatten(self.structure, leaves)


class Sums(NamedTuple):
    """Partial sums per device, [devices, ...]."""

    contributions: PyTree
    below: jax.Array  # [devices], sum of (1[norm <= clip] - 1/2) over clients


@dataclasses.dataclass(frozen=True)
class Engine:
    """The static part of compiled functions, which doors with equal engines share."""

    client_fn: ClientFn
    clipping: Clipping
    clips: bool  # False where the client function bounds each example itself
    accumulator: Accumulator
    chunk: int
    mesh: Mesh


@partial(jax.jit, static_argnames=("accumulator", "mesh", "like"))
def zero_sums(accumulator: Accumulator, mesh: Mesh, like: "Shapes") -> Sums:
    sums = Sums(accumulator.zeros(like.tree(), mesh.size), jnp.zeros((mesh.size,), jnp.float32))
    return jax.lax.with_sharding_constraint(sums, NamedSharding(mesh, PartitionSpec(CLIENTS)))


@partial(jax.jit, static_argnames=("engine",), donate_argnames=("sums",))
def accumulate(
    engine: Engine,
    broadcast: PyTree,
    sums: Sums,
    bucket: Bucket,
    clip_norm: jax.Array,
    key: jax.Array,
) -> Sums:
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
        return Sums(accumulator.merge(sums.contributions, subtotal), sums.below + below)

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
