"""Does the private order of public corpora agree with the non-private one?

    python -m benchmarks.macro.fred_order                      # IRC nicks, six candidates
    python -m benchmarks.macro.fred_order --embedder minilm

Clients are the nicks of #ubuntu IRC (JAXPFL_DATA), candidates six corpora beside it. For each
unit of privacy the moments are released without noise once, and at (epsilon, delta) in several
trials with fresh noise; the table shows each candidate's distances and in how many trials the
top 3, and the whole order, are the non-private ones. Every trial has a ledger of its own: this
measures a mechanism and is no sequence of releases that anybody should make.
"""

import dataclasses
import tempfile
from pathlib import Path

import tyro

from benchmarks import harness
from jaxpfl.privacy.plan import Unit

CANDIDATES = {
    "nova docs": "public_techdocs_nova/nova_docs.jsonl.gz?client=doc&split=sentences",
    "nova commits": "text_commits_nova/nova_commits.jsonl.gz?split=sentences",
    "wikisplit": "public_wikisplit/wiki_sentences.jsonl.gz",
    "congress": "text_congress_record/congress_speeches.jsonl.gz?split=sentences",
    "presidents": "text_presidents/presidents.jsonl.gz?split=sentences",
    "novels": "public_novels/novels.tar.xz?split=sentences",
}


@dataclasses.dataclass(frozen=True)
class Config:
    private: str = "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz"
    embedder: str = "hashed"
    epsilon: float = 0.6
    delta: float = 2e-6
    trials: int = 5
    candidate_examples: int = 20_000  # drawn from each candidate
    units: tuple[Unit, ...] = ("client", "example")


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(None)
    from jaxpfl.algorithms.fred import FredPlan, score
    from jaxpfl.data import open as open_population
    from jaxpfl.text.embed import embed, embedder

    function = embedder(config.embedder)
    corpora = candidate_moments(function, config.candidate_examples)
    clients = embed(open_population(config.private), function)
    rows = []
    for unit in config.units:
        exact = FredPlan.without_privacy(unit=unit)
        plan = FredPlan.calibrated(epsilon=config.epsilon, delta=config.delta, unit=unit)
        truth = score(release(clients, exact), corpora)
        found = [score(release(clients, plan), corpora) for _ in range(config.trials)]
        order = [each.name for each in truth]
        orders = [[each.name for each in trial] for trial in found]
        summary = {
            "unit": unit,
            "embedder": function.name,
            "epsilon": config.epsilon,
            "delta": config.delta,
            "trials": config.trials,
            "same top 3": sum(trial[:3] == order[:3] for trial in orders),
            "same order": sum(trial == order for trial in orders),
        }
        for rank, each in enumerate(truth, 1):
            scored = [next(x for x in trial if x.name == each.name) for trial in found]
            rows.append(
                {
                    "what": each.name,
                    **summary,
                    "rank": rank,
                    "ranks": " ".join(str(trial.index(each.name) + 1) for trial in orders),
                    "non-private": each.distance,
                    "FreD min": min(x.distance for x in scored),
                    "FreD max": max(x.distance for x in scored),
                    "corrected min": min(x.corrected for x in scored),
                    "corrected max": max(x.corrected for x in scored),
                }
            )
    columns = ["what", "unit", "rank", "ranks", "non-private", "FreD min", "FreD max"]
    harness.table(rows, [*columns, "corrected min", "corrected max", "same top 3", "same order"])
    print(f"recorded in {harness.record('fred_order', rows)}")
    return rows


def candidate_moments(function, examples: int) -> dict:
    """The moments of at most `examples` examples of each candidate, by name."""
    from jaxpfl.algorithms.fred import public_moments
    from jaxpfl.data import open as open_population

    return {
        name: public_moments(sample(open_population(f"$JAXPFL_DATA/{path}"), examples), function)
        for name, path in CANDIDATES.items()
    }


def sample(population, number: int):
    """At most `number` examples, drawn at random, as one client."""
    import numpy as np

    from jaxpfl.data.columns import take
    from jaxpfl.data.population import Population

    total = population.num_examples
    rows = np.random.default_rng(0).permutation(total)[:number]
    columns = {"text": take(population.columns["text"], np.sort(rows))}
    return Population(columns, np.array([0, len(rows)]), ["public"], population.name)


def release(clients, plan):
    """One release on a ledger of its own."""
    from jaxpfl.algorithms.fred import private_moments
    from jaxpfl.privacy import Ledger

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with Ledger(path, clients, unit=plan.unit) as ledger:
            return private_moments(clients, plan, ledger=ledger)


if __name__ == "__main__":
    main(tyro.cli(Config))
