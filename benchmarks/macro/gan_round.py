"""A DP-FedAvg-GAN round against its parts: the critic's plain round, and the generator's steps.

    python -m benchmarks.macro.gan_round
    python -m benchmarks.macro.gan_round --widths 1 --clients 10 --repeats 3

The paper's round: 10 clients of 6 batches of 32 images of 28 x 28, then 6 generator steps. In one
process, by turns:

    a  the full round of `fed_avg_gan`, packing included
    b  a plain round on the same cohort: the critic's training through the door, and the server step
    c  the generator's steps alone
    d  the critic's round in plain JAX on stacked data: no door, no padding, no checks

`a / (b + c)` is what the algorithm adds to its parts.
"""

import dataclasses
import functools
import itertools

import numpy as np
import tyro

from benchmarks import harness

BATCH, STEPS, SHAPE = 32, 6, (28, 28, 1)
CLIP_NORM, NOISE, CRITIC_RATE, GENERATOR_RATE = 0.1, 0.01, 5e-4, 5e-3


@dataclasses.dataclass(frozen=True)
class Config:
    widths: tuple[float, ...] = (0.25,)  # of the networks; 1 = the paper's
    clients: int = 10  # a round
    repeats: int = 5
    devices: int | None = None  # virtual CPU devices; default one a core


@functools.cache
def _sgd(learning_rate: float):
    import optax

    return optax.sgd(learning_rate)


def programs(width: float, clients: int):
    """Functions that run one round, or a part of it, each: name -> function."""
    import jax
    import jax.numpy as jnp

    import jaxpfl as jp
    from jaxpfl.algorithms.fed_avg import server_step
    from jaxpfl.algorithms.fed_avg_gan import CriticTraining, train_generator
    from jaxpfl.federated import private_sum
    from jaxpfl.models import GAN
    from jaxpfl.privacy.keys import noise_root, round_keys, training_root

    gan = GAN(SHAPE, width=width)
    plan = jp.Plan(
        rounds=100,
        clip=jp.Clip(CLIP_NORM),
        noise=jp.Noise(NOISE),
        participation=jp.Poisson(100 * clients, clients),
        delta=1e-5,
        accountant="rdp",
    )
    algorithm = jp.algorithms.fed_avg_gan(
        gan,
        client=_sgd(CRITIC_RATE),
        generator=_sgd(GENERATOR_RATE),
        server=_sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(batch_size=BATCH, max_examples=BATCH * STEPS, clients_per_bucket=16),
    )
    rng = np.random.default_rng(0)
    stacked = rng.integers(0, 256, (clients, STEPS, BATCH, *SHAPE)).astype(np.uint8)
    data = jp.data.from_clients(
        {f"client {i}": {"image": image.reshape(-1, *SHAPE)} for i, image in enumerate(stacked)}
    )
    roots, rounds = (training_root(0), noise_root(reproducible_seed=0)), itertools.count()
    like = jax.eval_shape(gan.init, jax.random.key(0))
    door = private_sum(CriticTraining(gan, _sgd(CRITIC_RATE)), plan, like["critic"])
    full, plain, alone = (algorithm.init(roots[0]) for _ in range(3))

    def packed(index):
        return jp.data.prefetch(
            jp.data.Cohort(
                data,
                np.arange(clients),
                algorithm.cohort,
                seed=0,
                round=index,
                shards=algorithm.shards,
            )
        )

    def full_round():
        nonlocal full
        index = next(rounds)
        with packed(index) as buckets:
            full, _ = algorithm.step(full, buckets, round_keys(*roots, index))
        return full

    def plain_round():
        nonlocal plain
        index = next(rounds)
        broadcast = {"generator": plain.generator, "critic": plain.critic}
        with packed(index) as buckets:
            release, door_state = door(broadcast, buckets, plain.door, round_keys(*roots, index))
        critic, server, *_ = server_step(
            _sgd(1.0), plain.critic, plain.server, release, plan.denominator
        )
        plain = plain._replace(critic=critic, server=server, door=door_state)
        return plain

    def generator_alone():
        nonlocal alone
        generator, optimizer, counted, *_ = train_generator(
            gan,
            _sgd(GENERATOR_RATE),
            BATCH,
            alone.generator,
            alone.generator_optimizer,
            alone.critic,
            alone.rounds,
            np.int32(1),
            np.int32(6),
            round_keys(*roots, next(rounds)).train,
        )
        alone = alone._replace(generator=generator, generator_optimizer=optimizer, rounds=counted)
        return alone

    by_hand, everyone = handwritten(gan), jnp.ones(BATCH, bool)
    params, image = gan.init(roots[0]), jnp.asarray(stacked)

    def handwritten_round():
        return by_hand(params, image, everyone, jax.random.key(next(rounds)))

    return {
        "a full round": full_round,
        "b critic's plain round": plain_round,
        "c generator's steps": generator_alone,
        "d critic's round by hand": handwritten_round,
    }


def handwritten(gan):
    """The critic's round in plain JAX: (params, image [C, S, B, ...], everyone, key) -> critic."""
    import jax
    import jax.numpy as jnp

    from jaxpfl.models.gan import to_range, with_statistics

    @jax.jit
    def round_(params, image_CxSxB, everyone, key):
        start = params["critic"]

        def client(total, item):
            image_SxB, client_key = item

            def step(critic, item):
                image, step_key = item
                noise_key, share_key = jax.random.split(step_key)
                noise = gan.draw_noise(noise_key, BATCH)
                drawn = gan.generate(params["generator"], noise, everyone)
                share = jax.random.uniform(share_key, (BATCH,))
                gradients, statistics = jax.grad(gan.critic_loss, has_aux=True)(
                    critic, drawn, to_range(image, everyone), everyone, share
                )
                moved = jax.tree.map(lambda p, g: p - CRITIC_RATE * g, critic, gradients)
                return with_statistics(moved, statistics), None

            trained, _ = jax.lax.scan(step, start, (image_SxB, jax.random.split(client_key, STEPS)))
            delta = jax.tree.map(jnp.subtract, trained, start)
            norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(delta)))
            factor = jnp.minimum(1.0, CLIP_NORM / norm)
            return jax.tree.map(lambda t, d: t + factor * d, total, delta), None

        clients = image_CxSxB.shape[0]
        noise_key, client_key = jax.random.split(key)
        zeros = jax.tree.map(jnp.zeros_like, start)
        keys = jax.random.split(client_key, clients)
        total, _ = jax.lax.scan(client, zeros, (image_CxSxB, keys))
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(noise_key, len(leaves))
        noisy = [
            leaf + NOISE * CLIP_NORM * jax.random.normal(k, leaf.shape)
            for k, leaf in zip(keys, leaves, strict=True)
        ]
        total = jax.tree.unflatten(structure, noisy)
        return jax.tree.map(lambda p, t: p + t / clients, start, total)

    return round_


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    rows = []
    for width in config.widths:
        seconds = harness.interleaved(programs(width, config.clients), config.repeats)
        full, plain, generator, by_hand = seconds.values()
        for name, taken in seconds.items():
            rows.append({"width": width, "cohort": config.clients, "what": name, "seconds": taken})
        rows[-4]["a / (b + c)"] = full / (plain + generator)
        rows[-4]["peak MB"] = harness.peak_memory_mb()
        rows[-3]["vs handwritten"] = by_hand / plain
    harness.table(rows, list(dict.fromkeys(name for row in rows for name in row)))
    print(f"recorded in {harness.record('gan_round', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
