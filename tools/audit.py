"""Audits the release, and releases that were made worse, with many seeds each.

    python tools/audit.py                    20 seeds; prints a table; exit status 1 if one differs
    python tools/audit.py --seeds 3 "no noise"
    python tools/audit.py --store            appends to benchmarks/results, for docs/auditing.md

The correct release must never be flagged, and each worse one in 9 of 10 audits or more. A worse
release charges what the plan states, and answers with something else: it is made of two releasers,
one that charges and one that answers, so that nothing inside the library is changed.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness
from jaxpfl.data.population import Population
from jaxpfl.federated import Query, Released, Releaser, RunSecret
from jaxpfl.federated.audits.canaries import Game, MakeAsking
from jaxpfl.privacy import Clip, Ledger, Noise, Plan, Poisson
from jaxpfl.privacy.auditing import lower_bound

PLAN = Plan(
    rounds=2,
    clip=Clip(0.5),
    noise=Noise(1.0),
    participation=Poisson(4_000, 2_000),
    delta=1e-5,
)
GAME = Game((PLAN,), canaries=4_000)
RUNS = 2
# More trials for what tells a little more than is stated, or should be close to it.
MORE_RUNS = {"correct": 6, "an uncharged round": 8}

Change = Callable[[Plan], Plan]


class Worse:
    """Charges one releaser, and answers with what `changed` makes of another one's releases."""

    def __init__(self, charged: Releaser, answering: Releaser, secret: RunSecret, change: Change):
        self.charged, self.answering, self.change = charged, answering, change
        words = secret.words_of("reused noise", "tools/audit.py")
        self.normal = np.random.default_rng(words).standard_normal
        self.changed: dict[str, Query] = {}

    def charge(self, query: Query, broadcast: Any, round: int) -> None:
        self.charged.release(query, broadcast, round=round)

    def answer(self, query: Query, broadcast: Any, round: int) -> Released:
        if query.label not in self.changed:
            changed = dataclasses.replace(query, plan=self.change(query.plan))
            self.changed[query.label] = changed
        return self.answering.release(self.changed[query.label], broadcast, round=round)

    def release(
        self,
        query: Query,
        broadcast: Any = (),
        *,
        round: int,
        clip_norm: jax.Array | None = None,
    ) -> Released:
        assert clip_norm is None
        self.charge(query, broadcast, round)
        return self.answer(query, broadcast, round)


class ReusingNoise(Worse):
    """All rounds have the noise of the first."""

    noise: np.ndarray | None = None

    def answer(self, query: Query, broadcast: Any, round: int) -> Released:
        found = super().answer(query, broadcast, round)
        exact = np.asarray(found.value, np.float64)
        if self.noise is None:
            self.noise = query.plan.value_noise_std(query.plan.clip_norm) * self.normal(exact.shape)
        return found._replace(value=(exact + self.noise).astype(np.float32))


class FirstRoundUncharged(Worse):
    """The first round is released without a charge."""

    def charge(self, query: Query, broadcast: Any, round: int) -> None:
        if round > 1:
            super().charge(query, broadcast, round)


def without_noise(plan: Plan) -> Plan:
    return Plan.without_privacy(
        rounds=plan.rounds, participation=plan.participation, clip=plan.clip, unit=plan.unit
    )


def with_less_noise(plan: Plan) -> Plan:
    return dataclasses.replace(plan, noise=Noise(0.1 * plan.noise_multiplier))


def hardly_clipped(plan: Plan) -> Plan:
    """The noise of the plan, and a clip norm that clips no canary."""
    larger = 10 * plan.clip_norm
    noise = Noise(plan.noise_multiplier * plan.clip_norm / larger)
    return dataclasses.replace(plan, clip=Clip(larger), noise=noise)


def sampled_twice_as_often(plan: Plan) -> Plan:
    size = plan.population, 2 * plan.clients_per_round
    return dataclasses.replace(plan, participation=Poisson(*size))


def _made(kind: type[Worse], change: Change) -> MakeAsking:
    @contextmanager
    def asking_of(clients: Population, ledger: Ledger, secret: RunSecret) -> Iterator[Worse]:
        with (
            tempfile.TemporaryDirectory() as folder,
            Ledger(Path(folder) / "not stated.jsonl", clients, unit=ledger.unit) as other,
        ):
            charged = Releaser(clients, ledger, secret, run="charged")
            yield kind(charged, Releaser(clients, other, secret, run="answering"), secret, change)

    return asking_of


WORSE: dict[str, MakeAsking] = {
    "no noise": _made(Worse, without_noise),
    "a tenth of the noise": _made(Worse, with_less_noise),
    "no clip": _made(Worse, hardly_clipped),
    "noise reused between rounds": _made(ReusingNoise, without_noise),
    "twice the sampling rate": _made(Worse, sampled_twice_as_often),
    "an uncharged round": _made(FirstRoundUncharged, lambda plan: plan),
}


class Audited(NamedTuple):
    """The stated epsilon and the lower bound."""

    stated: float
    bound: float

    @property
    def flagged(self) -> bool:
        return self.bound > self.stated


def audited(seed: int, asking_of: MakeAsking | None = None, runs: int = RUNS) -> Audited:
    """Plays a game and bounds its epsilon, at 99 % confidence."""
    played = GAME.play(runs, seed=seed, asking_of=asking_of)
    found = lower_bound(played.trials, played.stated)
    return Audited(played.stated.epsilon(), found.epsilon)


def main() -> int:
    from tools.audits import worse_table

    parser = argparse.ArgumentParser(
        description="Audits the release, and ones that were made worse."
    )
    parser.add_argument("--seeds", type=int, default=20, help="audits of each (default: 20)")
    parser.add_argument(
        "--store", action="store_true", help="append to benchmarks/results/audits.jsonl"
    )
    parser.add_argument("names", nargs="*", help="of releases (default: all)")
    arguments = parser.parse_args()
    seeds, names = arguments.seeds, arguments.names or ["correct", *WORSE]
    print(f"{seeds} audits each; the plan has {PLAN.statement()}")
    print(worse_table([]), flush=True)
    wrong = False
    for name in names:
        asking_of, runs = WORSE.get(name), MORE_RUNS.get(name, RUNS)
        began = time.process_time()
        found = [audited(seed, asking_of, runs) for seed in range(seeds)]
        flagged = sum(each.flagged for each in found)
        bounds = [each.bound for each in found]
        wrong |= flagged > 0 if name == "correct" else flagged < 0.9 * seeds
        row = {
            "audit": "worse",
            "release": name,
            "seeds": seeds,
            "first_seed": 0,
            "runs": runs,
            "trials": runs * GAME.canaries,
            "epsilon": found[0].stated,
            "delta": PLAN.delta,
            "least": min(bounds),
            "largest": max(bounds),
            "flagged": flagged,
            "bounds": bounds,
            "cpu_s": round(time.process_time() - began, 1),
        }
        if arguments.store:
            harness.record("audits", [row])
        print(worse_table([row]).splitlines()[-1], f"{row['cpu_s']:.0f} s", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
