"""GRPO: advantages, loss and gradient are DeepSeekMath's formulas, with responses missing, too."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models import adapter_trees
from jaxpfl.models.decoder import lora
from jaxpfl.text.preference.groups import advantages
from jaxpfl.text.preference.log_probabilities import log_probabilities
from jaxpfl.text.preference.losses import Known, Objective, grpo
from jaxpfl.text.preference.optimisation import tune
from tests.text.preference.parts import (
    GRPO,
    assert_close,
    copies,
    of_one_batch,
    separately,
    some_groups,
    tiny_model,
)


def by_loops(policy, known, is_token, tau, clip):
    """Loss, KL and clipped share, [N, 3], and the loss's gradient by the policy, in float64."""
    reference, written, advantage = (np.asarray(each, np.float64) for each in known)
    found, slopes = np.zeros((len(policy), 3)), np.zeros(policy.shape)
    for n, group in enumerate(is_token):
        responses = [g for g, tokens in enumerate(group) if tokens.any()]
        for g in responses:
            tokens = np.flatnonzero(group[g])
            for t in tokens:
                here, a = (n, g, t), advantage[n, g]
                share = 1 / (len(responses) * len(tokens))
                ratio = math.exp(policy[here] - written[here])
                least = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
                to_reference = math.exp(reference[here] - policy[here])
                kl = to_reference - math.log(to_reference) - 1
                clipped = least < ratio * a
                found[n] += share * np.array([tau * kl - least, kl, clipped])
                slopes[here] = share * (tau * (1 - to_reference) - ratio * a * (not clipped))
    return found, slopes


@pytest.mark.parametrize(("tau", "clip"), [(0.0, 0.2), (0.3, 0.2), (0.3, 0.5)])
def test_loss_and_gradient_are_the_formulas(tau, clip):
    groups = some_groups()
    is_token = groups.responses_NxGxT >= 0
    assert len(np.unique(is_token.sum(axis=2))) > 4 and not is_token.any(axis=2).all()
    drawn = np.random.default_rng(0).normal(-2, 0.4, (3, *is_token.shape))
    policy, reference, written = np.where(is_token, drawn, 0).astype(np.float32)
    known = Known(reference, written, groups.advantage_NxG)
    expected, slopes = by_loops(policy.astype(float), known, is_token, tau, clip)
    assert 0.05 < expected[:, 2].mean() < 0.6

    def found(policy, known=known):
        return grpo(policy, known, jnp.asarray(is_token), tau, clip)

    given = jnp.asarray(policy)
    for name, column in zip(("loss", "kl", "clipped"), expected.T, strict=True):
        np.testing.assert_allclose(found(given)[name], column, rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda policy: jnp.sum(found(policy)["loss"]))
    np.testing.assert_allclose(slope(given), slopes, rtol=1e-4, atol=1e-6)
    # A reward of the wrong sign is another loss.
    flipped = found(given, known._replace(advantage_BxG=-known.advantage_BxG))["loss"]
    assert np.max(np.abs(flipped - expected[:, 0])) > 0.1


def test_gradients_of_adapters_are_the_formulas():
    """Of rows that hold all responses, against each response in a row of its own."""
    (model, params), groups = tiny_model(), some_groups()
    adapters, base = adapter_trees.split(params)
    read, is_token = copies(groups), groups.responses_NxGxT >= 0
    # The responses were written by a model that has moved since.
    written = separately(model, jax.tree.map(lambda leaf: 0.9 * leaf, params), read)
    reference = separately(*lora.detach(model, params), read)
    known = Known(np.asarray(reference), np.asarray(written), groups.advantage_NxG)
    policy, pull = jax.vjp(
        lambda given: separately(model, adapter_trees.join(given, base), read), adapters
    )
    expected, slopes = by_loops(np.asarray(policy, np.float64), known, is_token, 0.3, 0.2)
    objective = Objective("grpo", 0.3, 0.2)
    metrics, gradients = of_one_batch(model, params, groups, objective, known)
    found = [float(metrics[name]) for name in ("loss", "kl", "clipped")]
    np.testing.assert_allclose(found, expected.mean(axis=0), rtol=1e-3)
    assert found[2] > 0
    assert_close(gradients, pull(jnp.asarray(slopes / len(groups), jnp.float32))[0])


def test_the_first_step_is_that_of_a_policy_gradient():
    """REINFORCE with advantages and mean token log-probabilities, without the reference."""
    (model, params), groups = tiny_model(), some_groups()
    adapters, base = adapter_trees.split(params)
    is_token = groups.responses_NxGxT >= 0
    written = log_probabilities(model, params, groups, multiple=40)
    known = Known(written * 0, written, groups.advantage_NxG)
    metrics, gradients = of_one_batch(model, params, groups, Objective("grpo", 0.0, 0.2), known)

    def plain(given):
        log_p = separately(model, adapter_trees.join(given, base), copies(groups))
        mean_NxG = log_p.sum(axis=2) / np.maximum(is_token.sum(axis=2), 1).astype(np.float32)
        responses_N = is_token.any(axis=2).sum(axis=1).astype(np.float32)
        return -jnp.mean(jnp.sum(groups.advantage_NxG * mean_NxG, axis=1) / responses_N)

    assert_close(gradients, jax.grad(plain)(adapters))
    assert float(metrics["clipped"]) == 0
    # A tuning takes what it is given for what wrote the responses.
    record = tune(model, params, groups, GRPO, seed=0).record
    assert record["clipped"][0] == 0 < record["clipped"][-1]
    assert record["kl"][0] > 0 and record.keys() >= {"loss", "padding", "steps"}


def test_advantages_are_of_candidates_alone():
    scores = np.array([[1.0, 2, 6, 9], [5, 5, 5, 9], [3, 1, 0, 0], [0.1, 0.1, 0.1, 0.1]])
    used = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
    prompts, found = advantages(scores, used)
    # Equal scores, a single candidate: nothing to learn.
    assert prompts.tolist() == [0]
    # Mean 3, standard deviation of a sample of three: sqrt((4 + 1 + 9) / 2).
    np.testing.assert_allclose(found, [np.array([-2, -1, 3, 0]) / 7**0.5], rtol=1e-6)
    np.testing.assert_allclose(advantages(scores[:1] * 1e-6 - 1, used[:1])[1], found, rtol=1e-4)
    for wrong in (scores[0], scores * np.nan):
        with pytest.raises(InputError, match="scores must be"):
            advantages(wrong, used)
