"""A whole run of the CIFAR10 setting that pfl-research compares simulators on.

    python -m benchmarks.macro.cifar10
    python -m benchmarks.macro.cifar10 --rounds 20

Granqvist et al. 2024 ("pfl-research: simulation framework for accelerating research in private
federated learning", section 4.1) report it as 7 to 72 times faster than other simulators on this
setting, on an A100: 1,000 users of 50 images (32 x 32 x 3, 10 classes), 50 users a round, one local
epoch in batches of 10 by SGD of 0.1, FedAvg without privacy, 1,500 rounds, and an evaluation on
10,000 images every 10 rounds. The network is theirs but for its dropout: two convolutions, a pool,
128 hidden units. The images are random, on which time does not depend, and so is the accuracy.

The time is that of `jp.run`, from the clients in memory to the finished report: compilation, the
ledger, checkpoints and the page are inside. `round ms` leaves the first ten rounds out.
"""

import dataclasses
import json
import pathlib
import tempfile
import time

import numpy as np
import tyro

from benchmarks import harness

SHAPE, CLASSES = (32, 32, 3), 10
WARM = 10


@dataclasses.dataclass(frozen=True)
class Config:
    users: int = 1_000
    images: int = 50  # of a user
    cohort: int = 50
    rounds: int = 1_500
    every: int = 10  # rounds between evaluations
    test_images: int = 10_000
    chunk: int = 0  # users vmapped together on a device; 0 = the default
    devices: int | None = None  # virtual CPU devices; default one a core


def clients_of(users: int, images: int, seed: int):
    """Users with random images."""
    import jaxpfl as jp

    rng = np.random.default_rng(seed)
    shape = (users * images, *SHAPE)
    columns = {
        "image": rng.integers(0, 256, shape, np.uint8),
        "label": rng.integers(0, CLASSES, users * images).astype(np.int32),
    }
    names = [f"{seed}, {user}" for user in range(users)]
    return jp.data.Population(columns, np.arange(users + 1) * images, names)


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import optax

    import jaxpfl as jp

    clients = clients_of(config.users, config.images, 0)
    test = clients_of(max(1, config.test_images // config.images), config.images, 1)
    model = jp.models.emnist_cnn(SHAPE, CLASSES)
    plan = jp.Plan.without_privacy(
        rounds=config.rounds, participation=jp.FixedSize(config.users, config.cohort)
    )
    mesh = jp.federated.client_mesh()
    slots = -(-config.cohort // mesh.size) * mesh.size
    algorithm = jp.algorithms.fed_avg(
        model,
        client=optax.sgd(0.1),
        server=optax.sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(10, config.images, one_shape=True, clients_per_bucket=slots),
        execution=jp.Execution(mesh, config.chunk or None),
    )
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        public = jp.DeclaredPublic(test, "random images")
        began = time.perf_counter()
        jp.run(
            algorithm,
            clients,
            ledger=out.with_name("ledger.jsonl"),
            out=out,
            evaluation=jp.Evaluator(
                model, public, max_examples=config.test_images, batch_size=config.test_images
            ),
            every=config.every,
        )
        seconds = time.perf_counter() - began
        lines = (out / "private" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    # Since the run began.
    ended = [json.loads(line)["seconds"] for line in lines]
    row = {
        "what": "jaxpfl, CIFAR10 setting of pfl-research",
        **dataclasses.asdict(config),
        "seconds": seconds,
        "minutes": seconds / 60,
    }
    if len(ended) > WARM:
        row["round ms"] = 1e3 * (ended[-1] - ended[WARM - 1]) / (len(ended) - WARM)
    harness.table([row], ["what", "rounds", "cohort", "seconds", "round ms"])
    print(f"recorded in {harness.record('cifar10', [row])}")
    return [row]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
