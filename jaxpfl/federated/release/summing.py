"""The first half of the door: clients' contributions, clipped and summed on each device.

Private to `federated.release.door`, which adds the noise: nothing here may be released.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.data.cohort import Bucket
from jaxpfl.federated.clients.client import (
    ClientFn,
    Examples,
    Static,
    computed,
    first_state,
    keys_of,
    next_state,
)
from jaxpfl.federated.double_word import is_pair
from jaxpfl.federated.mesh import CLIENTS, PyTree, replicas, shardings, splits_model
from jaxpfl.federated.release.accumulators import Accumulator
from jaxpfl.federated.release.vector import Shapes
from jaxpfl.privacy.clipping import clip_factors


class Sums(NamedTuple):
    """Partial sums per replica, [replicas, ...]: per device, if the model is not split."""

    contributions: PyTree
    below: jax.Array  # [replicas], sum of (1[norm <= clip] - 1/2) over clients


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of sums: the devices of a mesh, which split each leaf on its axes `parts`."""

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
        leaves, structure = jax.tree.flatten(sums.contributions, is_leaf=is_pair)
        leaves = [
            placed(NamedSharding(self.mesh, PartitionSpec(CLIENTS, *part)), leaf)
            for leaf, part in zip(leaves, self.parts, strict=True)
        ]
        below = placed(NamedSharding(self.mesh, PartitionSpec(CLIENTS)), sums.below)
        return Sums(jax.tree.unflatten(structure, leaves), below)

    def split(self, tree: PyTree, *leading: None) -> PyTree:
        """Splits a tree like a contribution within a replica; leaves have these axes before."""
        if not self.splits:
            return tree
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_pair)
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


