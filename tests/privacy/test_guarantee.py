"""What releases cost together, and when a second accountant agrees."""

import dataclasses
import math

import dp_accounting
import pytest

from jaxpfl.privacy import Guarantee, Ledger, accounting, confirmation, events, guarantee_of
from jaxpfl.privacy.certificate import certificate
from jaxpfl.privacy.ledger import Charge, together
from tests.plans import FIELDS, epsilon_of, flat_plan
from tests.privacy.ledgers import CLIENTS, GAUSSIAN, charge, fixed, poisson, truncated
from tests.refusals import refusal


def test_a_guarantee_of_charges_is_that_of_their_composition():
    """TRUST 29: charges of a run in a ledger, in any order; forgetting one shows."""
    plan = flat_plan(**FIELDS)
    other = dp_accounting.GaussianDpEvent(5.0)
    charges = [Charge("run", "a", n, plan.charge_event(), f"a {n}") for n in range(1, 11)]
    charges.insert(3, Charge("run", "b", 1, other, "b"))
    found = guarantee_of(charges, plan.delta)
    expected = epsilon_of(
        dp_accounting.ComposedDpEvent([other, plan.event()]), 1e-5, "pld", "add_or_remove_one"
    )
    assert found.epsilon() == expected > 1.01 * plan.epsilon()
    assert found.statement() == plan.statement().replace(
        accounting.rounded_up(plan.epsilon()), accounting.rounded_up(expected)
    )
    assert found.confirmed_epsilon() == pytest.approx(expected, rel=1e-3)
    assert guarantee_of([], 1e-5).epsilon() == guarantee_of([], 1e-5).confirmed_epsilon() == 0.0
    without = guarantee_of(
        [*charges, Charge("run", "c", 1, dp_accounting.NonPrivateDpEvent(), "c")], 0
    )
    assert without.epsilon() == without.confirmed_epsilon() == math.inf
    assert without.statement() == "NOT PRIVATE: no noise, epsilon = infinity, unit = client"


def test_a_guarantee_of_fixed_cohorts_is_under_replace_one():
    """A round that was released again is part of it; Poisson rounds are not."""
    fixed, poisson = flat_plan(**FIELDS, sampling="fixed"), flat_plan(**FIELDS)
    found = Guarantee.of_events([fixed.event(), fixed.released_again_event()], 1e-5)
    assert (found.adjacency, found.accountant) == ("replace_one", "rdp")
    assert found.epsilon() > fixed.epsilon()
    refusal(lambda: Guarantee.of_events([fixed.event(), poisson.event()], 1e-5), "no common")
    refusal(lambda: Guarantee.of_events([fixed.event()], 0.0), "delta")


def test_the_exact_formula_is_named():
    everyone = flat_plan(**FIELDS | {"clients_per_round": 1000})
    assert everyone.statement().endswith("accountant = exact Gaussian")
    assert everyone.epsilon() == pytest.approx(everyone.guarantee().confirmed_epsilon(), rel=1e-9)
    assert dataclasses.replace(everyone, accountant="rdp").statement().endswith("= RDP")


EVENTS = {
    "Gaussians": [GAUSSIAN(3.0), GAUSSIAN(5.0)],
    "Poisson rounds of two kinds": [poisson(0.05, 1.5)] * 9 + [poisson(0.3, 4.0), GAUSSIAN(8.0)],
    "fixed-size rounds of two kinds": [fixed(100, 10, 2.0)] * 3 + [fixed(100, 20, 3.0)],
    "a fixed-size round, replayed": [fixed(100, 10, 2.0), fixed(100, 100, 2.0)],
    "truncated Poisson rounds, and others": [truncated(1000, 0.05, 70, 1.5)] * 9 + [GAUSSIAN(8.0)],
    "rounds that are often cut": [truncated(100, 0.1, 12, 2.0)] * 5,
    "secure sums": [dp_accounting.ZCDpEvent(0.02, 1e-3), GAUSSIAN(8.0)],
}


EVENTS_FIXED = fixed(100, 10, 2.0)


def second_accountant(monkeypatch, factor: float) -> None:
    """The second accountant finds `factor` times as much, everywhere."""
    for name in ("poisson_epsilon", "renyi_epsilon"):
        real = getattr(confirmation, name)
        monkeypatch.setattr(confirmation, name, lambda *a, real=real, **k: factor * real(*a, **k))


