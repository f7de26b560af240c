"""The plan: what it refuses, what it promises, and that the two accountants agree on it."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from scipy import special

from jaxpfl.privacy import AdaptiveClip, Clip, Guarantee, Plan, accounting, events, participation
from tests.plans import FIELDS, OWN, TARGET, flat_calibrated, flat_plan, flat_without_privacy
from tests.privacy.ledgers import fixed, poisson
from tests.refusals import refusal

# Every way to get a positive real number wrong; NaN <= 0 is False.
NOT_POSITIVE = [-1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), "1", True, None, 1j]
NO_COUNT = [0, -1, 1.5, 10.0, float("nan"), float("inf"), "10", True, None]
WRONG = {name: NOT_POSITIVE for name in ("epsilon", "clip_norm", "noise_multiplier", "delta")}
WRONG |= {name: NO_COUNT for name in ("population", "clients_per_round", "rounds")}


def planned(**changes) -> Plan:
    return flat_plan(**FIELDS | changes)


def adaptive(**changes) -> Plan:
    return planned(adaptive_clip=AdaptiveClip(**changes))


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_number_out_of_range_is_refused_by_name(field, value):
    """TRUST 9, 11 and 12: zero noise with a finite epsilon and cohorts of 0 clients included."""
    make, fields = (flat_calibrated, TARGET) if field == "epsilon" else (flat_plan, FIELDS)
    refusal(lambda: make(**fields | {field: value}), field)


REFUSED = {
    "q > 1": (lambda: planned(clients_per_round=1001), "1001 exceeds 1000"),
    "a large delta": (lambda: planned(delta=1e-3), "choose a smaller delta"),
    "no reason": (lambda: planned(delta=0.45, allow_large_delta="  "), "allow_large_delta"),
    "a delta above 1": (lambda: planned(delta=1.001, allow_large_delta="a figure"), "delta"),
    "another sampling": (lambda: planned(sampling="Poisson"), "sampling one of 'poisson'"),
    "no sampling": (lambda: planned(sampling=None), "sampling one of '"),
    "another noise": (lambda: planned(noise="forest"), "noise one of '"),
    "another accountant": (lambda: planned(accountant="prv"), "accountant one of '"),
    "no noise": (lambda: dataclasses.replace(planned(), noise=None), "without_privacy"),
    "PLD": (lambda: planned(sampling="fixed", accountant="pld"), "PLD fixed-size cohorts"),
    "PLD, later": (lambda: planned(sampling="fixed").epsilon(accountant="pld"), "PLD"),
    "fewer rounds than none": (lambda: planned().epsilon(-1), "rounds"),
    "an infinite z_D": (lambda: adaptive(indicator_noise=1.0), "indicator_noise"),
    "an imaginary z_D": (lambda: adaptive(indicator_noise=0.5), "indicator_noise"),
    "a fixed cohort of examples": (lambda: planned(unit="example", sampling="fixed"), "unit"),
    "examples in epochs": (lambda: planned(unit="example", sampling="cyclic"), "unit"),
    "examples, adaptive": (lambda: dataclasses.replace(adaptive(), unit="example"), "unit"),
    "another unit": (lambda: planned(unit="record"), "unit record"),
    **{
        f"{field} = {wrong!r}": (
            lambda field=field, wrong=wrong: dataclasses.replace(planned(), **{field: wrong}),
            f"{field} must be found",
        )
        for field in ("clip", "noise", "participation")
        for wrong in (1.0, "poisson", AdaptiveClip(), None if field != "noise" else Clip(1.0))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plan_is_refused_by_name(case):
    """TRUST 9, 11, 12, 13 and 26: parts that do not go together, or are of another kind."""
    refusal(*REFUSED[case])


def test_a_cohort_of_everyone_and_a_large_delta_with_a_reason_are_taken():
    assert planned(clients_per_round=1000).participation.sampling_rate == 1
    for delta in (1e-3, 0.45):
        assert planned(delta=delta, allow_large_delta="a published figure").delta == delta


def test_what_follows_from_a_plan_cannot_be_given():
    """TRUST 11, 15: whether it is private, and a denominator other than the planned cohort."""
    for name in ("private", "denominator", "weighting", "weight_by_examples", "adjacency"):
        with pytest.raises(TypeError):
            planned(**{name: 1})
    plan = planned()
    assert {len(plan.sample(0, round)) for round in range(1, 11)} != {100}
    assert plan.denominator == 100.0
    with pytest.raises((AttributeError, TypeError)):
        plan.denominator = 90.0  # type: ignore


def test_a_plan_without_privacy_says_so_everywhere():
    """TRUST 11: an explicit constructor; epsilon is infinite under either accountant."""
    plan = flat_without_privacy(population=1000, clients_per_round=100, rounds=10, clip_norm=0.5)
    assert not plan.private
    assert plan.epsilon() == plan.epsilon(accountant="rdp") == math.inf
    assert plan.guarantee().confirmed_epsilon() == math.inf
    assert plan.epsilon(1) == math.inf
    assert plan.statement().startswith("NOT PRIVATE")
    assert plan.to_dict()["private"] is False
    assert isinstance(plan.charge_event(), dp_accounting.NonPrivateDpEvent)
    assert plan.value_noise_std(0.5) == 0
    assert len(plan.sample(0, 1))
    assert isinstance(plan.released_again_event(), dp_accounting.NonPrivateDpEvent)


def test_one_object_makes_sampler_noise_and_event():
    """TRUST 13: each derived from the same fields, none can be given apart."""
    plans = flat_plan(**FIELDS), flat_plan(**FIELDS, sampling="fixed")
    assert [p.guarantee().adjacency for p in plans] == ["add_or_remove_one", "replace_one"]
    expected = [poisson(0.1, 2.0), fixed(1000, 100, 1.0)]
    assert [plan.charge_event() for plan in plans] == expected
    for plan in plans:
        assert plan.value_noise_std(0.5) == 2.0 * 0.5
        assert plan.event() == dp_accounting.SelfComposedDpEvent(plan.charge_event(), 10)


def test_replacing_one_client_moves_the_sum_by_two_clip_norms():
    """SPEC D.2: with everyone taking part the exact epsilon is that of mu = 2 sqrt(T) / z."""
    plan = flat_plan(**FIELDS | {"clients_per_round": 1000}, sampling="fixed")
    mu, epsilon = 2 * math.sqrt(10) / 2.0, plan.guarantee().confirmed_epsilon()
    exact = special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(
        -mu / 2 - epsilon / mu
    )
    assert exact == pytest.approx(1e-5, rel=1e-6)
    # A plan states what a ledger does, by the tightest accountant that there is for its rounds.
    assert plan.epsilon() == pytest.approx(epsilon, rel=1e-6)


def test_dp_accounting_still_treats_a_replacement_as_one_clip_norm():
    """SPEC D.2: why the plan halves z. Fails when dp-accounting mends it (issue 378)."""

    def theirs(z: float) -> float:
        account = rdp.RdpAccountant(
            list(accounting.RDP_ORDERS), dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        return account.compose(fixed(1000, 100, z), 10).get_epsilon(1e-5)

    ours = flat_plan(**FIELDS, sampling="fixed").epsilon()
    assert ours == pytest.approx(theirs(1.0), rel=1e-9)
    assert ours > 1.5 * theirs(2.0)
    plain = rdp.RdpAccountant([8.0], dp_accounting.NeighboringRelation.REPLACE_ONE)
    plain.compose(dp_accounting.GaussianDpEvent(2.0))
    assert plain.rdp[0] == pytest.approx(8.0 / (2 * 2.0**2))


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_adaptive_clipping_costs_what_the_noise_multiplier_says(sampling):
    """TRUST 26: 1 / z^2 = 1 / z_D^2 + 1 / (2 sigma_b)^2, and the event stays that of z."""
    plan = flat_plan(**FIELDS, adaptive_clip=AdaptiveClip(), sampling=sampling)
    assert plan.indicator_noise_std == pytest.approx(5.0)
    other = adaptive(indicator_noise=1.25)
    assert other.value_noise_std(1.0) == pytest.approx((1 / 4 - 1 / 6.25) ** -0.5)
    z_d = plan.value_noise_std(1.0)
    # (1/4 - 1/100)^(-1/2)
    assert z_d == pytest.approx(2.0412414523193148, rel=1e-12)
    assert plan.value_noise_std(0.3) == pytest.approx(0.3 * z_d)
    # Adding a client moves the values by S and the sum of (b - 1/2) by 1/2.
    mu = math.hypot(1 / z_d, 0.5 / plan.indicator_noise_std)
    assert mu == pytest.approx(1 / 2.0, rel=1e-12)
    assert plan.charge_event() == flat_plan(**FIELDS, sampling=sampling).charge_event()


@pytest.mark.parametrize("value", NOT_POSITIVE[:-2] + [1j])
@pytest.mark.parametrize("field", ["target_quantile", "learning_rate", "indicator_noise"])
def test_adaptive_clipping_refuses_bad_numbers(field, value):
    """TRUST 9"""
    refusal(lambda: AdaptiveClip(**{field: value}), field)


def test_the_statement_names_epsilon_delta_unit_adjacency_and_accountant():
    """SPEC D.2: every epsilon is printed with what it means."""
    plan = flat_plan(**FIELDS)
    assert plan.statement() == (
        f"(epsilon = {plan.epsilon():.4g}, delta = 1e-05), unit = client, "
        "adjacency = add or remove one client, accountant = PLD"
    )
    fixed = flat_plan(**FIELDS, sampling="fixed").statement()
    assert "adjacency = replace one client, accountant = RDP" in fixed
    assert plan.statement(3) != plan.statement()


def test_epsilon_grows_with_rounds_from_zero():
    curve = [planned().epsilon(rounds) for rounds in (0, 1, 3, 10, 30)]
    assert curve[0] == 0 and all(np.diff(curve) > 0)
    assert curve[3] == planned().epsilon()


@pytest.mark.parametrize(
    "options", [{}, {"adaptive_clip": AdaptiveClip()}, {"sampling": "fixed"}, {"unit": "example"}]
)
def test_a_plan_survives_json(options):
    plan = flat_plan(**FIELDS | {"rounds": np.int64(10), "delta": np.float64(1e-5)}, **options)
    text = json.dumps(plan.to_dict(), allow_nan=False)
    assert Plan.from_dict(json.loads(text)) == plan
    bare = flat_without_privacy(population=10, clients_per_round=5, rounds=2)
    assert Plan.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


def test_a_plan_of_examples_says_so():
    statement = planned(unit="example").statement()
    assert "unit = example, adjacency = add or remove one example" in statement


KINDS = [*participation.KINDS]


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("round", [0, -1, 11, 1.0, True, "1"])
def test_a_round_that_was_not_planned_is_refused(sampling, round):
    """TRUST 13: a plan for 10 rounds serves no 11th, whoever takes part."""
    plan = planned(sampling=sampling, **OWN.get(sampling, {}))
    for use in (plan.check_round, plan.charge_number, lambda round: plan.sample(0, round)):
        refusal(lambda use=use: use(round), "round must")
    for number in (1, 10):
        plan.check_round(number)


@pytest.mark.parametrize("sampling", KINDS)
def test_charges_of_all_rounds_are_what_the_plan_costs(sampling):
    """TRUST 29: a charge for every number, whatever number of rounds was made."""
    # Epochs of three rounds.
    own = OWN.get(sampling, {})
    plan = flat_plan(**FIELDS | {"clients_per_round": 300}, sampling=sampling, **own)
    epochs = plan.participation.in_epochs
    for rounds in range(1, 11):
        numbers = {plan.charge_number(round) for round in range(1, rounds + 1)}
        assert numbers == set(range(1, len(numbers) + 1))
        assert len(numbers) == (-(-rounds // 3) if epochs else rounds)
        event = dp_accounting.SelfComposedDpEvent(plan.charge_event(), len(numbers))
        assert event == plan.event(rounds)


def test_a_second_release_on_one_cohort_costs_a_gaussian_on_everyone():
    """Not amplified: z under add-or-remove-one, z / 2 under replace-one."""
    gaussian = dp_accounting.GaussianDpEvent
    for sampling in KINDS:
        plan = flat_plan(**FIELDS, sampling=sampling, **OWN.get(sampling, {}))
        z = 1.0 if sampling in ("fixed", "truncated_poisson") else 2.0
        event = plan.released_again_event()
        assert events.counts(event) == {gaussian(z): 1}
        # The ledger of these rounds takes it.
        both = dp_accounting.ComposedDpEvent([plan.charge_event(), event])
        assert events.adjacency(both) == plan.guarantee().adjacency
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_two_releases_on_one_cohort_cost_no_more_than_is_charged(delta):
    """Both are exactly the pair ((1-q) P + q Q, P) of one Gaussian of multiplier z / sqrt(2).

    What is charged must be above that, and two amplified rounds are not.
    """
    q, z = 0.05, 1.2
    plan = flat_plan(
        population=1000, clients_per_round=50, rounds=1, noise_multiplier=z, delta=1e-05
    )

    def epsilon(*releases):
        return Guarantee.of_events(releases, delta).epsilon()

    truth = epsilon(poisson(q, z / math.sqrt(2)))
    assert epsilon(plan.charge_event(), plan.released_again_event()) >= truth
    if delta < 1e-2:
        assert epsilon(plan.charge_event(), plan.charge_event()) < truth
