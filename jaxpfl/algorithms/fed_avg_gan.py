"""DP-FedAvg-GAN: the critic learns on clients, the generator only from the critic.

Source: Augenstein et al. 2020, "Generative models for effective ML on private, decentralized
datasets", Algorithm 1.

    for each round t:
        sample a cohort                               each client with probability q
        for each client k in the cohort:
            delta_k = CriticTraining(critic, generator)    on its images, against drawn ones
            delta_k = delta_k min(1, S / ||delta_k||)
        release   = sum_k delta_k + N(0, z^2 S^2)
        critic    = server optimiser(critic, -release / n)
        generator = GeneratorSteps(generator, critic)      on the server, no client's data

The guarantee is that of DP-FedAvg on the critic: the generator's training is post-processing. A
client's change includes the moving statistics of the critic's batch normalisation, which are
clipped and noised with the rest.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpfl.algorithms import base
from jaxpfl.algorithms.fed_avg import used_clip_norm
from jaxpfl.checked import Checked, PositiveInt
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated.clients.client import Batch, PyTree
from jaxpfl.federated.release.query import Execution
from jaxpfl.models.base import updated
from jaxpfl.models.gan import GAN, to_range, with_statistics
from jaxpfl.privacy.keys import GENERATOR_IMAGES
from jaxpfl.privacy.plan import Plan


@dataclass(frozen=True)
class GeneratorTraining(Checked):
    """The server's training of the generator: `steps` a round, each on `batch` drawn images."""

    steps: PositiveInt = 6
    batch: PositiveInt = 32


class GANState(NamedTuple):
    """Everything a round starts from."""

    generator: PyTree
    critic: PyTree
    generator_optimizer: optax.OptState
    server: optax.OptState
    clip_norm: jax.Array  # float32 scalar, S of the next round
    draws: jax.Array  # uint32 [2], the key data of the generator's draws on the server


@dataclass(frozen=True)
class CriticTraining:
    """A client function by steps: trains the critic on the client's images and on generated ones.

    For each batch the broadcast generator draws as many images as the batch holds, from the
    client's key. The optimiser's state is initialised in every round. The contribution is exactly
    0 for a client without examples.
    """

    gan: GAN
    optimizer: optax.GradientTransformation

    def init(self, broadcast: PyTree, key: jax.Array) -> PyTree:
        return broadcast["critic"], self.optimizer.init(broadcast["critic"])

    def step(
        self, broadcast: PyTree, state: PyTree, batch: Batch, real: jax.Array, key: jax.Array
    ) -> PyTree:
        """One step of the critic; the broadcast is {"generator": ..., "critic": ...}."""
        gan, (local, optimizer_state) = self.gan, state
        image = to_range(batch["image"], real)
        # A round's key is of threefry4x32, which JAX does not lower to a loop: XLA's CPU backend
        # would repeat some hundred operations in every patch, and compile for minutes.
        words = jax.random.bits(key, (2,), jnp.uint32)
        noise_key, share_key = jax.random.split(
            jax.random.wrap_key_data(words, impl="threefry2x32")
        )
        noise_BxZ = gan.draw_noise(noise_key, real.shape[0])
        share_B = jax.random.uniform(share_key, real.shape, jnp.float32)
        drawn = gan.generate(broadcast["generator"], noise_BxZ, real)
        slope = jax.grad(gan.critic_loss, has_aux=True)
        gradients, statistics = slope(local, drawn, image, real, share_B)
        updates, optimizer_state = updated(self.optimizer, gradients, optimizer_state, local)
        # Weight decay would change the moving statistics.
        normalisation = dict(updates["normalisation"])
        for name in ("mean", "variance"):
            normalisation[name] = jnp.zeros_like(normalisation[name])
        trained = optax.apply_updates(local, {**updates, "normalisation": normalisation})
        return with_statistics(trained, statistics), optimizer_state

    def finish(self, broadcast: PyTree, state: PyTree) -> PyTree:
        """Returns critic_after - critic_before, moving statistics included."""
        return jax.tree.map(jnp.subtract, state[0], broadcast["critic"])


