"""The best of a random number of runs: the law of the number, and the cost of the choice."""

import json
import math

import dp_accounting
import numpy as np
import pytest
import scipy
from dp_accounting import rdp
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from jaxpfl.errors import InputError
from jaxpfl.privacy import Guarantee, Ledger, accounting, certificate, events, selection, verify
from tests.privacy.ledgers import CLIENTS, FIXED, GAUSSIAN, ROUND, charge, poisson
from tests.refusals import refusal

LAWS = [*selection.SHAPES]
GRID = [(law, mean, z) for law in LAWS for mean in (1.0, 5.0, 30.0, 200.0) for z in (0.8, 2.0, 9.0)]


def of(law, mean):
    """The numbers up to one that is hardly ever exceeded, and their probabilities by scipy."""
    if law == "logarithmic":
        stop = scipy.optimize.brentq(lambda g: (1 / g - 1) / math.log(1 / g) - mean, 1e-9, 1 - 1e-9)
        made = scipy.stats.logser(1 - stop)
    else:
        made = scipy.stats.geom(1 / mean) if law == "geometric" else scipy.stats.poisson(mean)
    k = np.arange(20_000)
    return k, made.pmf(k)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [1.5, 8.0, 30.0])
def test_the_number_of_runs_has_the_law_that_is_charged(law, mean):
    k, probability = of(law, mean)
    assert np.dot(k, probability) == pytest.approx(mean, rel=1e-6)
    # Each value has the share of the uniform numbers that is its probability.
    shares = np.concatenate([np.linspace(0.0005, 0.9995, 1000), [1e-9, 1 - 1e-9]])
    drawn = [selection.number(law, mean, int(share * 2**128)) for share in shares]
    assert drawn == np.searchsorted(np.cumsum(probability), shares, side="right").tolist()
    if law == "poisson":
        assert selection.number(law, mean, int(0.5 * math.exp(-mean) * 2**128)) == 0
    else:
        assert min(drawn) == 1
    assert selection.number(law, mean, 2**128 - 1) < 1000 * mean


@pytest.mark.parametrize("law", LAWS)
def test_one_run_on_average_at_least(law):
    for mean in (0.5, math.nan, math.inf, "30"):
        refusal(lambda mean=mean: selection.number(law, mean, 1), "mean")
    with pytest.raises(InputError, match="at least 1"):
        Guarantee.of_events([RepeatAndSelectDpEvent(ROUND, 0.5, 1.0)], 1e-5)
    refusal(lambda: Guarantee.of_events([RepeatAndSelectDpEvent(ROUND, 2.0, 0.5)], 1e-5), "shape")


@pytest.mark.parametrize(("law", "mean", "z"), GRID)
def test_the_charge_is_that_of_dp_accounting_and_of_a_second_accountant(law, mean, z):
    event = RepeatAndSelectDpEvent(GAUSSIAN(z), mean, selection.SHAPES[law])
    guarantee = Guarantee.of_events([event], 1e-5)
    assert guarantee.accountant == "rdp"
    account = rdp.RdpAccountant(list(accounting.RDP_ORDERS))
    account.compose(event)
    assert guarantee.epsilon() == pytest.approx(account.get_epsilon(1e-5), rel=1e-8)
    assert guarantee.confirmed_epsilon() == pytest.approx(guarantee.epsilon(), rel=1e-9)
    assert "(one accountant)" not in guarantee.statement()


@pytest.mark.parametrize("law", LAWS)
def test_rounds_on_cohorts_are_confirmed_and_verified_elsewhere(law):
    """dp-accounting's series for them does not converge at each order, so that it costs more."""
    rounds = dp_accounting.SelfComposedDpEvent(poisson(0.01, 0.6), 1000)
    event = RepeatAndSelectDpEvent(rounds, 30.0, selection.SHAPES[law])
    guarantee = Guarantee.of_events([event], 1e-5)
    assert guarantee.confirmed_epsilon() == pytest.approx(guarantee.epsilon(), rel=1e-6)
    again = verify.cost_of([{"event": events.to_json(event)}])(1e-5)
    assert again == pytest.approx(guarantee.epsilon(), rel=1e-4)
    account = rdp.RdpAccountant(list(accounting.RDP_ORDERS))
    account.compose(event)
    assert account.get_epsilon(1e-5) >= guarantee.epsilon()


@pytest.mark.parametrize(("shape", "law"), [(1, "geometric"), (0, "logarithmic")])
@pytest.mark.parametrize("rho", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("mean", [10.0, 100.0])
def test_the_divergences_are_those_of_the_papers_corollary(shape, law, rho, mean):
    """Papernot and Steinke 2022, Corollary 4: a rho-zCDP run, with the best order in closed form.

    Ours takes the best of the orders of a grid, and is never below.
    """
    orders = np.array(accounting.RDP_ORDERS)
    found = selection.divergences(orders, rho * orders, mean, float(shape))
    stop = -math.log(selection.parameter(float(shape), mean))
    chosen = 2 * (1 + shape) * math.sqrt(rho * stop) - shape * rho
    near = 1 + math.sqrt(math.log(mean) / rho)
    least = np.where(
        orders <= near,
        2 * math.sqrt(rho * math.log(mean)),
        rho * (orders - 1) + math.log(mean) / (orders - 1),
    )
    assert (found >= least + chosen - 1e-9).all()
    assert found[orders > 3] == pytest.approx((least + chosen)[orders > 3], rel=0.02)


def test_runs_without_delta_cost_three_times_their_epsilon():
    """Their Corollary 3: (2 + shape) epsilon, for runs of (epsilon, 0)."""
    orders, pure = np.array([1e9, 2e9]), np.full(2, 0.7)
    for shape in (0.0, 1.0):
        found = selection.divergences(orders, pure, 50.0, shape)
        assert found == pytest.approx((2 + shape) * 0.7, rel=1e-6)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [3.0, 30.0])
