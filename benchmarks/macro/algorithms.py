"""Accuracy of federated algorithms on MNIST, unequal clients.

    python -m benchmarks.macro.algorithms
    python -m benchmarks.macro.algorithms --seeds 1 --rounds 10
    python -m benchmarks.macro.algorithms --writers --cohort 50 --rounds 20
    python -m benchmarks.macro.algorithms --figure docs/algorithms.png    # of the rows of 60 rounds
    python -m benchmarks.macro.algorithms --writers --figure docs/algorithms_writers.png

Clients: MNIST's 60,000 training images (`$JAXPFL_DATA`), dealt to 1,000 made-up clients by a
Dirichlet distribution over digits, which makes them unequal in size and kind, or with `--writers`
the 539 people who wrote them. Test: its 10,000 test images, by others. The network has one hidden
layer of 64 units; clients train for two epochs of batches of 10 at a rate of 0.1, and the server
averages. All algorithms get the same clients, plan, rates and seeds, and nothing was tuned for any
of them: the clip norm is FedAvg's, but for FedNova, whose contributions are shorter by the number
of steps and whose server takes as many times larger ones. Clients of Ditto, APFL, FedPer and FedRep
keep every fifth image out of the training; their own models, and the shared one, are measured on
these. IFCA's accuracy is of the best of its models. Rows are stored as each algorithm ends.
"""

import dataclasses
import itertools
import os
import pathlib
import tempfile
import time
from typing import Any

import numpy as np
import tyro

from benchmarks import comparison, harness

IMAGES, HIDDEN, CLASSES, BATCH, EPOCHS, RATE = 28 * 28, 64, 10, 10, 2, 0.1
IMAGES_TRAINED, WRITERS = 60_000, 539


@dataclasses.dataclass(frozen=True)
class Config:
    rounds: int = 40
    clients: int = 1_000
    cohort: int = 100
    alpha: float = 0.1
    writers: bool = False  # are the clients; there is no other number of them, and no alpha
    clip: float = 1.0
    epsilon: float = 8.0
    seeds: int = 3
    first_seed: int = 0
    mu: float = 0.1
    variate_clip: float = 2.0
    rise_clip: float = 0.5
    only: tuple[str, ...] = ()  # of the algorithms; default all
    devices: int | None = None  # virtual CPU devices; default one a core
    figure: pathlib.Path | None = None  # draws what was recorded, and trains nothing


