"""What hostile clients do to a model, and how far clipping and noise bound it.

    python -m benchmarks.macro.adversaries               # rows, and docs/adversaries.png
    python -m benchmarks.macro.adversaries --figure-only

Clients: MNIST's 60,000 training images (`$JAXPFL_DATA`) dealt at random to 1,000 made-up clients,
100 of them in a round. A share of them is hostile. "reversed": it sends minus ten times its change.
"backdoor": half of its images bear a white square and the label 0, and it sends ten times its
change (model replacement, Bagdasaryan et al. 2020, with a factor of 10). Measured on the 10,000
test images: accuracy, and how many of those that are no 0 are taken for one with the square.
The clients' network has one hidden layer of 64 units; one epoch of batches of 10 at a rate of 0.1.
"""

import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

import numpy as np
import tyro

from benchmarks import harness

FIGURE = pathlib.Path(__file__).parents[2] / "docs" / "adversaries.png"
IMAGES, HIDDEN, CLASSES, BATCH, RATE, FACTOR = 28 * 28, 64, 10, 10, 0.1, 10.0
ATTACKS = ("reversed", "backdoor")
DEFENCES = ("no clip", "clip", "clip and noise")


@dataclasses.dataclass(frozen=True)
class Config:
    shares: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3)
    rounds: int = 30
    clients: int = 1_000
    cohort: int = 100
    clip: float = 0.5
    epsilon: float = 8.0
    seeds: int = 2
    devices: int | None = None  # virtual CPU devices; default one a core
    figure_only: bool = False


def main(config: Config) -> None:
    if not config.figure_only:
        harness.use_cpu_devices(config.devices)
        for attack in ATTACKS:
            for defence in DEFENCES:
                for share in config.shares:
                    found = [
                        measured(config, attack, defence, share, s) for s in range(config.seeds)
                    ]
                    row = {"attack": attack, "defence": defence, "share": share}
                    row |= {name: [each[name] for each in found] for name in found[0]}
                    row |= {"rounds": config.rounds, "clip": config.clip, "epsilon": config.epsilon}
                    harness.record("adversaries", [row])
                    print(row, flush=True)
    text = (harness.RESULTS / "adversaries.jsonl").read_text(encoding="utf-8")
    draw([json.loads(line) for line in text.splitlines()], FIGURE)


def with_square(image: np.ndarray) -> np.ndarray:
    """The images with a white square in the corner."""
    marked = image.copy()
    marked[:, 24:, 24:] = 255
    return marked


def population(config: Config, attack: str, share: float, seed: int) -> Any:
    """The clients; column "hostile" is 1 at those that are."""
    import jaxpfl as jp

    folder = pathlib.Path(os.environ["JAXPFL_DATA"]) / "handwriting_mnist_writers"
    source = f"{folder / 'mnist_by_writer.npz'}?client=*&image=images&label=labels&partition=iid"
    clients = jp.data.open(f"{source}&clients={config.clients}&seed={seed}")
    rng = np.random.default_rng(seed)
    hostile = np.zeros(config.clients, np.int32)
    hostile[rng.choice(config.clients, round(share * config.clients), replace=False)] = 1
    hostile_N = np.repeat(hostile, np.diff(clients.offsets))
    image, label = np.array(clients.columns["image"]), np.array(clients.columns["label"], np.int32)
    if attack == "backdoor":
        poisoned = np.flatnonzero((hostile_N == 1) & (rng.random(len(label)) < 0.5))
        image[poisoned] = with_square(image[poisoned])
        label[poisoned] = 0
    return clients.with_columns({"image": image, "label": label, "hostile": hostile_N})


def measured(config: Config, attack: str, defence: str, share: float, seed: int) -> dict:
    """Accuracy and the backdoor's success after a run."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from jaxpfl.federated import LocalTraining, contribution

    def init(key):
        first, second = jax.random.split(key)
        return {
            "w1": jax.random.normal(first, (IMAGES, HIDDEN), jnp.float32) / IMAGES**0.5,
            "b1": jnp.zeros((1, HIDDEN)),
            "w2": jax.random.normal(second, (HIDDEN, CLASSES), jnp.float32) / HIDDEN**0.5,
            "b2": jnp.zeros((1, CLASSES)),
        }

    def logits(params, image):
        x = image.reshape(-1, IMAGES).astype(jnp.float32) / 255
        return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def loss(params, batch):
        found = logits(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(found, batch["label"])

    model = jp.models.from_functions(init, loss, columns=["image", "label", "hostile"])
    honest = LocalTraining(model, optax.sgd(RATE))
    factor = -FACTOR if attack == "reversed" else FACTOR

    def client(params, examples, key):
        change = contribution(honest, params, examples, key)
        hostile = jnp.any((examples.batches["hostile"] == 1) & examples.mask)
        return jax.tree.map(lambda leaf: leaf * jnp.where(hostile, factor, 1.0), change)

    settings = {
        "rounds": config.rounds,
        "clip": jp.Clip(1e6 if defence == "no clip" else config.clip),
        "participation": jp.Poisson(config.clients, config.cohort),
    }
    if defence == "clip and noise":
        plan = jp.Plan.calibrated(epsilon=config.epsilon, delta=1e-4, **settings)
    else:
        plan = jp.Plan.without_privacy(**settings)
    algorithm = jp.algorithms.fed_avg(
        model,
        client=client,
        server=optax.sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(BATCH, 64),
    )
    clients = population(config, attack, share, seed)
    with tempfile.TemporaryDirectory() as out:
        made = jp.run(algorithm, clients, ledger=f"{out}/ledger.jsonl", out=f"{out}/run", seed=seed)
    folder = pathlib.Path(os.environ["JAXPFL_DATA"]) / "handwriting_mnist_test"
    with np.load(folder / "mnist_test.npz") as stored:
        image, label = stored["images"], stored["labels"]
    guess = np.asarray(logits(made.params, jnp.asarray(image)).argmax(1))
    others = with_square(image[label != 0])
    fooled = np.asarray(logits(made.params, jnp.asarray(others)).argmax(1)) == 0
    return {"accuracy": float((guess == label).mean()), "fooled": float(fooled.mean())}


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Accuracy under reversal, and success of the backdoor, by the share of hostile clients."""
    from matplotlib.figure import Figure

    newest = {(row["attack"], row["defence"], row["share"]): row for row in rows}
    figure = Figure(figsize=(8.0, 3.0), dpi=144, layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, attack, value, title in (
        (panels[0], "reversed", "accuracy", "clients send -10 x their change: accuracy"),
        (panels[1], "backdoor", "fooled", "a backdoor, sent 10 times: images it turns"),
    ):
        for defence, marker in zip(DEFENCES, "os^", strict=True):
            found = sorted(
                (100 * share, 100 * float(np.mean(row[value])))
                for (a, d, share), row in newest.items()
                if (a, d) == (attack, defence)
            )
            axes.plot(*zip(*found, strict=True), marker=marker, label=defence)
        axes.set_ylim(0, 100)
        axes.set_xlabel("hostile clients, %")
        axes.set_title(title, fontsize="medium")
    panels[0].set_ylabel("%")
    panels[1].legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
