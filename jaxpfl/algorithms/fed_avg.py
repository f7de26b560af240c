"""DP-FedAvg: federated averaging with user-level differential privacy.

Source: McMahan, Ramage, Talwar, Zhang 2018, "Learning Differentially Private Recurrent Language
Models", Algorithm 1; the server optimiser as in Reddi et al. 2021, "Adaptive Federated
Optimization", Algorithm 1; restated by Augenstein et al. 2020, Algorithm 2.

    for each round t:
        sample a cohort                               each client with probability q
        for each client k in the cohort:
            delta_k = LocalTraining(params)           E epochs of SGD on its own examples
            delta_k = delta_k min(1, S / ||delta_k||)
        release = sum_k delta_k + N(0, z^2 S^2)
        params  = server optimiser(params, -release / n)

The sum is unweighted and n is the planned cohort size, a public constant.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.accumulators import Accumulator
from jaxpfl.federated.local_training import LocalTraining
from jaxpfl.federated.mesh import client_mesh
from jaxpfl.federated.private_sum import DoorState, private_sum
from jaxpfl.models.base import Model
from jaxpfl.privacy.plan import Plan


class FedAvgState(NamedTuple):
    """Everything a round starts from."""

    params: Any
    server: optax.OptState
    door: DoorState


@partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("params", "state"))
def server_step(optimizer, params, state, release, denominator):
    """The server optimiser on the pseudo-gradient, minus the mean of the clients' changes."""
    pseudo_gradient = jax.tree.map(lambda leaf: -leaf / denominator, release)
    # Optax mixes integer and float types in places; its results are float32 all the same.
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(pseudo_gradient, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, optax.tree.norm(pseudo_gradient), fingerprint(params)


def fingerprint(params: Any) -> jax.Array:
    """Returns uint32 [2]: a checksum of the parameters' bits, taken on the device.

    A replayed round is compared by it with the recorded one without copying the parameters. It
    detects accidents, not forgery; checkpoints carry SHA-256.
    """
    plain, weighted = jnp.uint32(0), jnp.uint32(0)
    for leaf in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32).reshape(-1)
        places = jax.lax.iota(jnp.uint32, bits.shape[0]) * jnp.uint32(2) + jnp.uint32(1)
        plain = plain * jnp.uint32(31) + jnp.sum(bits, dtype=jnp.uint32)
        weighted = weighted * jnp.uint32(37) + jnp.sum(bits * places, dtype=jnp.uint32)
    return jnp.stack([plain, weighted])


def fed_avg(
    model: Model,
    *,
    client: optax.GradientTransformation,
    server: optax.GradientTransformation,
    plan: Plan,
    cohort: CohortSpec | None = None,
    mesh: Mesh | None = None,
    chunk: int | None = None,
    accumulator: Accumulator | None = None,
    start: Any = None,
) -> Algorithm:
    """Returns DP-FedAvg for `model` under `plan`.

    Args:
      model: what is trained (`jaxpfl.models`).
      client: the clients' optimiser, e.g. `optax.sgd(0.5)`.
      server: the server's optimiser, e.g. `optax.sgd(1.0, momentum=0.9, nesterov=True)`; plain
        averaging is `optax.sgd(1.0)`.
      plan: privacy of the whole run.
      cohort: how clients' examples are capped and batched; default batches of 16, at most 256
        examples, one epoch.
      mesh, chunk, accumulator: see `federated.private_sum`.
      start: PUBLIC parameters to start from, such as prefinetuned ones; None draws them by
        `model.init`.

    Raises:
      InputError: `start` is not a tree of the model's parameters.

    Metrics of a step, all public: `clip_norm` (float32, as used in this round), `update_norm`
    (float32, L2 norm of the noisy mean update), `output_hash` (uint32 [2]).
    """
    mesh = client_mesh() if mesh is None else mesh
    cohort = CohortSpec(batch_size=16, max_examples=256) if cohort is None else cohort
    like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    door = private_sum(
        LocalTraining(model, client), plan, like, mesh=mesh, chunk=chunk, accumulator=accumulator
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    if start is not None:
        check_start(start, like)

    def init(key):
        # Copied: a step donates the state's buffers, and `start` is the caller's.
        params = model.init(key) if start is None else jax.tree.map(jnp.array, start)
        return jax.device_put(FedAvgState(params, server.init(params), door.init()), everywhere)

    def step(state, cohort, keys):
        release, door_state = door(state.params, cohort, state.door, keys)
        params, server_state, update_norm, output_hash = server_step(
            server, state.params, state.server, release, plan.denominator
        )
        metrics = {
            "clip_norm": state.door.clip_norm,
            "update_norm": update_norm,
            "output_hash": output_hash,
        }
        return FedAvgState(params, server_state, door_state), metrics

    return Algorithm(
        init=init,
        step=step,
        params=lambda state: state.params,
        plan=plan,
        cohort=cohort,
        model=model,
        shards=door.shards,
    )


def check_start(start: Any, like: Any) -> None:
    """Refuses parameters of another model."""

    def described(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
        }

    found, expected = described(start), described(like)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise InputError(
                f"start: parameter {name} is {found.get(name)}, expected {expected.get(name)}"
            )