def main(config: Config) -> list[dict]:
    if config.figure is not None:
        rows = comparison.read(harness.RESULTS / "algorithms.jsonl")
        drawn(rows, config.writers).savefig(config.figure)
        return []
    harness.use_cpu_devices(config.devices)
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from jaxpfl.federated import APFL, Ditto, LocalTraining, PersonalParts, Proximal, per_step

    image, label = map(jnp.asarray, test_images())
    init, logits, loss = network()
    model = jp.models.from_functions(init, loss)
    accuracy = jax.jit(lambda params: jnp.mean(logits(params, image).argmax(1) == label))
    number = WRITERS if config.writers else config.clients
    # Of a client with the mean number of images, which is public.
    steps = EPOCHS * IMAGES_TRAINED // number // BATCH
    sgd, falling = optax.sgd(RATE), optax.cosine_decay_schedule(1.0, config.rounds)
    algorithms = {
        "FedAvg": (LocalTraining(model, sgd), 1.0),
        "FedProx": (LocalTraining(model, sgd, penalty=Proximal(config.mu)), 1.0),
        "FedNova": (LocalTraining(model, sgd, transform=per_step), float(steps)),
        "FedAvg, falling rate": (LocalTraining(model, sgd, schedule=falling), 1.0),
        "SCAFFOLD": (None, 1.0),
        "AdaFedProx": (sgd, 1.0),
        "FedDyn": (sgd, 1.0),
        "FedBuff": (sgd, 1.0),
        "IFCA": (sgd, 1.0),
        "Ditto": (Ditto(model, sgd, pull=config.mu), 1.0),
        "APFL": (APFL(model, sgd, mix=0.5), 1.0),
        "FedPer": (PersonalParts(model, sgd, own="w2|b2"), 1.0),
        "FedRep": (PersonalParts(model, sgd, own="w2|b2", first=1), 1.0),
    }
    own = {
        "AdaFedProx": (jp.algorithms.ada_fed_prox, {"rise_clip": config.rise_clip}),
        "FedDyn": (jp.algorithms.fed_dyn, {"alpha": config.mu}),
        "FedBuff": (jp.algorithms.fed_buff, {"longest": 4}),
        "IFCA": (jp.algorithms.ifca, {"clusters": 3}),
    }
    settings = {
        "rounds": config.rounds,
        "participation": jp.Poisson(number, config.cohort),
    }
    rows = []
    for (name, (client, server_rate)), private in itertools.product(
        algorithms.items(), (False, True)
    ):
        if config.only and name not in config.only:
            continue
        clip = jp.Clip(config.clip / server_rate)
        plan = jp.Plan.without_privacy(clip=clip, **settings)
        if private:
            plan = jp.Plan.calibrated(epsilon=config.epsilon, delta=1e-4, clip=clip, **settings)
        found, on_own, began = [], [], time.perf_counter()
        for seed in range(config.first_seed, config.first_seed + config.seeds):
            clients = mnist("writer") if config.writers else dealt(number, config.alpha, seed)
            kept = np.ones(clients.num_examples, bool)
            personal = hasattr(client, "own_model")
            kept[4::5] = not personal
            shared = {
                "server": optax.sgd(server_rate),
                "plan": plan,
                "cohort": jp.CohortSpec(BATCH, 200, epochs=EPOCHS),
            }
            if name == "SCAFFOLD":
                algorithm = jp.algorithms.scaffold(
                    model, learning_rate=RATE, variate_clip=config.variate_clip, **shared
                )
            else:
                make, extra = own.get(name, (jp.algorithms.fed_avg, {}))
                algorithm = make(model, client=client, **extra, **shared)
            with tempfile.TemporaryDirectory() as out:
                ledger = f"{out}/ledger.jsonl"
                # Reproducible, so that the states can be found when the run has ended.
                from_seed = jp.privacy.ReproducibleSeed(seed)
                trained_on, folder = clients.keeping(kept), f"{out}/run"
                made = jp.run(algorithm, trained_on, ledger=ledger, out=folder, seed=from_seed)
                if personal:
                    secret = jp.federated.RunSecret.reproducible(seed, algorithm.name)
                    key = secret.words_of("names", "").tobytes()
                    place = pathlib.Path(folder) / "private" / "client_states"
                    kept_at = place, config.rounds, key
                    on_own.append(of_clients(kept_at, client, clients, ~kept, made.params))
            several = name == "IFCA"
            models = made.params if several else jax.tree.map(lambda x: x[None], made.params)
            found.append(float(jax.vmap(accuracy)(models).max()))
        rows.append(
            {
                "algorithm": name,
                "epsilon": config.epsilon if private else "inf",
                "accuracy": [round(each, 4) for each in found],
                "mean": round(float(np.mean(found)), 4),
                "first_seed": config.first_seed,
                "rounds": config.rounds,
                "clients": number,
                "cohort": config.cohort,
                **({"data": "writers"} if config.writers else {"alpha": config.alpha}),
                "clip": config.clip / server_rate,
                "seconds_per_seed": (time.perf_counter() - began) / config.seeds,
                **({"by client": on_own} if on_own else {}),
                **({"variate_clip": config.variate_clip} if name == "SCAFFOLD" else {}),
            }
        )
        print(rows[-1], harness.record("algorithms", rows[-1:]), flush=True)
    return rows


