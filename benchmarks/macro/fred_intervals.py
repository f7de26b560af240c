"""How often are FreD's intervals right, and the orders that they claim?

    python -m benchmarks.macro.fred_intervals                       # 200 releases, 64 dimensions
    python -m benchmarks.macro.fred_intervals --embedder hashed:256 --trials 20

Clients and candidates are those of `fred_order`. Each trial is a release with noise of its own. A
claim is a pair of neighbours in the order of FreD that are not marked as tied; it is right if the
order without noise is the same. As there, every trial has a ledger of its own: this measures a
mechanism and is no sequence of releases that anybody should make.
"""

import dataclasses
import itertools

import tyro

from benchmarks import harness
from benchmarks.macro.fred_order import CANDIDATES, release, sample
from jaxpfl.privacy.plan import Unit


@dataclasses.dataclass(frozen=True)
class Config:
    private: str = "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz"
    embedder: str = "hashed:64"
    epsilons: tuple[float, ...] = (0.2, 0.6, 2.0)
    delta: float = 2e-6
    trials: int = 200
    unit: Unit = "client"
    candidate_examples: int = 8_000  # drawn from each candidate


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(None)
    from jaxpfl.algorithms.fred import FredPlan, public_moments, score
    from jaxpfl.data import open as open_population
    from jaxpfl.text.embed import embed, embedder

    function = embedder(config.embedder)
    corpora = {}
    for name, path in CANDIDATES.items():
        corpus = sample(open_population(f"$JAXPFL_DATA/{path}"), config.candidate_examples)
        corpora[name] = public_moments(corpus, function)
    clients = embed(open_population(config.private), function)
    exact_scores = score(release(clients, FredPlan.without_privacy(unit=config.unit)), corpora)
    exact = {each.name: each.distance for each in exact_scores}
    rows = []
    for epsilon in config.epsilons:
        plan = FredPlan.calibrated(epsilon=epsilon, delta=config.delta, unit=config.unit)
        held = claims = right = all_right = first_right = 0
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
            first_right += found[0].name == exact_scores[0].name
            error += sum(abs(each.distance - exact[each.name]) for each in found)
            error_corrected += sum(abs(each.corrected - exact[each.name]) for each in found)
            width += sum(each.high - each.low for each in found)
        distances = config.trials * len(exact)
        rows.append(
            {
                "what": f"epsilon {epsilon:g}",
                "embedder": function.name,
                "unit": config.unit,
                "delta": config.delta,
                "trials": config.trials,
                "intervals hold": held / distances,
                "claims": claims / (config.trials * (len(exact) - 1)),
                "claims right": right / max(claims, 1),
                "all claims right": all_right / config.trials,
                "nearest right": first_right / config.trials,
                "error of FreD": error / distances,
                "of corrected": error_corrected / distances,
                "width": width / distances,
            }
        )
    shown = ["what", "trials", "intervals hold", "claims", "claims right", "all claims right"]
    harness.table(rows, [*shown, "nearest right", "error of FreD", "of corrected", "width"])
    print(f"recorded in {harness.record('fred_intervals', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
