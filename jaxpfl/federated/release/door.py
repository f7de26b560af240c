"""The door: from a cohort's examples to a noisy sum. It calls each step in this order:

    summing.accumulate            client function, clip, and the sum of each device
    Door.__call__, vector         the devices' sums, joined to one vector
    sum_digest                    the noise's key, from a secret and the exact sum
    privacy.mechanisms, or        the draw of the noise
    privacy.exact_noise
    accumulators                  sum and noise, added and rounded
    next_clip_norm                the clip norm of the next round

`release.prepared_query` alone opens the door, for `release.releaser`, which charges first.

Guarantee. With a `Plan` of clip norm S and noise standard deviation sigma, the release is
sum_i clip_S(contribution_i) + N(0, sigma^2 I), where a contribution that is not finite counts as
zero. Adding or removing one client moves the sum by at most S in L2 norm, whatever the data, the
padding, the chunk size and the number of devices; noise is drawn once per coordinate. Under
`Plan(unit="example")` the client function bounds each example's share of a contribution
(`client.BoundedByExample`): contributions are not clipped, and adding or removing one EXAMPLE moves
the sum by at most S and what rounding adds (`release.example_rounding`); the noise covers both.

The noise's key is a function of a secret and of THE EXACT SUM (the idea of deterministic
signatures, RFC 6979): the host hashes its bits between two programs, see `release.sum_digest`.
Equal sums give the same release again, which reveals nothing new. Sums that differ in one bit, for
whatever reason (code, data, flags, another rounding), get independent noise, so that the difference
of two releases always has noise.

Reference: DP-FedAvg, McMahan et al. 2018, Algorithm 1; Augenstein et al. 2020, Algorithm 2.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.data.cohort import Bucket
from jaxpfl.errors import InputError
from jaxpfl.federated.clients.client import Static
from jaxpfl.federated.double_word import DoubleWord, is_pair
from jaxpfl.federated.mesh import (
    CLIENTS,
    PyTree,
    default_chunk,
    meet,
    put_shares,
    replicas,
    settle,
    shardings,
    shares,
)
from jaxpfl.federated.release.accumulators import Accumulator, noisy_halves
from jaxpfl.federated.release.program import Program
from jaxpfl.federated.release.query import Query
from jaxpfl.federated.release.sum_digest import bound_to_bits, noise_key_and_name
from jaxpfl.federated.release.summing import Engine, Layout, accumulate, placed, zero_sums
from jaxpfl.federated.release.vector import LONG, Shapes, dealt, exchanged, gathered
from jaxpfl.privacy.clipping import LARGEST_CLIP_NORM, SMALLEST_CLIP_NORM
from jaxpfl.privacy.exact_noise import exact_normal
from jaxpfl.privacy.keys import key_from_words
from jaxpfl.privacy.local_trust import client_multiplier
from jaxpfl.privacy.mechanisms import coordinates, on_grid, standard_normal
from jaxpfl.privacy.plan import Plan

# Rounded into the range: as float32, 1e-12 would be rounded down, and so out of it.
_SMALLEST = np.nextafter(np.float32(SMALLEST_CLIP_NORM), np.float32(1))
_LARGEST = np.nextafter(np.float32(LARGEST_CLIP_NORM), np.float32(1))


class Keys(NamedTuple):
    """The secret keys of one release.

    Attributes:
      train: typed key of clients' draws; [2], if they add noise: of their draws and of the noise.
      noise: uint32 [8], numpy, from which the key of the noise follows, with the sum.
    """

    train: jax.Array
    noise: Any


class Summed(NamedTuple):
    """The result of the door; public once it was charged.

    Attributes:
      value: the noisy SUM, float32, shaped like the contribution.
      clip_norm: float32 scalar, the L2 clip norm of the next round.
      name: uint32 [4], numpy, a pseudorandom function of the secret and the exact sum: equal for
        the same release and different for others, without revealing anything of the sum.
    """

    value: PyTree
    clip_norm: jax.Array
    name: Any


@functools.partial(jax.jit, static_argnames=("accumulator", "mesh"))
def _joined(
    accumulator: Accumulator, mesh: Mesh, sums_DxW: DoubleWord, below_D: jax.Array
) -> tuple[DoubleWord, jax.Array]:
    """Adds up the devices: (exact sum [W], of which each has a share; sum of indicators).

    The sum is one vector of padded length, whatever the shapes of the contributions. Doors with
    vectors of equal length therefore share one compiled program; so it is with `_noised`.

    Args:
      sums_DxW: each device's sum, as `exchanged` makes it.
    """
    total_W = accumulator.join_devices(sums_DxW)
    below = jax.lax.with_sharding_constraint(jnp.sum(below_D), NamedSharding(mesh, PartitionSpec()))
    return jax.tree.map(functools.partial(dealt, mesh), total_W), below


def _exchanged(
    accumulator: Accumulator, mesh: Mesh, halves: list[list[jax.Array]], below_D: jax.Array
) -> tuple[DoubleWord, jax.Array]:
    """The sum of all devices, as `_joined` returns it, of the low and high parts of their sums."""
    # One half after the other, and each is freed when it has been exchanged.
    low_DxW = exchanged(mesh, halves.pop(0))
    pair = DoubleWord(exchanged(mesh, halves.pop()), low_DxW)
    return _joined(accumulator, mesh, pair, below_D)


# In one program, which costs small arrays half as much, and frees nothing before its end.
_exchanged_at_once = jax.jit(_exchanged, static_argnames=("accumulator", "mesh"))


@functools.partial(jax.jit, static_argnames=("accumulator", "mesh", "private"))
def _noised(
    accumulator: Accumulator,
    mesh: Mesh,
    private: bool,
    total_W: DoubleWord,
    below: jax.Array,
    clip_norm: jax.Array,
    noise_multiplier: jax.Array,
    below_std: jax.Array,
    key: jax.Array,
    shared_P: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Adds the noise: (noisy sum [W], noisy sum of indicators).

    With noise, both are on a grid, so that low bits tell nothing of what was summed.

    Args:
      key: uint32 [4], of the noise; bound to the sums.
      shared_P: noise of unit scale, or in steps, that several rounds share; None = there is none.
    """
    noise_key = key_from_words(key)
    value_std = noise_multiplier * jnp.float32(accumulator.slack) * clip_norm
    noise_W, padded = None, total_W.high.size
    if private:
        own = padded if shared_P is None else padded - shared_P.size
        if accumulator.exact:
            # The devices must divide the number of coordinates.
            drawn_W = exact_normal(noise_key, own + -own % mesh.size, mesh)[:own]
            # The indicators get that of a coordinate of the padding, used for nothing else.
            last = drawn_W[-1]
        else:
            # Keys of their own: for a second use, XLA would compute the whole vector again.
            vector_key, last_key = (jax.random.fold_in(noise_key, number) for number in range(2))
            drawn_W, last = standard_normal(vector_key, (own,)), standard_normal(last_key, ())
        if shared_P is not None:
            drawn_W = jnp.concatenate([shared_P, drawn_W])
        drawn_W = dealt(mesh, drawn_W)
        if accumulator.exact:
            noise_W, below = drawn_W, noisy_halves(below, last, below_std)
        else:
            noise_W = drawn_W * value_std
            below = on_grid(below + last * below_std, below_std)
    scale = accumulator.scale(clip_norm, noise_multiplier)
    value_W = dealt(mesh, accumulator.add_noise(total_W, noise_W, scale))
    if private and not accumulator.exact:
        value_W = on_grid(value_W, value_std)
    return value_W, below


