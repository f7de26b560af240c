"""Small cohorts and client functions that several tests use."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpfl.data import Population, from_clients
from jaxpfl.data.cohort import Bucket, Cohort, CohortSpec
from jaxpfl.federated import Execution, Query, RunSecret
from jaxpfl.federated.release.door import Door, Keys, Summed
from jaxpfl.federated.release.prepared_query import opened
from jaxpfl.privacy import Plan
from tests.plans import flat_plan, flat_without_privacy

DIM = 5


def vectors(count: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """Returns float32 [count, DIM], one vector a client."""
    return (scale * np.random.default_rng(seed).normal(size=(count, DIM))).astype(np.float32)


def embedded(parts) -> Population:
    """Each client holds one part of embeddings, [examples, d]."""
    return from_clients(
        {f"client {i}": {"embedding": np.float32(part)} for i, part in enumerate(parts)}
    )


def bucket_of(values_CxD: np.ndarray, slots: int | None = None, padding: float = np.nan) -> Bucket:
    """One bucket of clients that each hold one vector, padded to `slots` clients.

    The padding is poison: a single value of it in a sum shows.
    """
    count = len(values_CxD)
    slots = count if slots is None else slots
    held = np.full((slots, 1, 1, values_CxD.shape[1]), padding, values_CxD.dtype)
    held[:count, 0, 0] = values_CxD
    real = np.arange(slots) < count
    return Bucket(
        batches={"x": held},
        mask=real[:, None, None],
        steps=real.astype(np.int32),
        weight=real.astype(np.float32),
        key=np.stack([np.zeros(slots), np.arange(slots)], axis=1).astype(np.uint32),
    )


def held_vector(broadcast, examples, key):
    """The client's own vector, plus the broadcast."""
    return {"a": examples.batches["x"][0, 0] + broadcast}


plan = partial(flat_plan, population=10_000, clients_per_round=100, rounds=10, delta=1e-06)


# A plan without privacy, so that sums can be compared exactly.
no_noise = partial(
    flat_without_privacy, population=10_000, clients_per_round=100, rounds=10, clip_norm=1.0
)


def keys(round: int = 0, seed: int = 0) -> Keys:
    secret, text = RunSecret.reproducible(seed), str(round)
    words = [secret.words_of(purpose, text) for purpose in ("noise", "checksum")]
    return Keys(secret.key("train", text), np.concatenate(words))


def door(client_fn, plan: Plan, shapes, *, cohort=None, **execution) -> Door:
    """The door of one query; `execution` are fields of `Execution`."""
    cohort = CohortSpec(batch_size=1, max_examples=1) if cohort is None else cohort
    return Door(Query("asked", client_fn, plan, cohort, execution=Execution(**execution)), shapes)


def through(door: Door, broadcast, buckets, key=None, *, clip_norm=None, shared=None) -> Summed:
    """What comes out of the door in a round, by default the plan's first."""
    clip_norm = jnp.float32(door.query.plan.clip_norm) if clip_norm is None else clip_norm
    return door(broadcast, buckets, clip_norm, keys() if key is None else key, shared)


def of_everybody(door: Door, broadcast, clients: Population):
    """What comes out of the door where all clients take part."""
    everyone, shards = np.arange(len(clients)), door.mesh.size
    cohort = Cohort(clients, everyone, door.query.cohort, seed=7, round=1, shards=shards)
    return jax.device_get(through(door, broadcast, cohort).value)


def sum_of_all(client_fn, clients: Population, spec, execution, broadcast, clip_norm: float):
    """The sum of the clipped contributions of all clients, without noise, through the door."""
    count = len(clients)
    plan = no_noise(population=count, clients_per_round=count, clip_norm=clip_norm)
    query = Query("q", client_fn, plan, spec, execution=execution)
    return of_everybody(opened(query, broadcast, clients.columns)[0], broadcast, clients)


SHAPE = {"a": jax.ShapeDtypeStruct((DIM,), jnp.float32)}
ZERO = jnp.zeros((DIM,), jnp.float32)


def clipped_sum(values_CxD: np.ndarray, clip_norm: float) -> np.ndarray:
    """The reference: a plain loop in float64."""
    total = np.zeros(values_CxD.shape[1])
    for value in values_CxD.astype(np.float64):
        norm = np.linalg.norm(value)
        if np.isfinite(norm) and norm > 0:
            total += value * min(1.0, clip_norm / norm)
    return total
