"""What choosing settings on private clients costs: the best of 30 points in three ways.

    python -m benchmarks.macro.private_selection

Digits, dealt to 1,200 clients (960 train): 5 learning rates by 6 clip norms, at a stated epsilon.

    uncharged    each point at the stated epsilon; the best is taken, which costs what all 30 cost
    naive        all 30 points together at the stated epsilon
    selection    a geometric number of points, 30 on average, together at the stated epsilon

Points are chosen by validation clients that are declared public, and the chosen one is scored on
test clients, which no choice saw. Noise is real, so that a repetition is another draw.
"""

import dataclasses
import pathlib
import tempfile
import time

import tyro
import yaml

from benchmarks import harness

BASE = {
    "data": {
        "source": "digits?clients=1200&alpha=0.5&seed=0",
        "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
    },
    "model": {
        "name": "cnn", "image_shape": [8, 8, 1], "classes": 10, "hidden": 16,
        "features": [[8, True]],
    },
    "training": {"clients_per_round": 200, "batch_size": 8, "max_examples": 16},
    "run": {"devices": 1, "checkpoint_every": 1_000},
}  # fmt: skip
GRID = {
    "training.client.learning_rate": [0.01, 0.03, 0.1, 0.3, 1.0],
    "privacy.clip_norm": [0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
}
ARMS = ("uncharged", "naive", "selection")


@dataclasses.dataclass(frozen=True)
class Config:
    epsilon: float = 8.0
    delta: float = 1e-4
    rounds: int = 10
    repetitions: int = 1
    arms: tuple[str, ...] = ARMS


def main(config: Config) -> None:
    harness.use_cpu_devices(1)
    for repetition in range(config.repetitions):
        for arm in config.arms:
            began = time.process_time()
            row = {"arm": arm, "repetition": repetition, **measured(config, arm)}
            row |= {"stated_epsilon": config.epsilon, "delta": config.delta}
            row |= {"rounds": config.rounds, "noise": "real"}
            row["cpu_seconds"] = round(time.process_time() - began, 1)
            harness.record("private_selection", [row])
            print(row, flush=True)


def measured(config: Config, arm: str) -> dict:
    """The chosen point's scores, and what it and its choice cost."""
    from jaxpfl.experiments.registry import system_of
    from jaxpfl.experiments.sweep.config import load_sweep
    from jaxpfl.experiments.sweep.points import run_sweep
    from jaxpfl.experiments.sweep.selection import Selection, select
    from jaxpfl.privacy.accounting import smallest_multiplier

    with tempfile.TemporaryDirectory() as folder:
        path, out = pathlib.Path(folder), pathlib.Path(folder) / "out"
        privacy = {"epsilon": config.epsilon, "delta": config.delta}
        training = {**BASE["training"], "rounds": config.rounds}
        evaluation = {"declared_public": True, "every": config.rounds}
        base = {**BASE, "privacy": privacy, "training": training, "evaluation": evaluation}
        (path / "base.yaml").write_text(yaml.safe_dump(base))
        grid = {"base": "base.yaml", "metric": "accuracy", "grid": GRID}
        (path / "grid.yaml").write_text(yaml.safe_dump(grid))
        sweep = load_sweep(path / "grid.yaml")
        study = system_of("federated_training").part("study").prepare(sweep.points[0].config)
        chosen = Selection(sweep, study.clients)
        if arm == "selection":
            select(sweep, out)
            return {
                "epsilon": chosen.guarantee.epsilon(),
                **_best(out / "private" / "points", chosen.one.epsilon()),
            }

        def of_all(z: float):
            noise = f"--privacy.noise_multiplier={z!r}"
            at = load_sweep(path / "grid.yaml", ["--privacy.epsilon", "null", noise])
            return Selection(at, study.clients)

        # The noise of one point at the stated epsilon, or of all of them.
        kind = "one" if arm == "uncharged" else "naive"
        z = smallest_multiplier(lambda z: getattr(of_all(z), kind), config.epsilon)
        run_sweep(of_all(z).sweep, out, progress=False)
        cost = of_all(z)
        return {"epsilon": cost.naive.epsilon(), **_best(out / "points", cost.one.epsilon())}


def _best(points: pathlib.Path, alone: float) -> dict:
    """The point that is best on validation clients, and its score on test clients."""
    from jaxpfl import files
    from jaxpfl.experiments.records.cautions import OURS

    scored = []
    for folder in sorted(path for path in points.iterdir() if path.is_dir()):
        result = files.read_json(folder / "result.json")
        plan = files.read_json(folder / "run.json")["plan"]
        rate = files.read_json(folder / "run.json")["config"]["training"]["client"]["learning_rate"]
        (ours,) = (row for row in result["table"] if row["model"] == OURS)
        validation = result["metrics"]["evaluation"]["accuracy"]
        scored.append((validation, ours["accuracy"], rate, plan))
    validation, test, rate, plan = max(scored, key=lambda one: one[0])
    return {
        "tried": len(scored),
        "epsilon_of_one": alone,
        "noise_multiplier": plan["noise_multiplier"],
        "learning_rate": rate,
        "clip_norm": plan["clip_norm"],
        "validation_accuracy": round(validation, 4),
        "test_accuracy": round(test, 4),
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
