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
from jaxpfl.federated.accumulators import Accumulator, Pair
from jaxpfl.federated.client import ClientFn, Examples
from jaxpfl.federated.mesh import CLIENTS, replicas, shardings, splits_model
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
    """Partial sums per replica, [replicas, ...]: per device, if the model is not split."""

    contributions: PyTree
    below: jax.Array  # [replicas], sum of (1[norm <= clip] - 1/2) over clients


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where sums are: on the devices of a mesh, and how those of a replica split each leaf.

    Attributes:
      parts: for each leaf of a contribution its axes on the mesh, see `mesh.shardings`.
    """

    mesh: Mesh
    parts: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, client_fn: ClientFn, mesh: Mesh, contribution: PyTree) -> "Layout":
        places = jax.tree.leaves(shardings(client_fn, mesh, contribution))
        return cls(mesh, tuple(place.spec for place in places))

    @property
    def splits(self) -> bool:
        return splits_model(self.mesh)

    def placed(self, sums: Sums) -> Sums:
        """The same sums, on these devices: arrays, or shapes of arrays."""
        leaves, structure = jax.tree.flatten(sums.contributions, is_leaf=_is_pair)
        leaves = [
            self._on(leaf, PartitionSpec(CLIENTS, *part))
            for leaf, part in zip(leaves, self.parts, strict=True)
        ]
        below = self._on(sums.below, PartitionSpec(CLIENTS))
        return Sums(jax.tree.unflatten(structure, leaves), below)

    def _on(self, leaves: PyTree, spec: PartitionSpec) -> PyTree:
        place = NamedSharding(self.mesh, spec)
        if isinstance(jax.tree.leaves(leaves)[0], jax.ShapeDtypeStruct):
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), leaves
            )
        return jax.lax.with_sharding_constraint(leaves, place)

    def split(self, tree: PyTree, *leading: None) -> PyTree:
        """Splits a tree like a contribution within a replica; leaves have these axes before."""
        if not self.splits:
            return tree
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_pair)
        leaves = [
            jax.lax.with_sharding_constraint(leaf, PartitionSpec(*leading, *part))
            for leaf, part in zip(leaves, self.parts, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    def whole(self, tree: PyTree) -> PyTree:
        """The whole tree on each device of a replica."""
        if not self.splits:
            return tree
        return jax.lax.with_sharding_constraint(tree, PartitionSpec())

    def furthest(self, number: jax.Array) -> jax.Array:
        """The largest number of all replicas, which then run their loops equally often."""
        return jax.lax.pmax(number, CLIENTS) if self.splits else number


def _is_pair(node: object) -> bool:
    return isinstance(node, Pair)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The static part of compiled functions, which doors with equal engines share."""

    client_fn: ClientFn
    clipping: Clipping
    clips: bool  # False where the client function bounds each example itself
    accumulator: Accumulator
    chunk: int
    in_turn: bool  # whether a chunk's contributions are added one by one, see `mesh.adds_in_turn`
    layout: Layout


