"""A DP-FedAvg-GAN round against its parts: the critic's plain round, and the generator's steps.

    python -m benchmarks.macro.gan_round
    python -m benchmarks.macro.gan_round --widths 1 --clients 10 --repeats 3

The paper's round: 10 clients of 6 batches of 32 images of 28 x 28, then 6 generator steps. In one
process, by turns:

    a  the full round of `fed_avg_gan` through its releaser: charge, packing, training, noise
    b  a plain round on the same cohort: the critic's release, and the server step
    c  the generator's steps alone
    d  the critic's round in plain JAX on stacked data: no ledger, no padding, no checks

`a / (b + c)` is what the algorithm adds to its parts.
"""

import dataclasses
import functools
import itertools
import tempfile
from pathlib import Path

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


def programs(width: float, clients: int, folder: Path):
    """Functions that run one round, or a part of it, each: name -> function."""
    import jax
    import jax.numpy as jnp

    import jaxpfl as jp
    from benchmarks.rounds import rounds, sgd
    from jaxpfl.algorithms.base import releaser_of, server_step
    from jaxpfl.algorithms.fed_avg_gan import train_generator
    from jaxpfl.federated import RunSecret
    from jaxpfl.models import GAN

    gan = GAN(SHAPE, width=width)
    plan = jp.Plan(
        rounds=100_000,
        clip=jp.Clip(CLIP_NORM),
        noise=jp.Noise(NOISE),
        participation=jp.Poisson(clients, clients),
        delta=1e-5,
        accountant="rdp",
    )
    algorithm = jp.algorithms.fed_avg_gan(
        gan,
        client=sgd(CRITIC_RATE),
        generator=sgd(GENERATOR_RATE),
        server=sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(batch_size=BATCH, max_examples=BATCH * STEPS, clients_per_bucket=16),
    )
    rng = np.random.default_rng(0)
    stacked = rng.integers(0, 256, (clients, STEPS, BATCH, *SHAPE)).astype(np.uint8)
    data = jp.data.from_clients(
        {f"client {i}": {"image": image.reshape(-1, *SHAPE)} for i, image in enumerate(stacked)}
    )
    ledger = jp.Ledger(folder / f"{width}.jsonl", data)
    releaser = releaser_of(algorithm, data, ledger, RunSecret.reproducible(0), run="plain")
    key, numbers = jax.random.key(0), itertools.count(1)
    plain, alone = algorithm.init(key), algorithm.init(key)
    (update,) = algorithm.queries

    def plain_round():
        nonlocal plain
        broadcast = {"generator": plain.generator, "critic": plain.critic}
        found = releaser.release(update, broadcast, round=next(numbers))
        critic, server, _ = server_step(
            sgd(1.0), plain.critic, plain.server, found.value, -plan.denominator
        )
        plain = plain._replace(critic=critic, server=server)
        return plain

    def generator_alone():
        nonlocal alone
        generator, optimizer, *_ = train_generator(
            gan,
            sgd(GENERATOR_RATE),
            BATCH,
            alone.generator,
            alone.generator_optimizer,
            alone.critic,
            np.int32(6),
            alone.draws,
            np.uint32(next(numbers)),
        )
        alone = alone._replace(generator=generator, generator_optimizer=optimizer)
        return alone

    by_hand, everyone = handwritten(gan), jnp.ones(BATCH, bool)
    params, image = gan.init(key), jnp.asarray(stacked)

    def handwritten_round():
        return by_hand(params, image, everyone, jax.random.key(next(numbers)))

    return {
        "a full round": functools.partial(next, rounds(algorithm, data)),
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
        with tempfile.TemporaryDirectory() as folder:
            run = programs(width, config.clients, Path(folder))
            seconds = harness.interleaved(run, config.repeats)
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