@pytest.mark.parametrize("releases", EVENTS.values(), ids=EVENTS)
def test_a_stated_epsilon_is_that_of_two_accountants(releases, monkeypatch):
    """Of every kind, and of several: the larger one, and none where they are apart."""
    found = Guarantee.of_events(releases, 1e-5)
    alone = epsilon_of(found.event, 1e-5, found.accountant, found.adjacency)
    assert found.confirmed_epsilon() == pytest.approx(alone, rel=2e-4)
    assert found.epsilon() == pytest.approx(max(alone, found.confirmed_epsilon()), rel=1e-9)
    assert "one accountant" not in found.statement()
    with monkeypatch.context() as patch:
        second_accountant(patch, 1.0007)
        assert found.epsilon() == found.confirmed_epsilon() > alone * 1.0004
    for factor in (0.998, 1.002):
        with monkeypatch.context() as patch:
            second_accountant(patch, factor)
            for state in (found.epsilon, found.statement):
                refusal(state, "disagree")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_looser_bound_only_checks(accountant, monkeypatch):
    """It does not raise what is stated, and is never below epsilon itself."""
    found = Guarantee.of_events(EVENTS["Poisson rounds of two kinds"], 1e-5, accountant=accountant)
    by_pld, by_rdp = (dataclasses.replace(found, accountant=name) for name in ("pld", "rdp"))
    assert by_rdp.epsilon() > 1.02 * by_pld.epsilon()
    real = accounting.ACCOUNTANTS["rdp"]
    low = by_pld.epsilon() * 0.998
    accounting._epsilon.cache_clear()
    planted = real._replace(epsilon=lambda releases, delta, coarsening: low)
    monkeypatch.setitem(accounting.ACCOUNTANTS, "rdp", planted)
    refusal(found.epsilon, "disagree")
    accounting._epsilon.cache_clear()


def test_what_holds_for_a_zeroed_client_is_never_said_of_an_absent_one(tmp_path):
    """With releases under add-or-remove the sum is under zero-out; the reverse is refused."""
    plan = flat_plan(**FIELDS, sampling="min_separation", separation=3)
    zeroed = plan.charge_event()
    assert "adjacency = zero out one client" in plan.statement()
    assert events.from_json(events.to_json(zeroed)) == zeroed
    both = Guarantee.of_events([poisson(0.05, 1.5), zeroed], 1e-5)
    assert both.adjacency == "zero_out_one"
    # The numbers are those of a Gaussian on everyone.
    same = Guarantee.of_events([poisson(0.05, 1.5), GAUSSIAN(2.0)], 1e-5)
    assert (both.epsilon(), same.adjacency) == (same.epsilon(), "add_or_remove_one")
    for other in ("add_or_remove_one", "replace_one"):
        refusal(lambda other=other: dataclasses.replace(both, adjacency=other), other)
    refusal(
        lambda: events.adjacency(dp_accounting.ComposedDpEvent([EVENTS_FIXED, zeroed])), "mixes"
    )
    with Ledger(tmp_path / "ledger.jsonl", CLIENTS) as ledger:
        charge(ledger, 1, poisson(0.05, 1.5))
        assert ledger.adjacency == "add_or_remove_one"
        charge(ledger, 2, zeroed)
        assert ledger.adjacency == "zero_out_one"
        refusal(lambda: charge(ledger, 3, EVENTS_FIXED), "no common epsilon")
        charge(ledger, 3, poisson(0.05, 1.5))
    assert Ledger.read(tmp_path / "ledger.jsonl").adjacency == "zero_out_one"


def test_a_mixture_that_one_accountant_supports_says_so():
    """A secure sum has Renyi divergences alone, a Poisson cohort none that are computed twice."""
    found = Guarantee.of_events([dp_accounting.ZCDpEvent(0.02, 1e-3), poisson(0.05, 1.5)], 1e-5)
    assert found.confirmed_epsilon() is None
    assert found.statement().endswith("accountant = RDP (one accountant)")
    tiny = Guarantee.of_events([poisson(0.05, 1e-4)], 1e-5)
    assert tiny.epsilon() > 1e5 and tiny.statement().endswith("(one accountant)")


def test_a_given_noise_multiplier_and_a_ledgers_total_are_confirmed(monkeypatch, tmp_path):
    """A first accountant that finds too little is caught, not only where noise is calibrated."""
    plan = flat_plan(**FIELDS)
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, CLIENTS) as ledger:
        charge(ledger, event=poisson(0.05, 1.5))
        charge(ledger, event=poisson(0.2, 4.0), label="other")
    real = accounting._epsilon
    assert plan.epsilon() > 0 and ledger.spent(1e-5) > 0
    monkeypatch.setattr(accounting, "_epsilon", lambda *arguments: 0.99 * real(*arguments))
    for state in (
        plan.epsilon,
        plan.statement,
        lambda: Ledger.read(path).spent(1e-5),
        lambda: Ledger.read(path).summary(1e-5),
        lambda: certificate("a", {"l": Ledger.read(path)}, 1e-5, statement="", stamp=""),
        lambda: together([Ledger.read(path)], 1e-5).epsilon(),
    ):
        refusal(state, "disagree")


@pytest.mark.parametrize(
    "wrong", [{"unit": "record"}, {"adjacency": "replace"}, {"accountant": "prv"}, {"delta": 1.0}]
)
def test_a_guarantee_of_unknown_kind_is_refused(wrong):
    refusal(lambda: Guarantee(**{"event": GAUSSIAN(1.0), "delta": 1e-5, **wrong}), *wrong)
