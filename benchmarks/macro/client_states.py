"""What states that clients keep between rounds cost: a round with and without, and a large store.

    python -m benchmarks.macro.client_states

A round: 50 clients of 100 made-up images train the EMNIST CNN; with a state, each also keeps 100 kB
of float32, which it gets, moves and gives back. Rounds with and without take turns. The store: one
record of 100 kB for each of 342,477 clients, of whom 200 random ones a round are read, written and
saved, as a run does; the file is sparse.
"""

import dataclasses
import pathlib
import resource
import tempfile
import time

import numpy as np
import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    state: int = 25_000  # float32 numbers
    rounds: int = 12
    cohort: int = 50
    clients: int = 342_477
    asked: int = 200
    store_rounds: int = 50
    devices: int | None = None  # virtual CPU devices; default one a core


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    rows = [store(config), *rounds(config)]
    for row in rows:
        print(row)
    print(harness.record("client_states", rows))
    return rows


def rounds(config: Config) -> list[dict]:
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from jaxpfl.federated import LocalTraining, Releaser, RunSecret
    from jaxpfl.privacy import Ledger

    @dataclasses.dataclass(frozen=True)
    class Remembering(LocalTraining):
        def client_state(self, params):
            return jnp.zeros(config.state, jnp.float32)

        def init(self, params, kept, key):
            return super().init(params, key), kept

        def step(self, params, state, batch, mask, key):
            return super().step(params, state[0], batch, mask, key), state[1] + 1

        def finish(self, params, state):
            return super().finish(params, state[0])

        def keep(self, params, state, sent):
            return state[1]

    rng = np.random.default_rng(0)
    number = 4 * config.cohort
    clients = jp.data.from_clients(
        {
            f"{client}": {
                "image": rng.random((100, 28, 28, 1), np.float32),
                "label": rng.integers(0, 62, 100).astype(np.int32),
            }
            for client in range(number)
        }
    )
    model, sgd = jp.models.emnist_cnn(), optax.sgd(0.1)
    plan = jp.Plan.without_privacy(
        rounds=config.rounds + 1, clip=jp.Clip(1.0), participation=jp.Poisson(number, config.cohort)
    )
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name, kind in (("without", LocalTraining), ("with", Remembering)):
            algorithm = jp.algorithms.fed_avg(
                model, client=kind(model, sgd), server=optax.sgd(1.0), plan=plan,
                cohort=jp.CohortSpec(20, 100),
            )  # fmt: skip
            place = pathlib.Path(folder) / name
            ledger = Ledger(place / "ledger.jsonl", clients)
            releaser = Releaser(
                clients, ledger, RunSecret.reproducible(0), run=name, name=name,
                queries=algorithm.queries, states=(place / "states", 0),
            )  # fmt: skip
            running[name] = algorithm, releaser, algorithm.init(jax.random.key(0))
        for round in range(1, config.rounds + 2):
            for name, (algorithm, releaser, state) in list(running.items()):
                began = time.perf_counter()
                state, _ = releaser.step(algorithm.step, state, round)
                jax.block_until_ready(state)
                for states in releaser.client_states:
                    states.sync()
                if round > 1:
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
                running[name] = algorithm, releaser, state
    medians = {name: float(np.median(found)) for name, found in seconds.items()}
    ratios = np.array(seconds["with"]) / np.array(seconds["without"])
    shared = {"cohort": config.cohort, "bytes": 4 * config.state}
    return [
        {"what": f"round {name} states", **shared, "seconds": found}
        for name, found in medians.items()
    ] + [{"what": "ratio of rounds in turn, median", **shared, "ratio": float(np.median(ratios))}]


def store(config: Config) -> dict:
    import jax

    from jaxpfl.federated.release.client_states import ClientStates

    rng = np.random.default_rng(0)
    like = jax.ShapeDtypeStruct((config.state,), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        ids = [str(client) for client in range(config.clients)]
        states, seconds = ClientStates((place, 0, b"key"), ids, like), []
        for round in range(1, config.store_rounds + 1):
            chosen = rng.choice(config.clients, config.asked, replace=False)
            began = time.perf_counter()
            held, _ = states.rows(chosen)
            states.write(round, chosen, held + 1)
            states.sync()
            seconds.append(time.perf_counter() - began)
            states.forget(round - 1)
        rows = place / "rows"
        return {
            "what": "store",
            "clients": config.clients,
            "bytes": 4 * config.state,
            "a round": config.asked,
            "seconds a round": float(np.median(seconds)),
            "largest GB": rows.stat().st_size / 1e9,
            "on disk GB": sum(each.stat().st_blocks for each in place.iterdir()) * 512 / 1e9,
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }


if __name__ == "__main__":
    main(tyro.cli(Config))