def placed(place: NamedSharding, tree: PyTree) -> PyTree:
    """The same arrays, or shapes of arrays, in this place."""
    if isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
        )
    return jax.lax.with_sharding_constraint(tree, place)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The static part of compiled functions, which doors with equal engines share."""

    client_fn: Static
    clips: bool  # False where the client function bounds each example itself
    accumulator: Accumulator
    chunk: int
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
    noise_multiplier: jax.Array,
    key: jax.Array,
) -> tuple[Sums, PyTree]:
    """Adds one bucket's clipped contributions to the running sums.

    Args:
      noise_multiplier: of the sum; of one client, where each adds noise.
      key: of clients' draws; [2] where each adds noise: of its draws, and of its noise.

    Returns:
      The sums, and the clients' next states, shaped like `bucket.client_states`. PRIVATE.
    """

    accumulator, layout = engine.accumulator, engine.layout
    bound = clip_norm if engine.clips else jnp.float32(jnp.inf)
    scale = accumulator.scale(clip_norm, noise_multiplier)
    std = noise_multiplier * jnp.float32(accumulator.slack) * clip_norm

    def on_one_replica(broadcast, sums, bucket, clip_norm, bound, scale, std, key):
        def add_chunk(index, carry):
            subtotal, below_sum, states = carry
            part = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, index * engine.chunk, engine.chunk),
                bucket,
            )
            # Clients that run side by side loop so often; none of them sees it.
            longest = layout.furthest(jnp.max(part.steps))

            def one_client(bucket, longest):
                examples = Examples(bucket.batches, bucket.mask, bucket.steps)
                own_key = jax.random.wrap_key_data(bucket.key, impl=jax.random.key_impl(key))
                state, client_fn = bucket.client_states, engine.client_fn.function
                if state is not None:
                    first = first_state(client_fn, broadcast)
                    state = jax.tree.map(partial(jnp.where, bucket.is_new), first, state)
                update, last = computed(client_fn, broadcast, state, examples, own_key, longest)
                if engine.chunk > 1:
                    # One for each client, even if it is a constant.
                    real = bucket.weight > 0
                    update = jax.tree.map(lambda leaf: jax.lax.select_n(real, leaf, leaf), update)
                # The norm of whole leaves: sums of parts would be rounded in another way.
                clip = clip_factors(layout.whole(update), bound, accumulator.ordered_norms)
                if state is not None:
                    factors, _, finite = clip
                    sent = jax.tree.map(
                        lambda leaf, by: jnp.where(finite, leaf.astype(jnp.float32) * by, 0),
                        update,
                        factors,
                    )
                    after = next_state(client_fn, broadcast, last, sent)
                    state = jax.tree.map(partial(jnp.where, finite), after, state)
                return update, *clip, state

            if engine.chunk == 1:
                # Not vmapped: with a batch axis of one, XLA would not use plain matrix products.
                alone = jax.tree.map(lambda leaf: leaf[0], part)
                outputs = one_client(alone, longest if layout.splits else None)
                outputs = jax.tree.map(lambda leaf: leaf[None], outputs)
            else:
                outputs = jax.vmap(one_client, (0, None))(part, longest)
            leaves_C, factors_C, norm_C, finite_C, states_C = outputs
            leaves_C = layout.split(leaves_C, None)
            real_C = part.weight > 0
            if accumulator.local:
                first = index * engine.chunk
                words_Cx2 = jax.lax.dynamic_slice_in_dim(words_Sx2, first, engine.chunk)
                sender = factors_C, finite_C, real_C, words_Cx2
                messages: Any = accumulator  # `local_noise.Messages`
                leaves_C = messages.noisy(leaves_C, *sender, key, std)
            below_C = jnp.where(norm_C <= clip_norm, jnp.float32(0.5), jnp.float32(-0.5))
            below = jnp.sum(jnp.where(real_C, below_C, jnp.float32(0.0)))
            added = add_rows(subtotal, leaves_C, factors_C, real_C & finite_C)
            states = jax.tree.map(
                lambda all_, some: jax.lax.dynamic_update_slice_in_dim(
                    all_, some, index * engine.chunk, 0
                ),
                states,
                states_C,
            )
            return layout.split(added), below_sum + below, states

        def add_rows(total, leaves_C, factors_C, counts_C):
            """Adds a chunk to a subtotal; or to the sums, if a subtotal has no room for it."""
            chunk, most = (leaves_C, factors_C, counts_C), min(engine.chunk, accumulator.most)
            on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
            # XLA's CPU backend reads many rows column by column, in four times the time.
            rows = _divisor(engine.chunk, min(most, accumulator.rows) if on_cpu else most)
            parts = _divisor(engine.chunk // rows, most // rows)

            def add_parts(subtotal, first):
                """Adds so many parts of the chunk; who does not count becomes zeros."""
                if rows == engine.chunk:
                    return accumulator.add(subtotal, leaves_C, factors_C, scale, counts_C)

                def add_part(index, subtotal):
                    start = (first + index) * rows
                    cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
                    leaves_R, factors_R, counts_R = jax.tree.map(cut, chunk)
                    return accumulator.add(subtotal, leaves_R, factors_R, scale, counts_R)

                return jax.lax.fori_loop(0, parts, add_part, subtotal)

            if parts * rows == engine.chunk:
                return add_parts(total, 0)

            def add_subtotal(index, sums):
                start = layout.split(accumulator.start(sums))
                return accumulator.merge(sums, add_parts(start, index * parts))

            return jax.lax.fori_loop(0, engine.chunk // (parts * rows), add_subtotal, total)

        def add_group(group, carry):
            """Adds the chunks of a subtotal."""
            sums, *others = carry
            first = group * per_group
            last = jnp.minimum(first + per_group, chunks)
            start = layout.split(accumulator.start(sums)), *others
            subtotal, *others = jax.lax.fori_loop(first, last, add_chunk, start)
            return accumulator.merge(sums, subtotal), *others

        words_Sx2 = bucket.key
        own = key
        if accumulator.local:
            # Not by indices, which would count as a use of a key that the next bucket uses, too.
            pair, impl = jax.random.key_data(key), jax.random.key_impl(key)
            own, key = (jax.random.wrap_key_data(words, impl=impl) for words in (pair[0], pair[1]))
        bucket = bucket._replace(key=keys_of(own, words_Sx2))
        slots = bucket.weight.shape[0]
        last_real = jnp.max(jnp.where(bucket.weight > 0, jnp.arange(1, slots + 1), 0))
        # A traced bound, so that empty slots at the end of a bucket cost nothing.
        chunks = layout.furthest((last_real + engine.chunk - 1) // engine.chunk)
        per_group = accumulator.most // engine.chunk
        carry = sums.contributions, jnp.float32(0.0), bucket.client_states
        if per_group == 0:
            carry = jax.lax.fori_loop(0, chunks, add_chunk, carry)
        elif per_group >= slots // engine.chunk:
            carry = add_group(0, carry)
        else:
            groups = (chunks + per_group - 1) // per_group
            carry = jax.lax.fori_loop(0, groups, add_group, carry)
        merged, below, states = carry
        return Sums(merged, sums.below + below), states

    everywhere, by_client = PartitionSpec(), PartitionSpec(CLIENTS)
    added, states = jax.shard_map(
        on_one_replica,
        mesh=layout.mesh,
        # Inside, the compiler splits the work of a replica among its devices.
        axis_names={CLIENTS},
        in_specs=(everywhere, by_client, by_client, *[everywhere] * 5),
        out_specs=by_client,
        # Replication checking would insert sums of gradients over devices.
        check_vma=False,
    )(broadcast, sums, bucket, clip_norm, bound, scale, std, key)
    return layout.placed(added) if layout.splits else added, states


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return next(n for n in range(min(most, number), 0, -1) if number % n == 0)
