"""FreD's moments of several embeddings as one release: numpy, adversarial clients, its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms.fred import FredPlan, by_embedding, by_label, fred, moments
from jaxpfl.data import from_clients
from jaxpfl.federated.clients.client import Examples, contribution
from tests.algorithms.asking import asked
from tests.refusals import refusal

CLIP, SHARES = 0.5, (0.5, 0.3, 0.2)
COLUMNS = {"embedding": 5, "wording": 8, "judge": 3}


def clients(count=40):
    """Clients of 0 to 6 examples with three embeddings, some longer than the clip norm."""
    rng, made = np.random.default_rng(0), {}
    for index in range(count):
        number = index % 7
        rows = {
            name: (rng.normal(size=(number, d)) * 0.3 + 0.2).astype(np.float32)
            for name, d in COLUMNS.items()
        }
        label = rng.integers(0, 2, number).astype(np.int32)
        made[str(index)] = {**rows, "label": label}
    return from_clients(made)


def clip(x):
    return x * min(1.0, CLIP / max(np.linalg.norm(x), 1e-300))


def reference(population, column, label=None):
    """Count, mean and covariance of one embedding alone, by a loop in float64."""
    weighted = []
    for index in range(len(population)):
        client = population.examples(index)
        for row, own in zip(client[column], client["label"], strict=True):
            if label in (None, own):
                weighted.append((clip(np.float64(row)), 1 / len(client["label"])))
    count = sum(weight for _, weight in weighted)
    mean = sum(weight * row for row, weight in weighted) / count
    centred = [(clip(row - mean), weight) for row, weight in weighted]
    return count, mean, sum(weight * np.outer(v, v) for v, weight in centred) / count


@pytest.mark.parametrize("labels", [1, 2])
def test_without_noise_each_embedding_has_the_moments_of_a_loop(tmp_path, labels):
    population = clients()
    plan = FredPlan.without_privacy(clip_norm=CLIP, shares=SHARES, labels=labels)
    state = asked(fred(plan, units=40, dimension=COLUMNS), population, tmp_path).state
    for column, (part, of) in zip(COLUMNS, by_embedding(plan, state), strict=True):
        for label, of_label in enumerate([of] if labels == 1 else by_label(of)):
            found = moments(part, of_label).moments
            wanted = reference(population, column, label if labels > 1 else None)
            assert found.count == pytest.approx(wanted[0], rel=1e-5)
            np.testing.assert_allclose(found.mean_D, wanted[1], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.covariance_DxD, wanted[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("column", COLUMNS)
def test_an_example_that_lacks_one_embedding_is_in_none(tmp_path, column):
    """Else the count, which is of all, would not be that of the others' sums."""
    population = clients(14)
    columns = {name: population.column(name).copy() for name in population.columns}
    columns[column][:6] = np.nan
    plan = FredPlan.without_privacy(clip_norm=CLIP, shares=SHARES)
    unfit = population.with_columns(columns)
    state = asked(fred(plan, units=14, dimension=COLUMNS), unfit, tmp_path).state
    rest = population.keeping(np.arange(population.num_examples) >= 6)
    for name, (part, of) in zip(COLUMNS, by_embedding(plan, state), strict=True):
        wanted = reference(rest, name)
        np.testing.assert_allclose(
            moments(part, of).moments.mean_D, wanted[1], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("rows", [1, 32])
def test_all_embeddings_of_a_client_move_a_release_by_the_sensitivity_of_one(rows, labels):
    """Whatever it holds: equal or huge vectors, all embeddings at their longest, or not finite."""
    plan = FredPlan.calibrated(
        epsilon=1.0, delta=1e-4, clip_norm=CLIP, shares=SHARES, labels=labels
    )
    queries = fred(plan, units=40, dimension=COLUMNS).queries
    lead = () if labels == 1 else (labels,)

    @jax.jit
    def norms(centres, batches):
        examples = Examples(batches, jnp.ones((1, rows), bool), jnp.int32(1))
        sent = [contribution(q.client_fn, centres, examples, jax.random.key(0)) for q in queries]
        return [jax.tree.leaves(each) for each in sent]

    rng, largest = np.random.default_rng(rows), np.zeros(3)
    for number in range(10):
        centres, batches = [], {}
        for name, d in COLUMNS.items():
            drawn = rng.normal(size=(rows, d)) * rng.choice([0.01, 1.0, 1e6, 1e30])
            drawn = np.repeat(drawn[:1], rows, axis=0) if rng.random() < 0.5 else drawn
            if rng.random() < 0.1:
                drawn[0, 0] = rng.choice([np.nan, np.inf])
            centre = rng.normal(size=(*lead, d))
            if number == 0:
                # The worst case: all are long and alike, and far from the centre.
                drawn = np.repeat(rng.normal(size=(1, d)) * 1e6, rows, axis=0)
                centre = np.broadcast_to(-drawn[0], (*lead, d))
            centre = centre * CLIP / np.linalg.norm(centre, axis=-1, keepdims=True)
            centres.append(jnp.asarray(centre, jnp.float32))
            batches[name] = jnp.asarray(drawn.astype(np.float32))[None]
        if labels > 1:
            label = rng.integers(0, rng.integers(1, labels + 2), rows) * (number > 0)
            batches["label"] = jnp.asarray(label, jnp.int32)[None]
        for place, sent in enumerate(norms(tuple(centres), batches)):
            parts = [np.float64(leaf).ravel() for leaf in sent]
            largest[place] = max(largest[place], np.linalg.norm(np.concatenate(parts)))
    bounds = np.array([query.plan.clip_norm for query in queries])
    np.testing.assert_allclose(bounds, (1.0, CLIP, CLIP**2))
    assert (largest <= bounds * (1 + 1e-6)).all() and (largest >= 0.99 * bounds).all()


def test_several_embeddings_are_charged_as_one_with_the_noise_that_the_plan_says(tmp_path):
    """Measured on clients of zeros: the chi-square of each mean and of each covariance."""
    width, count = 60, 30
    zeros = np.zeros((1, width), np.float32)
    population = from_clients({str(i): {"a": zeros, "b": zeros} for i in range(count)})
    given = {"epsilon": 2.0, "delta": 1e-3, "population": count}
    plan, one = FredPlan.calibrated(**given, shares=(0.8, 0.2)), FredPlan.calibrated(**given)
    assert plan.multipliers == one.multipliers
    found = asked(fred(plan, units=count, dimension=dict(a=width, b=width)), population, tmp_path)
    charges = found.ledger.charges
    # The count is public.
    assert len(charges) == 2 and len({charge.run for charge in charges}) == 1
    assert found.ledger.spent(1e-3) == pytest.approx(2.0, rel=1e-3)
    for share, (part, of) in zip(plan.shares, by_embedding(plan, found.state), strict=True):
        for z, bound, value in zip(part.multipliers[1:], (1, 1), of[1:], strict=True):
            ratio = np.float64(value).std() / (z * bound)
            assert 0.75 < ratio < 1.25
        noise = moments(part, of).noise
        assert noise.mean == pytest.approx(plan.noise_stds[1] / count / share**0.5)
        assert noise.diagonal == pytest.approx(plan.noise_stds[2] / count / share**0.5)


def test_shares_must_sum_to_one_and_fit_the_columns():
    refusal(lambda: FredPlan.without_privacy(shares=(0.5, 0.6)), "shares sum to 1")
    plan = FredPlan.without_privacy(shares=(0.5, 0.5))
    refusal(lambda: fred(plan, units=9, dimension=4), "2 shares found 1")
    by_example = FredPlan.without_privacy(shares=(0.5, 0.5), unit="example")
    two = {"a": 4, "b": 4}
    refusal(lambda: fred(by_example, units=9, dimension=two), "example bound")
