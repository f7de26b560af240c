"""Rounds of this library as a run makes them, and the same rounds by hand in plain JAX."""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxpfl.algorithms.base import Algorithm, releaser_of
from jaxpfl.data import Population
from jaxpfl.data.cohort import Bucket
from jaxpfl.federated import RunSecret
from jaxpfl.federated.release.door import Keys
from jaxpfl.privacy import Ledger


def rounds(
    algorithm: Algorithm, clients: Population, seed: int = 0, **more: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields the state after each round, and the round's metrics; the ledger is removed at the end.

    A round has all that a run does in one: the charge on the disk, the draw, packing, training,
    clipping, summing, noise and the server's step. `more` is of `federated.Releaser`.
    """
    with tempfile.TemporaryDirectory() as folder:
        unit = algorithm.queries[0].plan.unit
        ledger = Ledger(Path(folder) / "ledger.jsonl", clients, unit=unit)
        secret = RunSecret.reproducible(seed)
        releaser = releaser_of(algorithm, clients, ledger, secret, run="benchmark", **more)
        state = algorithm.init(jax.random.key(seed))
        for number in itertools.count(1):
            state, metrics = releaser.step(algorithm.step, state, number)
            yield state, metrics


def whole_bucket(columns: dict[str, Any], sharding: Any = None) -> Bucket:
    """Clients [C] who use all of their steps [S] and examples [B]: columns [C, S, B, ...]."""
    clients, steps, batch = next(iter(columns.values())).shape[:3]
    bucket = Bucket(
        batches=columns,
        mask=np.ones((clients, steps, batch), bool),
        steps=np.full(clients, steps, np.int32),
        weight=np.ones(clients, np.float32),
        key=np.zeros((clients, 2), np.uint32),
    )
    return bucket if sharding is None else jax.device_put(bucket, sharding)


def door_keys() -> Keys:
    """The keys of a release through the door alone, the same each time."""
    secret = RunSecret.reproducible(0)
    return Keys(secret.key("train", ""), np.tile(secret.words_of("noise", ""), 2))


@functools.cache
def sgd(learning_rate: float) -> optax.GradientTransformation:
    """One object for each rate: programs are compiled once for all who use it."""
    return optax.sgd(learning_rate)


def by_hand(
    loss: Callable[..., Any],
    mesh: Any,
    *,
    learning_rate: float,
    clip_norm: float,
    noise: float,
    over: Literal["scan", "vmap"] = "scan",
) -> Callable[..., Any]:
    """A jitted round of DP-FedAvg: (params, columns, key) -> (params, norm of the sum).

    There is no padding, streaming, ledger or check.

    Args:
      loss: `(params, *batch) -> scalar`.
      mesh: clients are dealt to its devices.
      noise: a multiplier of the clip norm.
      over: clients one after the other, or side by side.
    """

    def client(params, batches_SxB):
        def step(local, batch):
            gradients = jax.grad(loss)(local, *batch)
            return jax.tree.map(lambda p, g: p - learning_rate * g, local, gradients), None

        trained, _ = jax.lax.scan(step, params, batches_SxB)
        delta = jax.tree.map(jnp.subtract, trained, params)
        factor = jnp.minimum(1.0, clip_norm / optax.tree.norm(delta))
        return jax.tree.map(lambda leaf: leaf * factor, delta)

    def device_sum(params, columns):
        if over == "vmap":
            deltas = jax.vmap(client, (None, 0))(params, columns)
            total = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), deltas)
        else:

            def add(total, batches_SxB):
                return jax.tree.map(jnp.add, total, client(params, batches_SxB)), None

            total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), columns)
        return jax.lax.psum(total, "clients")

    summed = jax.shard_map(
        device_sum,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("clients")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    @jax.jit
    def round_(params, columns, key):
        total, clients = summed(params, columns), len(jax.tree.leaves(columns)[0])
        norm = optax.tree.norm(total)
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            leaf + noise * clip_norm * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        total = jax.tree.unflatten(structure, noisy)
        return jax.tree.map(lambda p, leaf: p + leaf / clients, params, total), norm

    return round_