def network():
    """The network: its first parameters, `logits(params, image)` and `loss(params, batch)`."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(key):
        first, second = jax.random.split(key)
        return {
            "w1": jax.random.normal(first, (IMAGES, HIDDEN), jnp.float32) / IMAGES**0.5,
            "b1": jnp.zeros((1, HIDDEN)),
            "w2": jax.random.normal(second, (HIDDEN, CLASSES), jnp.float32) / HIDDEN**0.5,
            "b2": jnp.zeros((1, CLASSES)),
        }

    def logits(params, image):
        flat = image.reshape(-1, IMAGES).astype(jnp.float32) / 255
        hidden = jax.nn.relu(flat @ params["w1"] + params["b1"])
        return hidden @ params["w2"] + params["b2"]

    def loss(params, batch):
        found = logits(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(found, batch["label"])

    return init, logits, loss


def mnist(client: str, **options: Any) -> Any:
    """The training images, dealt to clients, or by "writer"."""
    import jaxpfl as jp

    path = "$JAXPFL_DATA/handwriting_mnist_writers/mnist_by_writer.npz"
    columns = {"client": client, "image": "images", "label": "labels", **options}
    return jp.data.open(f"{path}?{'&'.join(f'{k}={v}' for k, v in columns.items())}")


def test_images() -> tuple[np.ndarray, np.ndarray]:
    """The test images uint8 [10,000, 28, 28], and their labels."""
    folder = pathlib.Path(os.environ["JAXPFL_DATA"]) / "handwriting_mnist_test"
    with np.load(folder / "mnist_test.npz", allow_pickle=False) as stored:
        return stored["images"], stored["labels"].astype(np.int32)


def dealt(clients: int, alpha: float, seed: int) -> Any:
    """The training images, dealt to clients by a Dirichlet distribution over digits."""
    by_label = {"partition": "dirichlet", "by": "label", "min_examples": 0}
    return mnist("*", **by_label, clients=clients, alpha=alpha, seed=seed)


def drawn(rows: list[dict], writers: bool):
    """The figure of every algorithm's seeds, the last row of each, without noise and with it."""
    from jaxpfl.experiments.report import plots

    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        written, several = "data" in row, row["rounds"] == 60 and len(row["accuracy"]) > 1
        if written == writers and (writers or several):
            seeds = found.setdefault((row["algorithm"], str(row["epsilon"])), {})
            seeds |= dict(enumerate(row["accuracy"], row.get("first_seed", 0)))
    means = {
        n: np.mean([*each.values()]) for (n, epsilon), each in found.items() if epsilon == "inf"
    }
    names = sorted(means, key=means.__getitem__)
    title = (
        "The shared model, clients are writers" if writers else "The shared model, dealt clients"
    )
    axes = plots.axes(title, width=6.4, height=4.4)
    for epsilon, colour, label in (
        ("8.0", plots.ACCENT, "epsilon 8"),
        ("inf", plots.INK, "no noise"),
    ):
        for place, name in enumerate(names):
            accuracies = [100 * each for each in found.get((name, epsilon), {}).values()]
            axes.scatter(
                accuracies, [place] * len(accuracies), color=colour, s=18, alpha=0.75,
                label=label if place == 0 else None, zorder=3, linewidths=0,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    return plots.labelled(axes, "accuracy, % (each point is a seed)", "")


def of_clients(
    place: tuple[pathlib.Path, int, bytes], client, clients, held, params
) -> dict[str, float]:
    """Accuracies of clients' own models and of the shared one on the images that they kept out.

    Of public data, or else this would be a release.
    """
    import jax

    from jaxpfl.federated.release.client_states import ClientStates

    params = jax.device_get(params)
    ids = clients.client_ids.to_pylist()
    states = ClientStates(place, ids, jax.device_get(client.client_state(params)))
    image = np.asarray(clients.columns["image"]).reshape(-1, IMAGES).astype(np.float32) / 255
    label, found = np.asarray(clients.columns["label"]), []
    for number in range(len(clients)):
        begin, end = clients.offsets[number : number + 2]
        rows = begin + np.flatnonzero(held[begin:end])
        kept, new = states.rows(np.array([number]))
        if not len(rows) or new[0]:
            continue
        right = []
        kept = jax.tree.map(lambda leaf: leaf[0], kept)
        for each in (params, client.own_model(params, kept)):
            hidden = np.maximum(image[rows] @ each["w1"] + each["b1"], 0)
            right.append(((hidden @ each["w2"] + each["b2"]).argmax(1) == label[rows]).mean())
        found.append(right)
    shared, own = np.array(found).T
    figures = {"shared": shared, "own": own}
    worst = {f"{name}, worst tenth": np.sort(f)[: len(f) // 10] for name, f in figures.items()}
    return {name: round(float(np.mean(f)), 4) for name, f in {**figures, **worst}.items()}


if __name__ == "__main__":
    main(tyro.cli(Config))
