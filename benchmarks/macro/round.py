"""A full DP-FedAvg round against a handwritten JAX round, in clients per second.

    python -m benchmarks.macro.round                      # cohorts 10, 50, 200, 1000
    python -m benchmarks.macro.round --cohorts 10 50 --chunks 1 8 --forms patches convolution

The field's EMNIST CNN (1.2 M parameters), 100 examples a client (ragged: 1 to 100), batches of 20,
one epoch. Ours is everything a run does in a round, through its releaser: the charge on the disk,
the cohort's draw (of everyone, so that all rounds are alike), packing from the population on the
prefetch thread, local training, clipping, summing, noise, the record of the round before, server
step. The handwritten rounds do the same arithmetic in some forty lines of plain JAX on data that
already lies stacked on the device, with none of the padding, streaming, ledger or checks; the best
of its variants (scan or vmap over clients, one device or all) is what ours is compared with, in the
same process and by turns.

`GFLOP/s` counts what the network needs for the real examples, by its definition. `useful` is the
share of the arithmetic done that fell on real examples. `over useful work` is a ragged round's time
over what its real examples cost at the equal round's price per example.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.models.layers.convolution import Form

EXAMPLES, BATCH, CLASSES, SHAPE = 100, 20, 62, (28, 28, 1)
CLIP_NORM, NOISE, LEARNING_RATE = 0.5, 1.0, 0.1

# What training on one example takes: 12 million products and sums forward, twice as many backward,
# by the definition of the network; transforms that save some of them are not subtracted.
_FLOP = 7.16e7


@dataclasses.dataclass(frozen=True)
class Config:
    cohorts: tuple[int, ...] = (10, 50, 200, 1000)
    chunks: tuple[int, ...] = (0,)  # clients vmapped together on a device; 0 = the default
    forms: tuple[Form, ...] = ("auto",)  # of the convolution
    repeats: int = 5
    devices: int | None = None  # virtual CPU devices; default one a core
    handwritten_up_to: int = 200  # it holds the whole cohort on the device
    examples: int = EXAMPLES  # of a client, at most
    in_flight: int = 40  # clients of the rounds that are dispatched before the first is awaited


def population(clients: int, ragged: bool, examples: int):
    import jaxpfl as jp

    rng = np.random.default_rng(0)
    # Log-normal sizes, as client data sets are; about 40 examples at the median.
    sizes = np.clip(rng.lognormal(3.6, 0.8, clients), 1, examples).astype(int)
    sizes = sizes if ragged else np.full(clients, examples)
    return jp.data.from_clients(
        {
            f"client {i}": {
                "image": rng.random((size, *SHAPE), np.float32),
                "label": rng.integers(0, CLASSES, size).astype(np.int32),
            }
            for i, size in enumerate(sizes)
        }
    )


def handwritten(form: Form, over: Any, mesh):
    """A jitted round on stacked data: (params, (image, label), key) -> params, norm."""
    import jax.numpy as jnp

    from benchmarks.rounds import by_hand
    from jaxpfl.models.classifiers import emnist_cnn

    model, everyone = emnist_cnn(form=form), jnp.ones((BATCH,), bool)

    def loss(params, image, label):
        return model.loss(params, {"image": image, "label": label}, everyone)[0]

    rates = {"learning_rate": LEARNING_RATE, "clip_norm": CLIP_NORM, "noise": NOISE}
    return by_hand(loss, mesh, over=over, **rates)


def ours(form: Form, chunk: int, data, mesh):
    """A function that runs one round of the library on all clients, and its waste by padding."""
    import jaxpfl as jp
    from benchmarks.rounds import rounds, sgd
    from jaxpfl.federated import Execution

    clients = len(data)
    plan = jp.Plan(
        rounds=100_000,
        clip=jp.Clip(CLIP_NORM),
        noise=jp.Noise(NOISE),
        participation=jp.Poisson(clients, clients),
        delta=1e-7,
    )
    algorithm = jp.algorithms.fed_avg(
        jp.models.emnist_cnn(form=form),
        client=sgd(LEARNING_RATE),
        server=sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(BATCH, EXAMPLES, clients_per_bucket=max(64, chunk * mesh.size)),
        execution=Execution(mesh, chunk or None),
    )
    observed: dict[str, Any] = {}
    states = rounds(algorithm, data, observe=observed.update)
    return functools.partial(next, states), lambda: observed["padding_waste"]


def stack(data, clients: int):
    """The equal population as arrays [clients, steps, batch, ...]."""
    shape = (clients, -1, BATCH)
    image = np.asarray(data.columns["image"]).reshape(*shape, *SHAPE)
    return image, np.asarray(data.columns["label"]).reshape(shape)


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpfl.federated import client_mesh
    from jaxpfl.models.classifiers import emnist_cnn

    everything = client_mesh()
    meshes = [everything] if everything.size == 1 else [client_mesh(1), everything]
    rows = []
    for clients in config.cohorts:
        equal, ragged = (population(clients, kind, config.examples) for kind in (False, True))
        runs, wastes = {}, {}
        for form in config.forms:
            for chunk in config.chunks:
                label = f"form {form}, chunk {chunk or 'default'}"
                for kind, data in (("equal", equal), ("ragged", ragged)):
                    name = f"jaxpfl {kind}, {label}"
                    runs[name], wastes[name] = ours(form, chunk, data, everything)
            if clients > config.handwritten_up_to:
                continue
            for mesh in meshes:
                if clients % mesh.size:
                    continue
                dealt = NamedSharding(mesh, PartitionSpec("clients"))
                columns = jax.device_put(stack(equal, clients), dealt)
                everywhere = NamedSharding(mesh, PartitionSpec())
                params = jax.device_put(emnist_cnn().init(jax.random.key(0)), everywhere)
                # An accelerator is idle with one client at a time, a CPU is not.
                both = clients <= 10 or everything.devices.flat[0].platform != "cpu"
                for over in ("scan", "vmap") if both else ("scan",):
                    round_ = handwritten(form, over, mesh)
                    runs[f"handwritten {over}, form {form}, {mesh.size} devices"] = (
                        functools.partial(round_, params, columns, jax.random.key(1))
                    )
        # Small cohorts: some rounds are dispatched before the first is waited for, as in a run.
        rounds = max(1, config.in_flight // clients)
        batches = {name: functools.partial(_times, rounds, run) for name, run in runs.items()}
        seconds = harness.interleaved(batches, config.repeats if clients <= 200 else 2)
        seconds = {name: taken / rounds for name, taken in seconds.items()}
        by_hand = [taken for name, taken in seconds.items() if name.startswith("hand")]
        best_equal = min(t for name, t in seconds.items() if name.startswith("jaxpfl equal"))
        for name, taken in seconds.items():
            examples = ragged.num_examples if "ragged" in name else equal.num_examples
            row = {
                "cohort": clients,
                "what": name,
                "examples": config.examples,
                "seconds": taken,
                "clients/s": clients / taken,
                "GFLOP/s": _FLOP * examples / taken / 1e9,
                "ms/client": 1e3 * taken / clients,
                "peak MB": harness.peak_memory_mb(),
            }
            if by_hand:
                row["vs handwritten"] = min(by_hand) / taken
            if name in wastes:
                row["useful"] = 1.0 - wastes[name]()
            if "ragged" in name:
                row.pop("vs handwritten", None)
                row["over useful work"] = taken / (best_equal * examples / equal.num_examples)
            rows.append(row)
        harness.table(rows[-len(seconds) :], list(_columns(rows)))
    print(f"recorded in {harness.record('round', rows)}")
    return rows


def _times(rounds, run):
    for _ in range(rounds - 1):
        run()
    return run()


def _columns(rows):
    return dict.fromkeys(name for row in rows for name in row)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
