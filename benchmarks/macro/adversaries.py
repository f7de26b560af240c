"""What hostile clients do to a model, and how far a clip norm and noise bound it.

    python -m benchmarks.macro.adversaries
    python -m benchmarks.macro.adversaries --figure docs/adversaries.png    # of the recorded rows

Clients, network and rates are those of `benchmarks.macro.algorithms`, trained by FedAvg. A share of
the clients is hostile:

    flip        it sends minus its change
    flip x 10   and ten times that
    backdoor    half of its images have a white square and the label 0, and it sends ten times its
                change (model replacement, Bagdasaryan et al. 2020, section 3.2, with this factor)

Measured on MNIST's test images: accuracy, and how many of those that are no 0 are taken for one
once they have the square.
"""

import dataclasses
import pathlib
import tempfile
import time

import numpy as np
import tyro

from benchmarks import comparison, harness
from benchmarks.macro.algorithms import BATCH, EPOCHS, RATE, dealt, network, test_images

FACTORS = {"flip": -1.0, "flip x 10": -10.0, "backdoor": 10.0}
ARMS = ("no clip", "clip", "clip and noise")


@dataclasses.dataclass(frozen=True)
class Config:
    shares: tuple[float, ...] = (0.0, 0.01, 0.05, 0.2)
    rounds: int = 40
    clients: int = 1_000
    cohort: int = 100
    alpha: float = 0.1
    clip: float = 1.0
    epsilon: float = 8.0
    seeds: tuple[int, ...] = (0,)
    figure: pathlib.Path | None = None  # draws what was recorded, and trains nothing


def main(config: Config) -> None:
    if config.figure is not None:
        drawn(comparison.read(harness.RESULTS / "adversaries.jsonl")).savefig(config.figure)
        return
    harness.use_cpu_devices(1)
    for seed in config.seeds:
        for arm in ARMS:
            for share in config.shares:
                # Without hostile clients, all attacks are the same run.
                for attack in FACTORS if share else ("backdoor",):
                    began = time.perf_counter()
                    row = {"attack": attack, "arm": arm, "share": share, "seed": seed}
                    row |= measured(config, attack, arm, share, seed)
                    row |= {name: getattr(config, name) for name in ("rounds", "clip", "epsilon")}
                    row["seconds"] = round(time.perf_counter() - began, 1)
                    harness.record("adversaries", [row])
                    print(row, flush=True)


def with_square(images: np.ndarray) -> np.ndarray:
    """The images with a white square in the corner."""
    marked = images.copy()
    marked[:, 24:, 24:] = 255
    return marked


def measured(config: Config, attack: str, arm: str, share: float, seed: int) -> dict[str, float]:
    """Accuracy, and the backdoor's success, after a run."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from jaxpfl.federated import LocalTraining, contribution

    init, logits, loss = network()
    model = jp.models.from_functions(init, loss, columns=["image", "label", "hostile"])
    honest, factor = LocalTraining(model, optax.sgd(RATE)), FACTORS[attack]

    def client(params, examples, key):
        change = contribution(honest, params, examples, key)
        hostile = jnp.any((examples.batches["hostile"] == 1) & examples.mask)
        return jax.tree.map(lambda leaf: leaf * jnp.where(hostile, factor, 1.0), change)

    settings = {
        "rounds": config.rounds,
        "clip": jp.Clip(1e6 if arm == "no clip" else config.clip),
        "participation": jp.Poisson(config.clients, config.cohort),
    }
    if arm == "clip and noise":
        plan = jp.Plan.calibrated(epsilon=config.epsilon, delta=1e-4, **settings)
    else:
        plan = jp.Plan.without_privacy(**settings)
    algorithm = jp.algorithms.fed_avg(
        model,
        client=client,
        server=optax.sgd(1.0),
        plan=plan,
        cohort=jp.CohortSpec(BATCH, 200, epochs=EPOCHS),
    )
    clients = population(config, attack, share, seed)
    with tempfile.TemporaryDirectory() as out:
        made = jp.run(algorithm, clients, ledger=f"{out}/ledger.jsonl", out=f"{out}/run", seed=seed)
    image, label = test_images()
    guess, marked = (
        np.asarray(logits(made.params, jnp.asarray(each)).argmax(1))
        for each in (image, with_square(image[label != 0]))
    )
    return {
        "accuracy": round(float((guess == label).mean()), 4),
        "fooled": round(float((marked == 0).mean()), 4),
    }


def population(config: Config, attack: str, share: float, seed: int):
    """The clients; column "hostile" is 1 at those that are."""
    clients = dealt(config.clients, config.alpha, seed)
    rng, hostile = np.random.default_rng(seed), np.zeros(config.clients, np.int32)
    hostile[rng.choice(config.clients, round(share * config.clients), replace=False)] = 1
    hostile_N = np.repeat(hostile, np.diff(clients.offsets))
    image, label = np.array(clients.columns["image"]), np.array(clients.columns["label"], np.int32)
    if attack == "backdoor":
        poisoned = (hostile_N == 1) & (rng.random(len(label)) < 0.5)
        image[poisoned], label[poisoned] = with_square(image[poisoned]), 0
    return clients.with_columns({"image": image, "label": label, "hostile": hostile_N})


def drawn(rows: list[dict]):
    """What the attacks do by the share of hostile clients: accuracy, and the backdoor's success."""
    from matplotlib.figure import Figure

    from jaxpfl.experiments.report import plots

    figure = Figure(figsize=(8.0, 3.0), dpi=144, layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    styles = (("s--", plots.RED), ("o-", plots.ACCENT), ("^:", plots.INK))
    for axes, attack, value, title in (
        (panels[0], "flip x 10", "accuracy", "-10 x their change: accuracy"),
        (panels[1], "backdoor", "fooled", "a backdoor: triggered images that obey it"),
    ):
        for arm, (style, colour) in zip(ARMS, styles, strict=True):
            found: dict[float, list[float]] = {}
            for row in rows:
                if row["arm"] == arm and (row["attack"] == attack or row["share"] == 0):
                    found.setdefault(row["share"], []).append(100 * row[value])
            shares = sorted(found)
            means = [float(np.mean(found[share])) for share in shares]
            axes.plot(range(len(shares)), means, style, color=colour, label=arm)
            axes.set_xticks(range(len(shares)), [f"{100 * share:g}" for share in shares])
        axes.grid(True, color="#e5e7eb", linewidth=0.8)
        axes.set_title(title, loc="left", fontsize=11, color=plots.INK)
        axes.set_xlabel("hostile clients, %", color=plots.INK)
    panels[0].set_ylabel("%", color=plots.INK)
    panels[0].legend(fontsize=9, frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config))