@partial(jax.jit, static_argnames=("accumulator", "layout", "like"))
def zero_sums(accumulator: Accumulator, layout: Layout, like: "Shapes") -> Sums:
    number = replicas(layout.mesh)
    sums = Sums(accumulator.zeros(like.tree(), number), jnp.zeros((number,), jnp.float32))
    return layout.placed(sums)


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

    accumulator, layout = engine.accumulator, engine.layout
    bound = clip_norm if engine.clips else jnp.float32(jnp.inf)

    def on_one_replica(broadcast, sums, bucket, clip_norm, bound, key):
        def add_chunk(index, carry):
            subtotal, below_sum = carry
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * engine.chunk, engine.chunk),
                bucket,
            )
            steps = layout.furthest(jnp.max(part.steps))

            def one_client(batches, mask, client):
                examples = Examples(batches, mask, steps)
                return engine.client_fn(broadcast, examples, jax.random.fold_in(key, client))

            if engine.chunk == 1:
                # Not vmapped: with a batch axis of one, XLA would not use plain matrix products.
                alone = jax.tree.map(lambda leaf: leaf[0], part)
                contribution = one_client(alone.batches, alone.mask, alone.client)
                leaves_C = jax.tree.map(lambda leaf: leaf[None], contribution)
            else:
                leaves_C = jax.vmap(one_client)(part.batches, part.mask, part.client)
            add = _add_in_turn if engine.in_turn else _add_together
            added, norm_C = add(engine, subtotal, leaves_C, part.weight > 0, bound, clip_norm)
            below_C = jnp.where(norm_C <= clip_norm, jnp.float32(0.5), jnp.float32(-0.5))
            below = jnp.sum(jnp.where(part.weight > 0, below_C, jnp.float32(0.0)))
            return layout.split(added), below_sum + below

        slots = bucket.weight.shape[0]
        last_real = jnp.max(jnp.where(bucket.weight > 0, jnp.arange(1, slots + 1), 0))
        # A traced bound, so that empty slots at the end of a bucket cost nothing.
        chunks = layout.furthest((last_real + engine.chunk - 1) // engine.chunk)
        start = layout.split(accumulator.start(sums.contributions)), jnp.float32(0.0)
        subtotal, below = jax.lax.fori_loop(0, chunks, add_chunk, start)
        return Sums(accumulator.merge(sums.contributions, subtotal), sums.below + below)

    everywhere, dealt = PartitionSpec(), PartitionSpec(CLIENTS)
    added = jax.shard_map(
        on_one_replica,
        mesh=layout.mesh,
        # Inside, the compiler splits the work of a replica among its devices.
        axis_names={CLIENTS},
        in_specs=(everywhere, dealt, dealt, everywhere, everywhere, everywhere),
        out_specs=dealt,
        # Replication checking would insert sums of gradients over devices.
        check_vma=False,
    )(broadcast, sums, bucket, clip_norm, bound, key)
    return layout.placed(added) if layout.splits else added


def _add_together(engine, subtotal, leaves_C, real_C, bound, clip_norm):
    """Adds a chunk's contributions in one sum; returns their norms, too."""

    def one_client(contribution):
        # The norm of whole leaves: sums of parts would be rounded in another way.
        return clip_factors(engine.layout.whole(contribution), engine.clipping, bound)

    factors_C, norm_C, finite_C = jax.vmap(one_client)(leaves_C)
    leaves_C = engine.layout.split(leaves_C, None)
    add = partial(engine.accumulator.add, clip_norm=clip_norm)
    counts_C = real_C & finite_C
    subtotal = jax.lax.cond(
        jnp.all(counts_C),
        lambda total: add(total, leaves_C, factors_C),
        lambda total: _add_rows(add, total, leaves_C, factors_C, counts_C),
        subtotal,
    )
    return subtotal, norm_C


def _add_rows(add, subtotal, leaves_C, factors_C, counts_C):
    """Adds a chunk's contributions one by one, leaving out padding and what is not finite.

    Rows are skipped and not masked: with a select among the values, XLA's CPU backend does not
    vectorise the sum, and a product with zero would let NaN through. Only chunks with a row to
    skip, which are rare, take this loop.
    """

    def add_row(index, subtotal):
        leaf_1, factor_1 = _row(index, (leaves_C, factors_C))
        return jax.lax.cond(
            counts_C[index],
            lambda total: add(total, leaf_1, factor_1),
            lambda total: total,
            subtotal,
        )

    return jax.lax.fori_loop(0, counts_C.shape[0], add_row, subtotal)


def _add_in_turn(engine, subtotal, leaves_C, real_C, bound, clip_norm):
    """`_add_together`, one contribution after the other: its norm, and then its share of the sum.

    A contribution is still in cache when it is read for the second time. A sum over the rows of a
    chunk would read all of them from memory again, and XLA's code for it on CPUs is several times
    slower than for one row. The additions are those of a chunk of one client, in the same order.
    """

    def add_row(index, carry):
        subtotal, norm_C = carry
        leaf_1 = _row(index, leaves_C)
        contribution = engine.layout.whole(jax.tree.map(lambda leaf: leaf[0], leaf_1))
        factors, norm, finite = clip_factors(contribution, engine.clipping, bound)
        factor_1 = jax.tree.map(lambda factor: factor[None], factors)
        leaf_1 = engine.layout.split(leaf_1, None)
        subtotal = jax.lax.cond(
            real_C[index] & finite,
            lambda total: engine.accumulator.add(total, leaf_1, factor_1, clip_norm),
            lambda total: total,
            subtotal,
        )
        return subtotal, norm_C.at[index].set(norm)

    start = subtotal, jnp.zeros(real_C.shape, jnp.float32)
    return jax.lax.fori_loop(0, engine.chunk, add_row, start)


def _row(index, tree_C):
    """One client's share of a chunk, with a leading axis of one."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index, 1), tree_C)
