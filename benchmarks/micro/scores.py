"""Scores of candidates by clients: the releaser against other programs that make the same sum.

    python -m benchmarks.micro.scores
    python -m benchmarks.micro.scores --torch PYTHON
    python -m benchmarks.micro.scores --clients 10000 --only release votes

One round at the size of POPri's: 1,000 clients, 1,800 prompts of 10 responses, 384 dimensions.

    loop, numpy            per client: the cosines of all candidates with each of its texts, their
                           mean over the texts, centred per prompt, scaled, added; then noise
    loop over means        the same with the mean taken first: cosines with one vector a client
    all means at once      the same for all clients in one matrix [clients, candidates]
    Gram, PyTorch          no client's scores are formed: see `scores_against`. PYTHON is the
                           interpreter (or its environment's folder) of an installation of PyTorch
    release                `Scorer.release`, whole: identified, charged to the ledger on the disk,
                           sampled, packed, summed, noised, expanded, recorded
    release, scores only   the same round made again, which is charged nothing

    votes                  `release` of the nearest-neighbour histogram of the clients' texts

All begin with raw embeddings of the candidates. The clients' normalised embeddings and their means
do not change from round to round and are made before. The programs take turns, with a pause before
each, in which threads that still look for work of the one before go to sleep. `seconds` is the best
turn; `cpu s` the least processor time of a turn, of all threads. `memory MB` is how far the
process's memory rose in the first call, compilation included (Linux); each runs in a process of its
own.
"""

import dataclasses
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.peer import Peer, check

TORCH = "Gram, PyTorch"
CHILD = Path(__file__).with_name("scores_against.py")
NOISE = 3.35


@dataclasses.dataclass(frozen=True)
class Config:
    clients: int = 1000
    texts: int = 8  # of each client
    prompts: int = 1800
    responses: int = 10
    dimension: int = 384
    repeats: int = 5
    devices: int | None = None  # virtual CPU devices; default one a core
    torch: Path | None = None
    only: tuple[str, ...] = ()  # of the programs, by name; default all


def main(config: Config) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    names = config.only or (*NAMES, *([TORCH] if config.torch else []))
    memory = {}
    for name in names:
        if name != TORCH:
            with context.Pool(1) as pool:
                memory[name] = pool.apply(growth, (config, name))
    with programs(config) as functions, ExitStack() as stack:
        if TORCH in names:
            torch = stack.enter_context(closing(peer(config)))
            functions[TORCH] = lambda: harness.Elsewhere(torch.turn())
        turns = harness.turns({name: functions[name] for name in names}, config.repeats)
    best = {name: min(turn.seconds for turn in found) for name, found in turns.items()}
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k != "torch"}
    rows = [
        {
            "what": name,
            "seconds": best[name],
            "median": statistics.median(turn.seconds for turn in found),
            "cpu s": min(turn.cpu_seconds for turn in found),
            **{
                f"times the {short}": best[other] / best[name]
                for short, other in (("loop", "loop, numpy"), ("release", "release"))
                if other in best
            },
            **({"memory MB": memory[name]} if name in memory else {}),
            **settings,
        }
        for name, found in turns.items()
    ]
    columns = ["what", "seconds", "median", "cpu s", "times the loop", "times the release"]
    harness.table(rows, [*columns, "memory MB"])
    print(f"recorded in {harness.record('scores', rows)}")
    return rows


NAMES = (
    "loop, numpy",
    "loop over means",
    "all means at once",
    "release",
    "release, scores only",
    "votes",
)


def peer(config: Config) -> Peer:
    """The program in PyTorch, which must find the same sum as ours does without noise."""
    if config.torch is None:
        raise SystemExit(f"{TORCH!r} needs --torch PYTHON")
    from jaxpfl.federated.clients.scores import mean_embeddings

    candidates_KxJxD, texts_NxD, offsets = drawn(config)
    means_CxD = mean_embeddings(texts_NxD, offsets)
    arrays = {"candidates": candidates_KxJxD, "means": means_CxD, "noise": np.float32(NOISE)}
    found = Peer(config.torch, CHILD, arrays)
    expected = np.linalg.norm(all_at_once(unit_rows(candidates_KxJxD), means_CxD))
    check("the norm of the sum in PyTorch", found.hello["norm"], float(expected), 1e-4)
    return found


def drawn(config: Config) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates [prompts, responses, d], texts [clients * texts, d] and the clients' offsets."""
    rng = np.random.default_rng(0)
    candidates_KxJxD = rng.standard_normal(
        (config.prompts, config.responses, config.dimension), np.float32
    )
    texts_NxD = rng.standard_normal((config.clients * config.texts, config.dimension), np.float32)
    return candidates_KxJxD, texts_NxD, np.arange(config.clients + 1) * config.texts


