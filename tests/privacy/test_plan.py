"""The plan: what it refuses, what it promises, and that the two accountants agree on it."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from scipy import special

from jaxpfl.errors import InputError
from jaxpfl.privacy import (
    AdaptiveClip,
    Clip,
    Guarantee,
    Plan,
    accounting,
    events,
)
from tests.plans import FIELDS, TARGET, flat_calibrated, flat_plan, flat_without_privacy
from tests.privacy.ledgers import fixed, poisson

# Every way to get a positive real number wrong; NaN <= 0 is False.
NOT_POSITIVE = [-1.0, 0.0, -0.0, float("nan"), float("inf"), -float("inf"), "1", True, None, 1j]
NO_COUNT = [0, -1, 1.5, 10.0, float("nan"), float("inf"), "10", True, None]
WRONG = {name: NOT_POSITIVE for name in ("epsilon", "clip_norm", "noise_multiplier", "delta")}
WRONG |= {name: NO_COUNT for name in ("population", "clients_per_round", "rounds")}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_number_out_of_range_is_refused_by_name(field, value):
    """TRUST 9, 11 and 12: zero noise with a finite epsilon and cohorts of 0 clients included."""
    make, fields = (flat_calibrated, TARGET) if field == "epsilon" else (flat_plan, FIELDS)
    with pytest.raises(InputError, match=field):
        make(**fields | {field: value})


def test_a_cohort_larger_than_the_population_is_refused():
    """TRUST 12: q > 1."""
    with pytest.raises(InputError, match="1001 exceeds the population of 1000"):
        flat_plan(**FIELDS | {"clients_per_round": 1001})
    assert flat_plan(**FIELDS | {"clients_per_round": 1000}).participation.sampling_rate == 1


@pytest.mark.parametrize("delta", [1e-3, 2e-3, 0.45])
def test_a_large_delta_needs_a_written_reason(delta):
    """TRUST 9: delta >= 1 / N would allow a client's data to be published."""
    with pytest.raises(InputError, match="allow_large_delta"):
        flat_plan(**FIELDS | {"delta": delta})
    with pytest.raises(InputError, match="allow_large_delta"):
        flat_plan(**FIELDS | {"delta": delta}, allow_large_delta="  ")
    reason = "reproduces a published figure"
    assert flat_plan(**FIELDS | {"delta": delta}, allow_large_delta=reason).delta == delta
    with pytest.raises(InputError, match="delta"):
        flat_plan(**FIELDS | {"delta": 1 + delta}, allow_large_delta=reason)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sampling", "Poisson"), ("sampling", None), ("noise", "tree"), ("accountant", "prv")],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(field, value):
    with pytest.raises(InputError, match=rf"{field} must be one of '"):
        flat_plan(**FIELDS | {field: value})


def test_noise_and_privacy_cannot_contradict_each_other():
    """TRUST 11: no plan without noise has a delta, and whether it is private cannot be given."""
    plan = flat_plan(**FIELDS)
    with pytest.raises(InputError, match="without_privacy"):
        dataclasses.replace(plan, noise=None)
    with pytest.raises(TypeError):
        dataclasses.replace(plan, private=True)  # type: ignore


@pytest.mark.parametrize("field", ["clip", "noise", "participation"])
def test_a_part_of_another_kind_is_refused_with_what_was_found(field):
    """TRUST 13: a bare number or name is no clip, no noise and no way to take part."""
    for wrong in (1.0, "poisson", AdaptiveClip(), None if field != "noise" else Clip(1.0)):
        with pytest.raises(InputError, match=rf"^{field} must be .*, found "):
            dataclasses.replace(flat_plan(**FIELDS), **{field: wrong})


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


def test_fixed_size_sampling_has_no_pld():
    """TRUST 13: not constructible, nor asked for later."""
    with pytest.raises(InputError, match="PLD does not support fixed-size cohorts"):
        flat_plan(**FIELDS, sampling="fixed", accountant="pld")
    with pytest.raises(InputError, match="PLD"):
        flat_plan(**FIELDS, sampling="fixed").epsilon(accountant="pld")


def test_one_object_makes_sampler_noise_and_event():
    """TRUST 13: each derived from the same fields, none can be given apart."""
    plans = flat_plan(**FIELDS), flat_plan(**FIELDS, sampling="fixed")
    assert [plan.participation.adjacency for plan in plans] == ["add_or_remove_one", "replace_one"]
    expected = [poisson(0.1, 2.0), fixed(1000, 100, 1.0)]
    assert [plan.charge_event() for plan in plans] == expected
    for plan in plans:
        assert plan.value_noise_std(0.5) == 2.0 * 0.5
        assert plan.event() == dp_accounting.SelfComposedDpEvent(plan.charge_event(), 10)
    derived = {"adjacency", "denominator", "chosen_accountant", "private"}
    assert not derived & {field.name for field in dataclasses.fields(Plan)}