def test_the_best_of_that_many_gaussians_is_as_private_as_is_charged(law, mean):
    """By hand, without Renyi divergences: the epsilon of one run does not hold for the best.

    The density of the best is f(y) G'(F(y)), G being the generating function of the number.
    """
    z, delta = 2.0, 1e-4
    k, probability = of(law, mean)
    y = np.linspace(-9 * z, 9 * z + 1, 2_001)

    def best(shift):
        below = scipy.stats.norm.cdf(y, shift, z)
        used = (k >= 1) & (probability > 1e-14)
        steep = (probability[used] * k[used]) @ below[None, :] ** (k[used, None] - 1.0)
        return scipy.stats.norm.pdf(y, shift, z) * steep * (y[1] - y[0])

    here, there = best(0.0), best(1.0)

    def spent(epsilon):
        return max(
            np.maximum(a - math.exp(epsilon) * b, 0).sum()
            for a, b in ((here, there), (there, here))
        )

    event = RepeatAndSelectDpEvent(GAUSSIAN(z), mean, selection.SHAPES[law])
    assert spent(Guarantee.of_events([event], delta).epsilon()) <= delta
    assert spent(Guarantee.of_events([GAUSSIAN(z)], delta).epsilon()) > 1.5 * delta


def test_a_selection_is_charged_on_a_ledger_and_read_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    composed = dp_accounting.ComposedDpEvent([ROUND, GAUSSIAN(8.0), ROUND])
    other = dp_accounting.ComposedDpEvent(
        [GAUSSIAN(8.0), dp_accounting.SelfComposedDpEvent(ROUND, 2)]
    )
    for law, shape in selection.SHAPES.items():
        event = RepeatAndSelectDpEvent(composed, 7.0, shape)
        assert events.counts(event) == events.counts(RepeatAndSelectDpEvent(other, 7.0, shape))
        with Ledger(path.with_name(law), CLIENTS) as ledger:
            charge(ledger, event=event)
            charge(ledger, event=RepeatAndSelectDpEvent(other, 7.0, shape))
            assert len(ledger) == 1
            spent = ledger.spent(1e-3)
        assert Ledger.read(path.with_name(law)).spent(1e-3) == spent
        # What else is released adds up with it.
        with Ledger(path.with_name(law), CLIENTS) as ledger:
            charge(ledger, round=1)
            assert ledger.spent(1e-3) > spent
    without = RepeatAndSelectDpEvent(dp_accounting.NonPrivateDpEvent(), 7.0, 1.0)
    assert not Guarantee.of_events([without], 1e-3).private


def test_runs_on_cohorts_of_fixed_size_stay_under_replace_one():
    guarantee = Guarantee.of_events([RepeatAndSelectDpEvent(FIXED, 7.0, 1.0)], 1e-3)
    assert guarantee.adjacency == "replace_one"
    assert guarantee.epsilon() > Guarantee.of_events([FIXED], 1e-3).epsilon()
    with pytest.raises(InputError, match="no common epsilon"):
        Guarantee.of_events([RepeatAndSelectDpEvent(FIXED, 7.0, 1.0), ROUND], 1e-3)


def test_a_certificate_that_states_less_than_a_selection_costs_is_refused(tmp_path):
    """Also where its charge was made into one of fewer runs: the ledger then does not fit."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, CLIENTS) as ledger:
        charge(ledger, event=RepeatAndSelectDpEvent(GAUSSIAN(4.0), 7.0, 1.0))
        statement = Guarantee.of_events([c.event for c in ledger.charges], 1e-5).statement()
    terms = {"statement": statement, "stamp": ""}
    made = certificate.certificate("sweep", {"ledger.jsonl": Ledger.read(path)}, 1e-5, **terms)
    assert verify.check(made)
    alone = Guarantee.of_events([GAUSSIAN(4.0)], 1e-5)
    less = {**made, "statement": alone.statement()}
    refusal(lambda: verify.check(certificate.sealed(less)), "its cheapest run costs", verify.Unfit)
    fewer = json.loads(json.dumps(made))
    (charged,) = fewer["ledgers"][0]["charges"]
    charged["event"]["mean"] = 1.5
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(certificate.sealed(fewer)))
    refusal(lambda: list(verify.verified([file], [path], None, False)), "charges", verify.Unfit)
    for wrong in ({"mean": 0.5}, {"shape": 0.3}, {"shape": math.nan}):
        charged["event"].update({"mean": 1.5, "shape": 1.0} | wrong)
        with pytest.raises((verify.Unfit, ValueError)):
            verify.check(certificate.sealed(fewer))
