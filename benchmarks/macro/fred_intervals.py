"""How often are FreD's intervals right, and the orders that they claim?

    python -m benchmarks.macro.fred_intervals                       # 200 releases, 64 dimensions
    python -m benchmarks.macro.fred_intervals --embedder hashed:256 --trials 20

Few clients, a real encoder and much noise: `--embedder minilm --clients 7000 --max-examples 3
--candidate-examples 1200 --trials 5`.

Clients are the nicks of #ubuntu IRC (JAXPFL_DATA), candidates those of configs/fred_pipeline.yaml.
Each trial is a release with noise of its own, on a ledger of its own: this measures a mechanism and
is no sequence of releases that anybody should make. A claim is a pair of neighbours in the order of
FreD that are not marked as tied; it is right if the order without noise is the same. "nearest
right" is of the released distance, "by corrected" of the one without the noise's bias, by which
`score` orders candidates. The sweep `sweeps/fred_order` has the same orders in whole runs.
"""

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.config.reader import read_mapping
from jaxpfl.privacy.plan import Unit


@dataclasses.dataclass(frozen=True)
class Config:
    private: str = "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz"
    embedder: str = "hashed:64"
    epsilons: tuple[float, ...] = (0.2, 0.6, 2.0)
    delta: float = 2e-6
    trials: int = 200
    unit: Unit = "client"
    clients: int | None = None  # drawn at random; None takes all
    max_examples: int = 64
    candidate_examples: int = 8_000  # drawn from each candidate


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(None)
    from jaxpfl.algorithms.fred import FredPlan, public_moments, score, used_examples
    from jaxpfl.data import open as open_population
    from jaxpfl.text.embed import embed, embedder

    function = embedder(config.embedder)
    candidates = read_mapping(shipped.find("fred_pipeline"))["fred"]["candidates"]
    corpora = {
        name: public_moments(one_client(open_population(path), config.candidate_examples), function)
        for name, path in candidates.items()
    }
    population = open_population(config.private)
    if config.clients is not None:
        chosen = np.random.default_rng(0).choice(len(population), config.clients, replace=False)
        population = population.select(np.sort(chosen))
    settings = {"unit": config.unit, "max_examples": config.max_examples}
    without_noise = FredPlan.without_privacy(**settings)
    clients = embed(used_examples(population, without_noise, seed=0), function)
    exact_scores = score(release(clients, without_noise), corpora)
    exact = {each.name: each.distance for each in exact_scores}
    rows = []
    for epsilon in config.epsilons:
        plan = FredPlan.calibrated(epsilon=epsilon, delta=config.delta, **settings)
        held = claims = right = all_right = first_right = first_corrected = 0
        error = error_corrected = width = 0.0
        for _ in range(config.trials):
            found = score(release(clients, plan), corpora)
            held += sum(each.low <= exact[each.name] <= each.high for each in found)
            claimed = [
                exact[near.name] < exact[far.name]
                for near, far in itertools.pairwise(found)
                if not near.tied
            ]
            claims, right = claims + len(claimed), right + sum(claimed)
            all_right += all(claimed)
            nearest = min(found, key=lambda each: each.distance)
            first_right += nearest.name == exact_scores[0].name
            first_corrected += found[0].name == exact_scores[0].name
            error += sum(abs(each.distance - exact[each.name]) for each in found)
            error_corrected += sum(abs(each.corrected - exact[each.name]) for each in found)
            width += sum(each.high - each.low for each in found)
        distances = config.trials * len(exact)
        rows.append(
            {
                "what": f"epsilon {epsilon:g}",
                "embedder": function.name,
                **settings,
                "clients": config.clients,
                "delta": config.delta,
                "trials": config.trials,
                "intervals hold": held / distances,
                "claims": claims / (config.trials * (len(exact) - 1)),
                "claims right": right / max(claims, 1),
                "all claims right": all_right / config.trials,
                "nearest right": first_right / config.trials,
                "by corrected": first_corrected / config.trials,
                "error of FreD": error / distances,
                "of corrected": error_corrected / distances,
                "width": width / distances,
            }
        )
    shown = ["what", "trials", "intervals hold", "claims", "claims right", "all claims right"]
    harness.table(
        rows, [*shown, "nearest right", "by corrected", "error of FreD", "of corrected", "width"]
    )
    print(f"recorded in {harness.record('fred_intervals', rows)}")
    return rows


def one_client(population: Any, number: int) -> Any:
    """At most `number` examples, drawn at random, as one client."""
    from jaxpfl.data import Population

    rows = np.sort(np.random.default_rng(0).permutation(population.num_examples)[:number])
    texts = population.columns["text"].to_pylist()
    return Population({"text": [texts[row] for row in rows]}, np.array([0, len(rows)]), ["public"])


def release(clients: Any, plan: Any) -> Any:
    """One release on a ledger of its own."""
    from jaxpfl.algorithms.fred import private_moments
    from jaxpfl.privacy import Ledger

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with Ledger(path, clients, unit=plan.unit) as ledger:
            return private_moments(clients, plan, ledger=ledger)


if __name__ == "__main__":
    main(tyro.cli(Config))