def test_the_denominator_is_a_public_constant():
    """TRUST 15: the planned cohort size, whoever turns up; it cannot be set or replaced."""
    plan = flat_plan(**FIELDS)
    assert {len(plan.sample(0, round)) for round in range(1, 11)} != {100}
    assert plan.denominator == 100.0
    with pytest.raises((AttributeError, TypeError)):
        plan.denominator = 90.0  # type: ignore
    for forbidden in ("denominator", "weighting", "weight_by_examples"):
        with pytest.raises(TypeError):
            flat_plan(**FIELDS, **{forbidden: 1})  # type: ignore


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
    z_d = plan.value_noise_std(1.0)
    # (1/4 - 1/100)^(-1/2)
    assert z_d == pytest.approx(2.0412414523193148, rel=1e-12)
    assert plan.value_noise_std(0.3) == pytest.approx(0.3 * z_d)
    # Adding a client moves the values by S and the sum of (b - 1/2) by 1/2.
    mu = math.hypot(1 / z_d, 0.5 / plan.indicator_noise_std)
    assert mu == pytest.approx(1 / 2.0, rel=1e-12)
    assert plan.charge_event() == flat_plan(**FIELDS, sampling=sampling).charge_event()


@pytest.mark.parametrize("indicator_noise", [0.5, 1.0])
def test_a_quantile_that_costs_more_than_the_plan_is_refused(indicator_noise):
    """TRUST 26: z_D would be infinite or imaginary; with more it is as given."""
    plan = flat_plan(**FIELDS, adaptive_clip=AdaptiveClip(indicator_noise=1.25))
    assert plan.value_noise_std(1.0) == pytest.approx((1 / 4 - 1 / 6.25) ** -0.5)
    with pytest.raises(InputError, match="indicator_noise"):
        flat_plan(**FIELDS, adaptive_clip=AdaptiveClip(indicator_noise=indicator_noise))


@pytest.mark.parametrize("value", NOT_POSITIVE[:-2] + [1j])
@pytest.mark.parametrize("field", ["target_quantile", "learning_rate", "indicator_noise"])
def test_adaptive_clipping_refuses_bad_numbers(field, value):
    """TRUST 9"""
    with pytest.raises(InputError, match=field):
        AdaptiveClip(**{field: value})


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
    plan = flat_plan(**FIELDS)
    curve = [plan.epsilon(rounds) for rounds in (0, 1, 3, 10, 30)]
    assert curve[0] == 0
    assert all(np.diff(curve) > 0)
    assert curve[3] == plan.epsilon()
    with pytest.raises(InputError, match="rounds"):
        plan.epsilon(-1)


@pytest.mark.parametrize("options", [{}, {"adaptive_clip": AdaptiveClip()}, {"sampling": "fixed"}])
def test_a_plan_survives_json(options):
    plan = flat_plan(**FIELDS | {"rounds": np.int64(10), "delta": np.float64(1e-5)}, **options)
    text = json.dumps(plan.to_dict(), allow_nan=False)
    assert Plan.from_dict(json.loads(text)) == plan
    bare = flat_without_privacy(population=10, clients_per_round=5, rounds=2)
    assert Plan.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


def test_the_unit_example_needs_poisson_sampling_and_a_constant_clip():
    plan = flat_plan(**FIELDS, unit="example")
    assert "unit = example, adjacency = add or remove one example" in plan.statement()
    assert Plan.from_dict(plan.to_dict()) == plan
    for bad in (
        FIELDS | {"unit": "example", "sampling": "fixed"},
        FIELDS | {"unit": "example", "sampling": "cyclic"},
        FIELDS | {"unit": "example", "adaptive_clip": AdaptiveClip()},
        FIELDS | {"unit": "record"},
    ):
        with pytest.raises(InputError):
            flat_plan(**bad)


KINDS = ["poisson", "fixed", "cyclic"]


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("round", [0, -1, 11, 1.0, True, "1"])
def test_a_round_that_was_not_planned_is_refused(sampling, round):
    """TRUST 13: a plan for 10 rounds serves no 11th, whoever takes part."""
    plan = flat_plan(**FIELDS, sampling=sampling)
    for use in (plan.check_round, plan.charge_number):
        with pytest.raises(InputError, match="round must"):
            use(round)
    with pytest.raises(InputError, match="round must"):
        plan.sample(0, round)
    for planned in (1, 10):
        plan.check_round(planned)


@pytest.mark.parametrize("sampling", KINDS)
def test_charges_of_all_rounds_are_what_the_plan_costs(sampling):
    """TRUST 29: a charge for every number, whatever number of rounds was made."""
    plan = flat_plan(**FIELDS | {"clients_per_round": 300}, sampling=sampling)
    for rounds in range(1, 11):
        numbers = {plan.charge_number(round) for round in range(1, rounds + 1)}
        assert numbers == set(range(1, len(numbers) + 1))
        assert len(numbers) == (-(-rounds // 3) if sampling == "cyclic" else rounds)
        event = dp_accounting.SelfComposedDpEvent(plan.charge_event(), len(numbers))
        assert event == plan.event(rounds)


def test_a_second_release_on_one_cohort_costs_a_gaussian_on_everyone():
    """Not amplified: z under add-or-remove-one, z / 2 under replace-one."""
    gaussian = dp_accounting.GaussianDpEvent
    for sampling, z in (("poisson", 2.0), ("cyclic", 2.0), ("fixed", 1.0)):
        plan = flat_plan(**FIELDS, sampling=sampling)
        event = plan.released_again_event()
        assert events.counts(event) == {gaussian(z): 1}
        # The ledger of these rounds takes it.
        both = dp_accounting.ComposedDpEvent([plan.charge_event(), event])
        assert events.adjacency(both) == plan.participation.adjacency


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_two_releases_on_one_cohort_cost_no_more_than_is_charged(delta):
    """Both together are exactly the pair ((1-q) P + q Q, P) of one Gaussian of multiplier
    z / sqrt(2): what is charged must be above that, and two amplified rounds are not."""
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