@partial(
    jax.jit,
    static_argnames=("gan", "optimizer", "batch"),
    donate_argnames=("generator", "optimizer_state"),
)
def train_generator(gan, optimizer, batch, generator, optimizer_state, critic, steps, draws, round):
    """The server's part of a round: trains the generator against the released critic.

    A step whose loss or update is not finite is skipped, so that it cannot destroy the run. The
    generator and its optimiser's state are donated. The images follow from `draws`, uint32 [2], and
    `round`, uint32. Returned are the generator, the optimiser's state, the mean loss of the steps
    taken, or 0, and the number of skipped steps.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(draws, impl="threefry2x32"), round)

    def step(index, carry):
        generator, optimizer_state, loss_sum, left_out = carry
        noise = gan.draw_noise(jax.random.fold_in(key, index), batch)
        loss, gradients = jax.value_and_grad(gan.generator_loss)(generator, critic, noise)
        updates, new_state = updated(optimizer, gradients, optimizer_state, generator)
        trained = optax.apply_updates(generator, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(trained))
        generator, optimizer_state = jax.tree.map(
            partial(jnp.where, finite), (trained, new_state), (generator, optimizer_state)
        )
        loss_sum = loss_sum + jnp.where(finite, loss, 0.0)
        return generator, optimizer_state, loss_sum, left_out + (~finite).astype(jnp.int32)

    start = generator, optimizer_state, jnp.float32(0), jnp.int32(0)
    generator, optimizer_state, loss_sum, left_out = jax.lax.fori_loop(0, steps, step, start)
    taken = jnp.maximum(steps - left_out, 1).astype(jnp.float32)
    return generator, optimizer_state, loss_sum / taken, left_out


def fed_avg_gan(
    gan: GAN,
    *,
    client: optax.GradientTransformation,
    generator: optax.GradientTransformation,
    server: optax.GradientTransformation,
    plan: Plan,
    cohort: CohortSpec | None = None,
    generator_training: GeneratorTraining | None = None,
    execution: Execution | None = None,
    start: Any = None,
) -> base.Algorithm:
    """Returns DP-FedAvg-GAN for `gan` under `plan`.

    Args:
      client: the clients' optimiser of the critic; the paper's is `optax.sgd(5e-4)`.
      generator: the generator's optimiser, on the server; the paper's is `optax.sgd(5e-3)`.
      server: the server's optimiser of the critic; the paper's is `optax.sgd(1.0)`.
      plan, execution: as for `fed_avg`.
      cohort: how clients' images are capped and batched; by default as in the paper, at most 6
        batches of 32 images.
      generator_training: the server's training of the generator; by default as in the paper.
      start: PUBLIC parameters to start from, {"generator": ..., "critic": ...}; None draws them by
        `gan.init`.

    Raises:
      InputError: an argument is of another kind, or `start` is not a tree of `gan`'s parameters.

    Metrics of a step, all public: `clip_norm` and `update_norm` as of `fed_avg`, `generator_loss`
    (float32, mean over the generator steps that were taken, or 0) and `generator_left_out` (int32,
    the number of those that were skipped because they were not finite).
    """
    base.require_parts(gan, plan, client=client, generator=generator, server=server)
    cohort = CohortSpec(batch_size=32, max_examples=192) if cohort is None else cohort
    settings = GeneratorTraining() if generator_training is None else generator_training
    update = base.update_query(gan, CriticTraining(gan, client), plan, cohort, execution)
    first_params = base.initial_params(gan, start)

    def init(key):
        params = first_params(key)
        state = GANState(
            params["generator"],
            params["critic"],
            generator.init(params["generator"]),
            server.init(params["critic"]),
            jnp.float32(plan.clip_norm),
            jax.random.bits(
                jax.random.fold_in(key, jnp.uint32(GENERATOR_IMAGES)), (2,), jnp.uint32
            ),
        )
        return base.placed(update, state)

    def step(state, release, round):
        released = release(update, params(state), clip_norm=used_clip_norm(plan, state.clip_norm))
        critic, server_state, update_norm = base.server_step(
            server, state.critic, state.server, released.value, -plan.denominator
        )
        before = state.generator, state.generator_optimizer
        drawing = np.int32(settings.steps), state.draws, np.uint32(round)
        trained, optimizer_state, loss, left_out = train_generator(
            gan, generator, settings.batch, *before, critic, *drawing
        )
        metrics = {
            "clip_norm": state.clip_norm,
            "update_norm": update_norm,
            "generator_loss": loss,
            "generator_left_out": left_out,
        }
        following = GANState(
            trained, critic, optimizer_state, server_state, released.clip_norm, state.draws
        )
        return following, metrics

    def params(state):
        return {"generator": state.generator, "critic": state.critic}

    return base.Algorithm("fed_avg_gan", init, step, (update,), params, model=gan)
