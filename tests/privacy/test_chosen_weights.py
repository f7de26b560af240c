"""The audit of chosen texts' weights, on a tilt of the pool by noised sums that are known."""

import dp_accounting
import numpy as np
import pytest
from scipy import special

from jaxpfl.privacy import Guarantee
from jaxpfl.privacy.auditing import lower_bound, weight_trials
from tests.refusals import refusal

RELEASES, TEXTS = 300, 64
STATED = Guarantee(dp_accounting.GaussianDpEvent(1.0), 1e-5)


def played(noise, shift=1.0):
    """A pool of orthogonal texts, weighted by a released sum to which each client adds its text."""
    rng = np.random.default_rng(0)
    planted = np.stack([rng.permutation(TEXTS)[:8] for _ in range(RELEASES)])
    weights: list[np.ndarray] = []
    for holds in (True, False):
        sums = noise * rng.standard_normal((RELEASES, TEXTS))
        if holds:
            np.put_along_axis(sums, planted, np.take_along_axis(sums, planted, 1) + shift, 1)
        weights.append(sums - special.logsumexp(sums, axis=1, keepdims=True))
    return weights[0], weights[1], planted


def test_weights_of_the_stated_noise_are_within_epsilon_and_near_it():
    bound = lower_bound(weight_trials(*played(1.0)), STATED)
    assert 0.6 * STATED.epsilon() < bound.epsilon <= STATED.epsilon()
    assert bound.trials == 2 * RELEASES * 8 * 3 // 4


def test_weights_that_show_who_was_there_are_flagged_and_others_show_nothing():
    assert lower_bound(weight_trials(*played(0.2)), STATED).epsilon > STATED.epsilon()
    # A placebo: the clients hold nothing.
    assert lower_bound(weight_trials(*played(1.0, shift=0.0)), STATED).epsilon < 0.5


def test_scores_are_the_weight_and_its_place_among_texts_that_nobody_was_given():
    weights = np.log(np.array([[0.1, 0.4, 0.2, 0.3]]))
    trials = weight_trials(weights, weights[:, ::-1], np.array([[0, 1]]))
    seen = {
        (p, *np.round(np.exp(s[:1]), 6), s[1])
        for s, p in zip(trials.scores_SxN.T, trials.present_N, strict=True)
    }
    assert seen == {(True, 0.1, 0.0), (True, 0.4, 1.0), (False, 0.3, 0.5), (False, 0.2, 0.5)}


@pytest.mark.parametrize(
    ("shapes", "place", "words"),
    [
        ([(3, 5), (2, 5), (3, 1)], 0, "releases (2, 5)"),
        ([(3, 5), (3, 5), (3,)], 0, "planted (3,)"),
        ([(3, 5), (3, 5), (3, 1)], 5, "0 .. 4"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, place, words):
    one, other, planted = (np.zeros(shape) for shape in shapes)
    refusal(lambda: weight_trials(one, other, planted.astype(int) + place), words)
