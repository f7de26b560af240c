"""DPO, IPO and GRPO, their gradients and advantages are the papers' formulas."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.text.preference.groups import advantages, groups_of, preferences
from jaxpfl.text.preference.losses import Constants, Objective, measured
from tests.refusals import refusal


def by_numpy(objective, policy, known, is_token):
    """What `measured` finds, and the gradient of the loss by the policy, in float64."""
    if objective.loss == "grpo":
        return _by_loops(objective, policy, known, is_token)
    of_response = (policy - np.asarray(known.reference_BxGxT, np.float64)).sum(axis=2)
    tau, h = objective.tau, of_response[:, 0] - of_response[:, 1]
    if objective.loss == "dpo":
        # -log(1 / (1 + exp(-x))), by the side on which nothing overflows.
        x, e = tau * h, np.exp(-np.abs(tau * h))
        loss = np.where(x > 0, np.log1p(e), np.log1p(e) - x)
        slope = -tau * np.where(x > 0, e / (1 + e), 1 / (1 + e))
    else:
        loss, slope = (h - 1 / (2 * tau)) ** 2, 2 * (h - 1 / (2 * tau))
    found = {"loss": loss, "margin": tau * h, "accuracy": h > 0}
    return found, np.stack([slope, -slope], axis=1)[:, :, None] * is_token


def _by_loops(objective, policy, known, is_token):
    _, tau, clip = objective
    reference, written, advantage = (np.asarray(each, np.float64) for each in known)
    found, slopes = np.zeros((3, len(policy))), np.zeros(policy.shape)
    for n, group in enumerate(is_token):
        for g in np.flatnonzero(group.any(axis=1)):
            for t in np.flatnonzero(group[g]):
                here, a = (n, g, t), advantage[n, g]
                share = 1 / (group.any(axis=1).sum() * group[g].sum())
                ratio = math.exp(policy[here] - written[here])
                least = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
                to_reference = math.exp(reference[here] - policy[here])
                kl = to_reference - math.log(to_reference) - 1
                clipped = least < ratio * a
                found[:, n] += share * np.array([tau * kl - least, kl, clipped])
                slopes[here] = share * (tau * (1 - to_reference) - ratio * a * (not clipped))
    return dict(zip(("loss", "kl", "clipped"), found, strict=True)), slopes


@partial(jax.jit, static_argnums=0)
def with_slopes(objective, policy, known, is_token):
    """What `measured` finds, and the gradient of the loss by the policy."""

    def loss(policy):
        found = measured(objective, policy, known, is_token)
        return jnp.sum(found["loss"]), found

    slopes, found = jax.grad(loss, has_aux=True)(policy)
    return found, slopes


def check(objective, policy, known, is_token, scale=1.0):
    """Compares what is found with `by_numpy`, and returns both of the latter."""
    expected, slopes = by_numpy(objective, policy.astype(float), known, is_token)
    found, found_slopes = with_slopes(objective, policy, known, is_token)
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(found[name], each, rtol=1e-5, atol=1e-6 * scale, err_msg=name)
    np.testing.assert_allclose(found_slopes, slopes, rtol=1e-4, atol=1e-6 * scale)
    return expected, slopes


@pytest.mark.parametrize("name", ["dpo", "ipo"])
@pytest.mark.parametrize("tau", [0.01, 0.5])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_losses_of_pairs_are_the_formulas(name, tau, scale):
    generator = np.random.default_rng(0)
    policy, reference = generator.normal(size=(2, 50, 2, 1)).astype(np.float32) * np.float32(scale)
    # Where nothing has moved, and the largest margins of either sign.
    policy[0] = reference[0]
    policy[1:3, :, 0], reference[1:3] = [[1e4, 0], [0, 1e4]], 0
    is_token = np.ones(policy.shape, bool)
    found, slopes = check(Objective(name, tau, 0.2), policy, Constants(reference), is_token, scale)
    assert np.all(np.isfinite(slopes))
    if name == "dpo":
        assert found["loss"][0] == pytest.approx(np.log(2), rel=1e-6)


@pytest.mark.parametrize(("tau", "clip"), [(0.0, 0.2), (0.3, 0.2), (0.3, 0.5)])
def test_grpo_is_the_formula(tau, clip):
    """Of responses of 1 to 7 tokens, some of which are missing."""
    generator = np.random.default_rng(0)
    length_NxG = np.where(generator.random((9, 4)) < 0.2, 0, generator.integers(1, 8, (9, 4)))
    is_token = np.arange(7) < length_NxG[:, :, None]
    drawn = generator.normal(-2, 0.4, (3, *is_token.shape))
    policy, reference, written = np.where(is_token, drawn, 0).astype(np.float32)
    advantage = generator.normal(size=(9, 4)).astype(np.float32) * (length_NxG > 0)
    objective, known = Objective("grpo", tau, clip), Constants(reference, written, advantage)
    found, _ = check(objective, policy, known, is_token)
    assert 0.05 < found["clipped"].mean() < 0.6
    # A reward of the wrong sign is another loss.
    with pytest.raises(AssertionError):
        wrong = measured(objective, policy, known._replace(advantage_BxG=-advantage), is_token)
        np.testing.assert_allclose(wrong["loss"], found["loss"], rtol=0.01)
    # The first step is REINFORCE with the mean of each response's tokens.
    found, slopes = check(Objective("grpo", 0.0, clip), written, known, is_token)
    weight_NxG = advantage / np.maximum(length_NxG, 1) / (length_NxG > 0).sum(axis=1)[:, None]
    np.testing.assert_allclose(slopes, -weight_NxG[:, :, None] * is_token, rtol=1e-6)
    assert not found["clipped"].any()


def test_advantages_are_of_candidates_alone():
    scores = np.array([[1.0, 2, 6, 9], [5, 5, 5, 9], [3, 1, 0, 0], [0.1, 0.1, 0.1, 0.1]])
    used = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    prompts, found = advantages(scores, used)
    # Equal scores, a single candidate: nothing to learn.
    assert prompts.tolist() == [0]
    # Mean 3, standard deviation of a sample of three: sqrt((4 + 1 + 9) / 2).
    np.testing.assert_allclose(found, [np.array([-2, -1, 3, 0]) / 7**0.5], rtol=1e-6)
    np.testing.assert_allclose(advantages(scores[:1] * 1e-6 - 1, used[:1])[1], found, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 700.0])
def test_scores_that_differ_by_rounding_are_equal(scale):
    """Else what rounding left would be divided by itself, and give advantages of 1."""
    # Means of one set of numbers in several orders, in float32.
    draw = np.random.default_rng(0)
    parts = draw.uniform(0.5, 1.5, 64).astype(np.float32) * np.float32(scale)
    equal = np.array([draw.permutation(parts).mean() for _ in range(4)])
    near = np.array([scale, scale + 3e-8 * scale, scale, scale])
    apart = np.array([scale, scale * 1.001, scale, scale])
    scores, used = np.array([equal, near, apart]), np.ones((3, 4), bool)
    assert advantages(scores, used)[0].tolist() == [2]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_and_advantages_are_finite(value):
    scores, used = np.array([[value, 1.0, 2.0]]), np.ones((1, 3), bool)
    for ranked in (lambda: advantages(scores, used), lambda: preferences(scores, 2, used)):
        refusal(ranked, "finite")
    one = np.array([1], np.int32)
    refusal(lambda: groups_of([one], [[one, one, one]], scores), "advantages finite")
    # What is no candidate has any score.
    assert advantages(scores, np.array([[False, True, True]]))[0].tolist() == [0]


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_group_of_empty_responses_takes_part_in_nothing(empty):
    draw = np.random.default_rng(0)
    policy, reference, written = -draw.random((3, 3, 2, 5)).astype(np.float32)
    is_token, advantage = np.ones((3, 2, 5), bool), draw.normal(size=(3, 2)).astype(np.float32)
    is_token[:empty] = False
    known = Constants(reference, written, advantage)
    objective = Objective("grpo", 0.1, 0.2)
    found, slopes = with_slopes(objective, policy, known, is_token)
    assert all(np.isfinite(values).all() for values in (*found.values(), slopes))
    assert not slopes[:empty].any() and all(not v[:empty].any() for v in found.values())
    of_last = Constants(reference[2:], written[2:], advantage[2:])
    alone, _ = with_slopes(objective, policy[2:], of_last, is_token[2:])
    np.testing.assert_allclose(found["loss"][2:], alone["loss"], rtol=1e-6)
