"""Choosing of single public texts by one release: seconds and memory by the size of the pool.

    python -m benchmarks.micro.choosing
    python -m benchmarks.micro.choosing --pools 20000 200000 1000000

The embeddings are MADE UP: unit vectors of dimension 384 whose spectrum falls as a sentence
encoder's does, in six corpora with means of their own; the clients' lie between two of them. The
release is real, through the door and a ledger: 10,000 clients at epsilon 7. `seconds` is `choose`
alone, embedding is not in it (`python -m benchmarks embed`); `cpu s` adds the threads. `peak MB` is
the process's, with the embeddings (`pool MB`). `evaluations` are of the dual, over all kappas.
"""

import dataclasses
import tempfile
import time

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    pools: tuple[int, ...] = (20_000, 200_000)  # ascending, since the peak is the process's
    texts: int = 1_000
    clients: int = 10_000
    dimension: int = 384
    epsilon: float = 7.0


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(1)
    import numpy as np

    from jaxpfl.algorithms.chosen_texts import Evidence, choose, matching
    from jaxpfl.algorithms.fred import FredPlan, private_moments
    from jaxpfl.data import from_clients
    from jaxpfl.privacy import Ledger

    generator = np.random.default_rng(0)
    means = generator.standard_normal((6, config.dimension)) / np.sqrt(config.dimension)
    scales_D = 2.0 / np.sqrt(1 + np.arange(config.dimension))

    def made_up(number: int, mean_D: np.ndarray) -> np.ndarray:
        rows_NxD = np.float32(mean_D) + generator.standard_normal(
            (number, config.dimension), np.float32
        ) * np.float32(scales_D / np.linalg.norm(scales_D))
        return rows_NxD / np.linalg.norm(rows_NxD, axis=1, keepdims=True)

    private_NxD = made_up(config.clients, (means[0] + means[1]) / 2)
    clients = from_clients({f"{i}": {"embedding": row[None]} for i, row in enumerate(private_NxD)})
    plan = FredPlan.calibrated(epsilon=config.epsilon, delta=1 / (10 * config.clients))
    with tempfile.TemporaryDirectory() as folder, Ledger(f"{folder}/l.jsonl", clients) as ledger:
        released = private_moments(clients, plan, ledger=ledger)

    evaluations, dual = [0], matching.MomentMatching.dual

    def counted(self, parameters, kappa):
        evaluations[0] += 1
        return dual(self, parameters, kappa)

    matching.MomentMatching.dual = counted
    rows = []
    for pool in config.pools:
        sizes = np.diff(np.linspace(0, pool, len(means) + 1).astype(int))
        pool_NxD = np.concatenate(
            [made_up(size, mean_D) for size, mean_D in zip(sizes, means, strict=True)]
        )
        names_N = np.repeat([f"corpus {i}" for i in range(len(means))], sizes)
        evaluations[0], start, cpu = 0, time.perf_counter(), time.process_time()
        choice = choose([Evidence(released, pool_NxD)], names_N, config.texts)
        rows.append(
            {
                "what": "choose",
                "pool": pool,
                "seconds": time.perf_counter() - start,
                "cpu s": time.process_time() - cpu,
                "peak MB": harness.peak_memory_mb(),
                "pool MB": pool_NxD.nbytes / 1e6,
                "evaluations": evaluations[0],
                "kappa": choice.kappa,
                "mixture distance": choice.mixture_distance,
                "distance": choice.distance,
                **{k: v for k, v in dataclasses.asdict(config).items() if k != "pools"},
            }
        )
    shown = ["pool", "seconds", "cpu s", "peak MB", "pool MB", "evaluations", "kappa", "distance"]
    harness.table(rows, shown)
    print(f"recorded in {harness.record('choosing', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
