"""What noise of clients' own costs, by a formula of its own: Balle and Wang 2018, Theorem 8."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from scipy import optimize, special

from jaxpfl.privacy import AdaptiveClip, Clip, Noise, Plan, participation
from jaxpfl.privacy.local_trust import of_sums
from tests.plans import OWN
from tests.refusals import refusal

DELTA = 1e-5
N, TAKEN = 1_000, 100


def gaussian_epsilon(mu: float) -> float:
    """Epsilon at DELTA of one Gaussian whose sum moves by mu deviations; float64."""

    def excess(epsilon: float) -> float:
        # Both terms by logarithms, because exp(epsilon) overflows.
        first = special.log_ndtr(mu / 2 - epsilon / mu)
        second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
        return first + math.log1p(-min(math.exp(second - first), 1 - 1e-16)) - math.log(DELTA)

    if excess(0.0) <= 0:
        return 0.0
    found: Any = optimize.brentq(excess, 0.0, mu * mu + 20 * mu + 1, xtol=1e-12)
    return float(found)


def most_rounds(of, rounds: int) -> int:
    """In how many rounds a client can take part, whatever is drawn, by trying every way."""
    gap = {"cyclic": N // TAKEN, "min_separation": 3, "cyclic_poisson": 3}.get(of.sampling, 1)
    taken, last = 0, -gap
    for round in range(rounds):
        if round - last >= gap:
            taken, last = taken + 1, round
    return taken


def local(kind: str, rounds: int, z: float, **changes) -> Plan:
    of = participation.of(kind, N, TAKEN, **OWN.get(kind, {}))  # pyright: ignore
    noise = Noise(z, trust="local")
    fields = dict(rounds=rounds, clip=Clip(0.3), noise=noise, participation=of, delta=DELTA)
    return Plan(**{**fields, **changes})


@pytest.mark.parametrize(
    ("kind", "rounds", "of_one"), [*itertools.product(participation.KINDS, (1, 7, 400), (0.7, 4.0))]
)
def test_what_messages_and_sums_cost(kind, rounds, of_one):
    """36 plans: a client's messages move by 2 S, and nothing is amplified."""
    plan = local(kind, rounds, of_one * math.sqrt(TAKEN))
    times = most_rounds(plan.participation, rounds)
    exact = gaussian_epsilon(2 / of_one * math.sqrt(times))
    assert exact * (1 - 1e-9) <= plan.epsilon() <= exact * (1 + 1e-3) + 1e-4
    assert plan.guarantee().adjacency == plan.adjacency == "replace_one"
    sums = of_sums(plan)
    # A cohort whose size varies leaves less noise than it might, and some draws leave none.
    assert (sums is not None) == (kind in ("fixed", "min_separation"))
    if sums is not None:
        exact = gaussian_epsilon(math.sqrt(times / TAKEN) / of_one)
        assert exact * (1 - 1e-9) <= sums.epsilon() <= exact * (1 + 1e-3) + 1e-4
        assert sums.adjacency == "zero_out_one"
    assert Plan.from_dict(plan.to_dict()) == plan


def test_everyone_is_a_fixed_number_of_clients():
    plan = local("poisson", 3, 8.0, participation=participation.Poisson(64, 64), delta=1e-5)
    sums = of_sums(plan)
    assert sums is not None
    assert sums.epsilon() == pytest.approx(gaussian_epsilon(math.sqrt(3) / 8), rel=1e-3)


def test_calibrated_noise_meets_the_epsilon_of_messages():
    plan = local("min_separation", 20, 1.0)
    found = Plan.calibrated(
        epsilon=4.0, delta=DELTA, rounds=20, clip=plan.clip, participation=plan.participation,
        noise=Noise(1.0, trust="local"),
    )  # fmt: skip
    assert 3.99 < found.epsilon() <= 4.0
    assert found.statement().startswith("LOCAL NOISE")
    central = dataclasses.replace(found, noise=Noise(found.noise_multiplier))
    assert central.epsilon() < found.epsilon()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": Clip(1.0, AdaptiveClip())}, "constant clip norm"),
        ({"unit": "example"}, "unit 'client'"),
    ],
)
def test_what_clients_cannot_add_is_refused(changes, words):
    refusal(lambda: local("poisson", 3, 1.0, **changes), words)


@pytest.mark.parametrize("kind", ["exact", "banded", "exact_banded", "blt", "tree"])
def test_clients_add_independent_noise_alone(kind):
    refusal(lambda: Noise(1.0, kind, trust="local"), f"trust 'local' independent '{kind}'")
    refusal(lambda: Noise(1.0, trust="nobody"), "trust central local nobody")  # pyright: ignore
