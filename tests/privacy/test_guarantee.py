"""What releases cost together, and when a second accountant agrees."""

import dataclasses
import math

import dp_accounting
import pytest

from jaxpfl.errors import InputError
from jaxpfl.privacy import Guarantee, accounting, guarantee_of
from jaxpfl.privacy.ledger import Charge
from tests.plans import FIELDS, flat_plan


def test_a_guarantee_of_charges_is_that_of_their_composition():
    """TRUST 29: charges of a run in a ledger, in any order; forgetting one shows."""
    plan = flat_plan(**FIELDS)
    other = dp_accounting.GaussianDpEvent(5.0)
    charges = [Charge("run", "a", n, plan.charge_event(), f"a {n}") for n in range(1, 11)]
    charges.insert(3, Charge("run", "b", 1, other, "b"))
    found = guarantee_of(charges, plan.delta)
    expected = accounting.epsilon(
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
    with pytest.raises(InputError, match="no common epsilon"):
        Guarantee.of_events([fixed.event(), poisson.event()], 1e-5)
    with pytest.raises(InputError, match="delta"):
        Guarantee.of_events([fixed.event()], 0.0)


def test_the_exact_formula_is_named():
    everyone = flat_plan(**FIELDS | {"clients_per_round": 1000})
    assert everyone.statement().endswith("accountant = exact Gaussian")
    assert everyone.epsilon() == pytest.approx(everyone.guarantee().confirmed_epsilon(), rel=1e-9)
    assert dataclasses.replace(everyone, accountant="rdp").statement().endswith("= RDP")


def test_a_second_accountant_has_no_opinion_on_two_kinds_of_sampled_rounds():
    """Rather than one about a part of them."""
    one, two = flat_plan(**FIELDS), flat_plan(**FIELDS | {"noise_multiplier": 3.0})
    found = Guarantee.of_events([one.event(), two.event()], 1e-5)
    assert found.epsilon() > one.epsilon()
    with pytest.raises(InputError, match="found 2 kinds of sampled rounds"):
        found.confirmed_epsilon()


@pytest.mark.parametrize(
    "wrong", [{"unit": "record"}, {"adjacency": "replace"}, {"accountant": "prv"}, {"delta": 1.0}]
)
def test_a_guarantee_of_unknown_kind_is_refused(wrong):
    fields = {"event": dp_accounting.GaussianDpEvent(1.0), "delta": 1e-5}
    with pytest.raises(InputError, match=next(iter(wrong))):
        Guarantee(**fields | wrong)