def unit_rows(candidates_KxJxD: np.ndarray) -> np.ndarray:
    return candidates_KxJxD / np.linalg.norm(candidates_KxJxD, axis=2, keepdims=True)


def all_at_once(units_KxJxD: np.ndarray, means_CxD: np.ndarray) -> np.ndarray:
    """The sum of all clients' scores, by way of the scores of each."""
    units_MxD = units_KxJxD.reshape(-1, units_KxJxD.shape[2])
    scores_CxKxJ = (means_CxD @ units_MxD.T).reshape(-1, *units_KxJxD.shape[:2])
    scores_CxKxJ -= scores_CxKxJ.mean(axis=2, keepdims=True)
    norms_C = np.linalg.norm(scores_CxKxJ.reshape(len(means_CxD), -1), axis=1)
    return np.tensordot((1 / norms_C).astype(np.float32), scores_CxKxJ, 1)


def growth(config: Config, name: str) -> float:
    """MB by which memory rises above where it is, at most, in the first call of one program."""
    with programs(config) as functions:
        # Linux: starts the peak anew, which the making of the data has driven up.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_mb("VmRSS")
        functions[name]()
        return resident_mb("VmHWM") - before


def resident_mb(field: str) -> float:
    """A line of the process's status: VmRSS is the resident memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


@contextmanager
def programs(config: Config) -> Iterator[dict[str, Callable[[], object]]]:
    """The programs over one set of clients and candidates, but that of the peer."""
    harness.use_cpu_devices(config.devices)
    from jaxpfl import Clip, Noise, Plan, Poisson
    from jaxpfl.algorithms import Scorer
    from jaxpfl.data import Population
    from jaxpfl.federated import Releaser, RunSecret
    from jaxpfl.federated.clients.scores import mean_embeddings
    from jaxpfl.privacy import Ledger

    rng = np.random.default_rng(1)
    candidates_KxJxD, texts_NxD, offsets = drawn(config)
    shape = candidates_KxJxD.shape
    names = [str(client) for client in range(config.clients)]
    clients = Population({"embedding": texts_NxD}, offsets, names)
    plan = Plan(
        rounds=100_000,
        clip=Clip(1.0),
        noise=Noise(NOISE),
        participation=Poisson(config.clients, config.clients),
        delta=3e-6,
    )
    means_CxD = mean_embeddings(texts_NxD, offsets)
    units_NxD = texts_NxD / np.linalg.norm(texts_NxD, axis=1, keepdims=True)
    units_CxTxD = units_NxD.reshape(config.clients, config.texts, -1)
    rounds = iter(range(2, plan.rounds))

    def noise() -> np.ndarray:
        return NOISE * rng.standard_normal(shape[:2], np.float32)

    def loop(scores_of: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
        units_MxD = unit_rows(candidates_KxJxD).reshape(-1, config.dimension)
        total_KxJ = np.zeros(shape[:2], np.float32)
        for client in range(config.clients):
            score_KxJ = scores_of(units_MxD, client).reshape(shape[:2])
            score_KxJ -= score_KxJ.mean(axis=1, keepdims=True)
            norm = np.linalg.norm(score_KxJ)
            total_KxJ += score_KxJ / norm if norm else 0.0
        return total_KxJ + noise()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        linear = Scorer(plan)
        votes = Scorer(plan, kind="nn_histogram", max_texts=config.texts)
        queries = (linear.query, votes.query)
        with Ledger(path, clients) as ledger:
            releaser = Releaser(clients, ledger, RunSecret(), run="benchmark", queries=queries)

            def scored(scorer: Scorer, round: int) -> np.ndarray:
                def step(state, release, round):
                    return scorer.release(release, candidates_KxJxD, round), {}

                scores_KxJ, _ = releaser.step(step, None, round)
                return scores_KxJ

            yield {
                "loop, numpy": lambda: loop(
                    lambda units, i: (units @ units_CxTxD[i].T).mean(axis=1)
                ),
                "loop over means": lambda: loop(lambda all, i: all @ means_CxD[i]),
                "all means at once": lambda: (
                    all_at_once(unit_rows(candidates_KxJxD), means_CxD) + noise()
                ),
                "release": lambda: scored(linear, next(rounds)),
                "release, scores only": lambda: scored(linear, 1),
                "votes": lambda: scored(votes, next(rounds)),
            }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