def shape_of(shape: tuple[int, ...] = (), dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def key_shape(plan: Plan) -> Any:
    """The shape of `Keys.train`."""
    words = np.zeros((2, 4) if plan.local else 4, np.uint32)
    return jax.eval_shape(lambda: key_from_words(words))


def next_clip_norm(plan: Plan, clip_norm: jax.Array, noisy_below: jax.Array) -> jax.Array:
    """Returns the next round's clip norm (float32 scalar); unchanged without adaptive clipping.

    Args:
      plan: gives the target quantile gamma, the learning rate eta and the public denominator n.
      clip_norm: C, float32 scalar.
      noisy_below: sum_i (b_i - 1/2) + N(0, sigma_b^2), float32 scalar.

    C <- C exp(-eta (b - gamma)) with b = noisy_below / n + 1/2, kept between SMALLEST_CLIP_NORM
    and LARGEST_CLIP_NORM, where clipping is exact. Without these bounds, C would fall until squares
    underflow if most updates are zero.
    """
    adaptive = plan.clip.adaptive
    if adaptive is None:
        return clip_norm
    below = jnp.clip(noisy_below / plan.denominator + 0.5, 0.0, 1.0)
    step = jnp.exp(-adaptive.learning_rate * (below - adaptive.target_quantile))
    return jnp.clip(clip_norm * step, _SMALLEST, _LARGEST)


class Door:
    """The door of one query, for contributions of given shapes.

    One program is traced for each bucket shape, and compiled when such a bucket first comes. JAX
    shares both among all doors with the same client functions, chunks, accumulators and meshes,
    whatever their cohort sizes, clip norms and noise. Only one bucket is in memory at a time, and
    not the cohort.

    Args:
      query: what clients compute, and the plan.
      contribution: a pytree of arrays (or shapes) like one client's contribution.
      client_state: of shapes, what one client keeps between rounds; None = nothing.
      alone: one client is computed after the other, whatever the query's chunk (`flow.lanes`).
    """

    def __init__(
        self, query: Query, contribution: PyTree, client_state: PyTree = None, alone: bool = False
    ) -> None:
        self.query, self.alone = query, alone
        self.mesh = query.execution.devices
        self._like = Shapes.of(contribution)
        self.contribution = self._like.tree()
        self._layout = Layout.of(query.client_fn, self.mesh, self.contribution)
        self._client_state = client_state
        self._client_fn = Static(query.client_fn)
        self._programs: dict[tuple[int, ...], Program] = {}  # by shapes of buckets
        self._sealed = False

    def __call__(
        self,
        broadcast: PyTree,
        cohort: Iterable[Bucket],
        clip_norm: jax.Array,
        keys: Keys,
        shared_noise_P: jax.Array | None = None,
        keep: Callable[[PyTree], None] = lambda states: None,
    ) -> Summed:
        """Sums a cohort's contributions to `broadcast`, noisily.

        Args:
          cohort: each bucket's slots of this process's devices, see `mesh.shares`.
          clip_norm: float32 scalar, S of this round.
          keys: of this release alone.
          shared_noise_P: this round's of a `NoiseStream`, for all coordinates of all leaves in
            their order, if the plan's noise is correlated between rounds.
          keep: is called with the next states of each bucket's clients, which are PRIVATE.
        """
        plan, accumulator = self.query.plan, self.query.accumulator
        sums = zero_sums(accumulator, self._layout, self._like)
        of_one = client_multiplier(plan) if plan.local else plan.value_noise_std(1.0)
        noise_multiplier = np.float32(of_one)
        if plan.correlated and plan.exact:
            from jaxpfl.privacy.correlated_noise import column_norm

            # Steps are counted in a draw's standard deviation.
            noise_multiplier *= np.float32(column_norm(plan.bands))
        for bucket in cohort:
            # A traced bucket is the whole one, and not a share of it.
            if not isinstance(bucket.mask, Tracer):
                # Refuses what cannot be dealt evenly.
                self._chunk_of(len(bucket.weight) * replicas(self.mesh) // len(shares(self.mesh)))
                bucket = put_shares(bucket, self.mesh)
            program = self._program(broadcast, bucket)
            sums, states = program(broadcast, sums, bucket, clip_norm, noise_multiplier, keys.train)
            keep(states)
        settle(sums)
        meet(sums)
        below, pairs = sums.below, jax.tree.leaves(sums.contributions, is_leaf=is_pair)
        halves = [[pair.low for pair in pairs], [pair.high for pair in pairs]]
        del sums, pairs
        joined = _exchanged if self.coordinates >= LONG else _exchanged_at_once
        total, below = joined(accumulator, self.mesh, halves, below)
        below_std = np.float32(plan.indicator_noise_std)
        # With the scales, because the same noise at two scales would reveal the noise.
        numbers = below, clip_norm, noise_multiplier, below_std
        bind = bound_to_bits if isinstance(below, Tracer) else noise_key_and_name
        key, name = bind(keys.noise, total, numbers)
        adds = plan.private and not plan.local
        value_W, noisy_below = _noised(
            accumulator, self.mesh, adds, total, *numbers, key, shared_noise_P
        )
        del total
        value = gathered(self.mesh, value_W, self._like)
        settle((value, noisy_below))
        return Summed(value, next_clip_norm(plan, clip_norm, noisy_below), name)

    def programs(self, broadcast: PyTree, columns: Mapping[str, Any]) -> list[Program]:
        """Traces what adds a bucket to the sums, for every shape of a bucket, and allows no other.

        Nothing is compiled or run. Only shapes and dtypes of the arguments are used; devices need
        not be available.
        """
        rungs = self.query.cohort.rungs
        programs = [self._program(broadcast, self.bucket(columns, steps)) for steps in rungs]
        self._sealed = True
        return programs

    def _program(self, broadcast: PyTree, bucket: Bucket) -> Program:
        """The program that adds buckets of this shape to the sums."""
        shape = bucket.mask.shape
        if shape not in self._programs and not self._sealed:
            self._programs[shape] = Program(self.trace(broadcast, jax.eval_shape(Bucket, *bucket)))
        return self._programs[shape]

    def trace(self, broadcast: PyTree, bucket: Bucket) -> jax.stages.Traced:
        """Traces what adds a bucket to the sums; only shapes and dtypes are used."""
        by_client, everywhere = (
            functools.partial(placed, NamedSharding(self.mesh, spec))
            for spec in (PartitionSpec(CLIENTS), PartitionSpec())
        )
        query, chunk = self.query, self._chunk_of(bucket.weight.shape[0])
        clips = query.plan.unit == "client"
        engine = Engine(self._client_fn, clips, query.accumulator, chunk, self._layout)
        start = functools.partial(zero_sums, query.accumulator, self._layout, self._like)
        sums = self._layout.placed(jax.eval_shape(start))
        shapes = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            broadcast,
            shardings(query.client_fn, self.mesh, broadcast),
        )
        scalar, key = everywhere(shape_of()), everywhere(key_shape(query.plan))
        return accumulate.trace(engine, shapes, sums, by_client(bucket), scalar, shape_of(), key)

    def bucket(self, columns: Mapping[str, Any], steps: int | None = None) -> Bucket:
        """The shapes of a bucket of so many steps; None = of the largest shape."""
        spec = self.query.cohort
        slots, shape = spec.capacity, (steps or spec.rungs[-1], spec.batch_size)
        parts: dict[str, Any] = {
            "batches": {
                name: shape_of((slots, *shape, *column.shape[1:]), column.dtype)
                for name, column in columns.items()
            },
            "mask": shape_of((slots, *shape), np.bool_),
            "steps": shape_of((slots,), np.int32),
            "weight": shape_of((slots,)),
            "key": shape_of((slots, 2), np.uint32),
        }
        if self._client_state is not None:
            parts["is_new"] = shape_of((slots,), np.bool_)
            parts["client_states"] = jax.tree.map(
                lambda leaf: shape_of((slots, *leaf.shape), leaf.dtype), self._client_state
            )
        return Bucket(**parts)

    @property
    def coordinates(self) -> int:
        """The number of coordinates of a release."""
        return coordinates(self.contribution)

    @property
    def chunk(self) -> int:
        """The clients that one device computes side by side, in a bucket of the largest shape."""
        return self._chunk_of(self.query.cohort.capacity)

    def _chunk_of(self, slots: int) -> int:
        """The chunk for buckets of this many slots; it divides a replica's share of them."""
        number = replicas(self.mesh)
        if slots % number:
            raise InputError(
                f"a bucket of {slots} clients cannot be split evenly among {number} devices, or "
                "copies of the model: make CohortSpec.clients_per_bucket a multiple of their number"
            )
        if self.alone:
            return 1
        share, chunk = slots // number, self.query.execution.chunk
        if chunk is None:
            most = min(default_chunk(self.mesh), share)
            return next(c for c in range(most, 0, -1) if share % c == 0)
        if share % chunk:
            which = f"the {share} clients that a device or copy of the model gets of each bucket"
            raise InputError(f"chunk = {chunk} does not divide {which}")
        return chunk
