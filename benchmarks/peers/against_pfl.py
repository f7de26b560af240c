"""FedAvg, FedProx, AdaFedProx and SCAFFOLD beside pfl's own: noiseless rounds, compared.

    python -m benchmarks.peers.against_pfl                  # environment as of `make peers`
    python -m benchmarks.peers.against_pfl --python PYTHON  # which has pfl[pytorch]

Twelve clients of unequal size hold scikit-learn's digits, one half of the digits each; all take
part in each round, with a few steps over all of their images, so that no order counts. The model
has one hidden layer. `apart` is the largest norm over rounds of (our parameters - pfl's), relative
to that round's update; `drift` the same distance after the last round, where SCAFFOLD's mistake in
pfl (`pfl_algorithms`) adds up. AdaFedProx's loss must rise within three rounds, or mu stays 0: its
server takes too large steps. (At a client's rate of 3 it rises, too, but there float32's rounding
alone grows 30-fold a round.)
"""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import tyro

from benchmarks import harness

ROOT = pathlib.Path(__file__).parents[2]
OURS = {name: name for name in ("fed_avg", "fed_prox", "ada_fed_prox", "scaffold")}
OURS["scaffold_mended"] = "scaffold"


@dataclasses.dataclass(frozen=True)
class Config:
    python: pathlib.Path = ROOT / ".venv-peer-pfl" / "bin" / "python"
    rounds: int = 3
    steps: int = 5
    rate: float = 0.3
    ada_server_rate: float = 15.0
    mu: float = 0.5
    clients: int = 12
    hidden: int = 32


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(None)
    held, start = made_up(config)
    settings = json.dumps(dataclasses.asdict(config), default=str)
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "work.npz"
        arrays: dict = start | held
        np.savez(file, settings=settings, **arrays)
        for name, own in OURS.items():
            if own not in found:
                found[own] = rounds_of(own, config, held, start)
            theirs, versions = rounds_of_pfl(name, config, file)
            rows.append({"algorithm": f"pfl, {name}", **compared(start, found[own], theirs)})
            rows[-1] |= {"versions": versions, "rounds": config.rounds, "steps": config.steps}
            print(rows[-1], flush=True)
    print(harness.record("against_pfl", rows))
    return rows


def made_up(config: Config) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The clients' examples, and the parameters that both start from."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    digits: Any = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
    rows = []
    for client in range(config.clients):
        mine = np.flatnonzero((y < 5) == (client % 2 == 0))
        rows.append(rng.choice(mine, int(rng.integers(5, 100)), replace=False))
    taken = np.concatenate(rows)
    offsets = np.cumsum([0, *(len(each) for each in rows)])
    shapes = {"w1": (64, config.hidden), "w2": (config.hidden, 10)}
    start = {
        name: (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    start |= {"b1": np.zeros((1, config.hidden), np.float32), "b2": np.zeros((1, 10), np.float32)}
    return {"x": x[taken], "y": y[taken], "offsets": offsets}, start


def rounds_of(name: str, config: Config, held, start) -> list[dict[str, np.ndarray]]:
    """The parameters of this library after each round."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import rounds
    from jaxpfl.federated import LocalTraining, Proximal

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
        logits = hidden @ params["w2"] + params["b2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    ends = held["offsets"]
    clients = jp.data.from_clients(
        {
            f"{i}": {"x": held["x"][a:b], "y": held["y"][a:b].astype(np.int32)}
            for i, (a, b) in enumerate(zip(ends, ends[1:], strict=False))
        }
    )
    model = jp.models.from_functions(lambda key: jax.tree.map(jnp.asarray, start), loss)
    plan = jp.Plan.without_privacy(
        rounds=config.rounds,
        clip=jp.Clip(1e6),
        participation=jp.Poisson(config.clients, config.clients),
    )
    most = int(np.diff(ends).max())
    shared = {
        "server": optax.sgd(config.ada_server_rate if name == "ada_fed_prox" else 1.0),
        "plan": plan,
        "cohort": jp.CohortSpec(most, most, epochs=config.steps),
    }
    if name == "scaffold":
        algorithm = jp.algorithms.scaffold(
            model, learning_rate=config.rate, variate_clip=1e6, **shared
        )
    elif name == "ada_fed_prox":
        client = optax.sgd(config.rate)
        algorithm = jp.algorithms.ada_fed_prox(model, client=client, rise_clip=1e6, **shared)
    else:
        penalty = Proximal(config.mu) if name == "fed_prox" else None
        client = LocalTraining(model, optax.sgd(config.rate), penalty=penalty)
        algorithm = jp.algorithms.fed_avg(model, client=client, **shared)
    states = itertools.islice(rounds(algorithm, clients), config.rounds)
    return [jax.device_get(state.params) for state, _ in states]


def rounds_of_pfl(name: str, config: Config, file: pathlib.Path):
    """Its parameters after each round, and its versions."""
    out = file.with_name(f"{name}.npz")
    command = [config.python, "-m", "benchmarks.peers.pfl_algorithms", file, name, out]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    with np.load(out, allow_pickle=False) as stored:
        found = [
            {leaf: stored[f"{leaf}.{i}"] for leaf in ("w1", "b1", "w2", "b2")}
            for i in range(config.rounds)
        ]
    return found, json.loads(done.stdout.splitlines()[-1])


def compared(start, ours, theirs) -> dict[str, float]:
    """How far apart, relative to the update of the round (`apart`) and of all rounds (`drift`)."""

    def norm(one, other):
        return sum(float(np.sum((one[k] - other[k]) ** 2.0)) for k in start) ** 0.5

    before = [start, *theirs[:-1]]
    each = [norm(*pair) for pair in zip(ours, theirs, strict=True)]
    moved = [norm(*pair) for pair in zip(theirs, before, strict=True)]
    apart = max(a / m for a, m in zip(each, moved, strict=True))
    return {"apart": apart, "drift": each[-1] / norm(theirs[-1], start)}


if __name__ == "__main__":
    sys.exit(not main(tyro.cli(Config)))
