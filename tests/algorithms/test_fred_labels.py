"""FreD's moments of several labels, as one release: against numpy, its sensitivity and its cost."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms.fred import FredPlan, by_label, fred, moments
from jaxpfl.data import from_clients
from jaxpfl.federated.clients.client import Examples, contribution
from tests.algorithms.asking import asked
from tests.refusals import refusal

DIM, LABELS, CLIP = 5, 3, 0.5
SETTINGS = {"clip_norm": CLIP, "labels": LABELS}


def clients(count=40):
    """Clients of 0 to 6 embeddings, of which those of one label lie elsewhere; label 7 is none."""
    rng, made = np.random.default_rng(0), {}
    for index in range(count):
        label = rng.choice([0, 1, 2, 7], index % 7, p=[0.5, 0.3, 0.1, 0.1]).astype(np.int32)
        rows = rng.normal(size=(len(label), DIM)) * 0.4 + 0.2 * label[:, None] % 3
        made[str(index)] = {"embedding": rows.astype(np.float32), "label": label}
    return from_clients(made)


def clip(x):
    return x * min(1.0, CLIP / max(np.linalg.norm(x), 1e-300))


def reference(population, label):
    """Count, mean and covariance of a label by a loop in float64."""
    weighted = []
    for index in range(len(population)):
        client = population.examples(index)
        listed = client["label"] < LABELS
        for row, own in zip(client["embedding"], client["label"], strict=True):
            if own == label:
                weighted.append((clip(np.float64(row)), 1 / listed.sum()))
    count = sum(weight for _, weight in weighted)
    mean = sum(weight * row for row, weight in weighted) / count
    centred = [(clip(row - mean), weight) for row, weight in weighted]
    return count, mean, sum(weight * np.outer(v, v) for v, weight in centred) / count


def test_without_noise_the_moments_of_each_label_are_those_of_a_loop(tmp_path):
    population, plan = clients(), FredPlan.without_privacy(**SETTINGS)
    algorithm = fred(plan, units=len(population), dimension=DIM)
    state = asked(algorithm, population, tmp_path).state
    counts = 0.0
    for label, of_label in enumerate(by_label(state)):
        found = moments(plan, of_label).moments
        count, mean, covariance = reference(population, label)
        counts += count
        assert found.count == pytest.approx(count, rel=1e-5)
        np.testing.assert_allclose(found.mean_D, mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.covariance_DxD, covariance, rtol=1e-4, atol=1e-5)
    assert 0 < counts <= np.count_nonzero(population.sizes())


def contributions(plan):
    """A function of a client's rows and labels: the norm of each moment, before any clip."""
    rng = np.random.default_rng(1)
    centres = jnp.asarray(rng.normal(size=(LABELS, DIM)) * CLIP, jnp.float32)

    @jax.jit
    def sent(rows, labels):
        batches = {"embedding": rows[None], "label": labels[None]}
        examples = Examples(batches, jnp.ones((1, len(labels)), bool), jnp.int32(1))
        return [
            contribution(plan.client_fn(moment), centres, examples, jax.random.key(0))
            for moment in plan.moments
        ]

    def norms(rows, labels):
        vectors = sent(jnp.asarray(rows), jnp.asarray(labels))
        assert all(vector.shape[0] == LABELS for vector in vectors)
        return [np.linalg.norm(np.float64(vector)) for vector in vectors]

    return norms


@pytest.mark.parametrize("rows", [1, 2, 3, 32])
def test_all_labels_of_a_client_together_move_a_release_by_the_sensitivity_of_one(rows):
    """Whatever a client holds: one, or all labels, long and equal embeddings, no labels.

    Some clients come near to the bound, so that it is not a loose one.
    """
    plan = FredPlan.calibrated(epsilon=1.0, delta=1e-4, **SETTINGS)
    assert plan.moments == ("count", "sum", "second")
    norms, rng, largest = contributions(plan), np.random.default_rng(rows), np.zeros(3)
    for _ in range(40):
        drawn = rng.normal(size=(rows, DIM)) * rng.choice([0.01, 1.0, 1e6, 1e30])
        drawn = np.repeat(drawn[:1], rows, axis=0) if rng.random() < 0.5 else drawn
        highest = rng.integers(1, LABELS + 2)
        label = rng.integers(0, highest, rows).astype(np.int32)
        largest = np.maximum(largest, norms(drawn.astype(np.float32), label))
    bounds = np.array(plan.sensitivities)
    np.testing.assert_allclose(bounds, (1.0, CLIP, CLIP**2))
    assert (largest <= bounds * (1 + 1e-6)).all() and (largest >= 0.99 * bounds).all()


def test_labels_cost_no_more_than_one(tmp_path):
    population = clients()
    plan = FredPlan.calibrated(epsilon=2.0, delta=1e-3, **SETTINGS)
    one = FredPlan.calibrated(epsilon=2.0, delta=1e-3, clip_norm=CLIP)
    assert plan.mu == pytest.approx(one.mu, rel=1e-6)
    assert math.isclose(plan.multipliers[1], one.multipliers[1], rel_tol=0.02)
    ledger = asked(fred(plan, units=40, dimension=DIM), population, tmp_path).ledger
    assert len(ledger.charges) == 3 and len({charge.run for charge in ledger.charges}) == 1
    assert ledger.spent(1e-3) == pytest.approx(2.0, rel=1e-3)
    refusal(
        lambda: FredPlan.calibrated(epsilon=2.0, delta=1e-3, population=40, labels=2), "population"
    )


def test_a_label_of_few_clients_has_more_noise(tmp_path):
    plan = FredPlan.calibrated(epsilon=2.0, delta=1e-3, **SETTINGS)
    state = asked(fred(plan, units=40, dimension=DIM), clients(), tmp_path).state
    for of_label in by_label(state):
        released = moments(plan, of_label)
        count = max(float(of_label.count), 1.0)
        assert released.noise.mean == pytest.approx(plan.noise_stds[1] / count)


def test_labels_must_be_one_number_an_example(tmp_path):
    """A column [N, 1] would be compared with each example of a batch."""
    population = clients()
    wrong = {**population.columns, "label": population.column("label")[:, None]}
    plan = FredPlan.without_privacy(**SETTINGS)
    algorithm = fred(plan, units=len(population), dimension=DIM)
    refusal(lambda: asked(algorithm, population.with_columns(wrong), tmp_path), "label shape")
