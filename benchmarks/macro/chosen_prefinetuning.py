"""FreD's three stages, then: which texts to prefinetune on, if private rounds follow?

    JAXPFL_DATA=... python -m benchmarks.macro.chosen_prefinetuning irc --repetitions 3

    release      the moments of the clients' embeddings, for 2 of epsilon 8
    prefinetune  a GPT-2 of 0.9 M, pretrained on Wikipedia alone, on 2,500 texts of an arm
    DP-FedAvg    10 rounds of 500 clients, with what is left of epsilon 8: one ledger has it all

The noise is real. Clients, pool, cut and the arms nearest, mixture and chosen are those of
`chosen_texts`; the arm "none" has no second stage, and all of epsilon 8 has been kept for it as for
the others. The arms of a repetition share people and release, and each has a copy of its ledger:
they are alternatives. Held-out people, DECLARED PUBLIC, measure; no arm saw that. No setting was
tried on these clients.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro

from benchmarks import harness
from benchmarks.macro import chosen_texts
from benchmarks.macro.judged_texts import FINE_TUNING, TOKENS, Judge
from jaxpfl.algorithms.base import releaser_of, run_rounds
from jaxpfl.algorithms.fed_avg import fed_avg
from jaxpfl.algorithms.fred import FredPlan, private_moments
from jaxpfl.data import Population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.experiments.central.public_models import data_mesh
from jaxpfl.experiments.central.training import fit
from jaxpfl.privacy import Budget, Ledger
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.tokenisers.base import text_rows

EPSILON, OF_FRED = 8.0, 2.0
TEXTS, ROUNDS, COHORT, CLIP = 2_500, 10, 500, 0.3
ARMS = ("none", "nearest", "mixture", "chosen")


def rounds(clients: Population, judge: Judge, start: Any, prior: Any, ledger: Ledger) -> Any:
    """The parameters after DP-FedAvg from `start`, by what the budget has left after `prior`."""
    budget = ledger.recorded_budget
    assert budget is not None
    plan = Plan.calibrated(
        epsilon=budget.epsilon,
        delta=budget.delta,
        rounds=ROUNDS,
        clip=Clip(CLIP),
        participation=Poisson(len(clients), min(COHORT, len(clients))),
        prior_releases=prior,
    )
    algorithm = fed_avg(
        judge.model.model,
        client=optax.sgd(0.3),
        server=optax.sgd(1.0, momentum=0.9, nesterov=True),
        plan=plan,
        cohort=CohortSpec(batch_size=8, max_examples=chosen_texts.MOST_SPANS),
        start=start,
    )
    return run_rounds(algorithm, releaser_of(algorithm, clients, ledger), jax.random.key(0)).params


def main(
    clients: tyro.conf.Positional[Literal["congress", "irc", "commits", "pubmed"]],
    repetitions: int = 3,
    cache: Path = Path("runs/chosen_texts"),
) -> None:
    """Appends a row for each arm and repetition.

    Args:
      clients: whose texts.
      cache: of embeddings and of the model.
    """
    everyone, ids = chosen_texts.people(clients, cache)
    pool = chosen_texts.pool_of(clients, cache, 3_000)
    for seed in range(repetitions):
        train, rest = chosen_texts.divided(ids, np.random.default_rng(100 + seed))
        train, held_out = everyone.select(train), everyone.select(rest)
        judge = Judge(held_out, cache, seed)
        tokens = text_rows(judge.model.tokeniser, train.columns["text"].to_pylist(), TOKENS)
        train = train.with_columns({"embedding": train.column("embedding"), "tokens": tokens})
        delta = min(chosen_texts.DELTA, chosen_texts.SHARE / len(train))
        most = chosen_texts.MOST_SPANS
        fred = FredPlan.calibrated(epsilon=OF_FRED, delta=delta, max_examples=most)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "released"
            with Ledger(made / "ledger.jsonl", train, budget=Budget(EPSILON, delta)) as ledger:
                released = private_moments(train, fred, ledger=ledger, run="FreD")
            drawn = chosen_texts.arms(released, pool.names_N, pool.rows_NxD, TEXTS, seed)
            rows = []
            for arm in ARMS:
                start = judge.model.params
                if arm != "none":
                    texts = [pool.texts[row] for row in drawn[arm][0]]
                    corpus = {"tokens": text_rows(judge.model.tokeniser, texts, TOKENS)}
                    mesh = data_mesh(FINE_TUNING.batch_size)
                    model = judge.model.model
                    start = fit(model, start, corpus, FINE_TUNING, seed=seed, mesh=mesh).params
                own = shutil.copytree(made, Path(folder) / arm)
                with Ledger(own / "ledger.jsonl", train) as ledger:
                    after = rounds(train, judge, start, fred.guarantee().event, ledger)
                    spent = ledger.spent(delta)
                before, after = judge.evaluated(start), judge.evaluated(after)
                rows.append(
                    {
                        "what": f"{clients}, three stages",
                        "train": len(train),
                        "unit": chosen_texts.unit_of(clients),
                        "seed": seed,
                        "prefinetuned on": arm,
                        "texts": TEXTS,
                        "rounds": ROUNDS,
                        "cohort": min(COHORT, len(train)),
                        "epsilon": spent,
                        "of FreD": OF_FRED,
                        "noise": "real",
                        "prefinetuned perplexity": float(np.exp(before["loss"])),
                        "prefinetuned accuracy": before["accuracy"],
                        "perplexity": float(np.exp(after["loss"])),
                        "accuracy": after["accuracy"],
                    }
                )
                shown = ("prefinetuned on", "prefinetuned perplexity", "perplexity", "accuracy")
                harness.table(rows[-1:], list(shown))
            print(harness.record("chosen_prefinetuning", rows), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
