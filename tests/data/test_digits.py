"""scikit-learn's digits, dealt unevenly."""

import numpy as np
import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.readers.embedded import read_digits


def share_of_commonest_label(population) -> float:
    shares = []
    for client in range(len(population)):
        counts = np.bincount(population.examples(client)["label"], minlength=10)
        shares.append(counts.max() / counts.sum())
    return float(np.mean(shares))


def test_every_digit_is_dealt_once():
    from sklearn.datasets import load_digits

    population = open_population("digits?clients=100&alpha=0.5&seed=0")
    assert (len(population), population.num_examples) == (100, 1797)
    assert set(population.sizes()) == {17, 18}
    image, label = population.columns["image"], population.columns["label"]
    assert (image.shape, image.dtype, label.dtype) == ((1797, 8, 8, 1), np.float32, np.int32)
    assert (image.min(), image.max()) == (0.0, 1.0)
    pixels, labels = load_digits(return_X_y=True)
    dealt = np.column_stack([image.reshape(1797, 64) * 16, label])
    expected = np.column_stack([pixels, labels])
    np.testing.assert_array_equal(np.unique(dealt, axis=0), np.unique(expected, axis=0))


def test_small_alpha_is_more_uneven():
    uneven, medium, even = (
        share_of_commonest_label(read_digits(60, alpha, 0)) for alpha in (0.05, 0.5, 1_000.0)
    )
    assert uneven > medium + 0.1 > even + 0.2


@pytest.mark.parametrize(("clients", "alpha"), [(2, 0.5), (1797, 0.5), (30, 1e-300)])
def test_extremes_and_the_seed(clients, alpha):
    """Proportions may underflow."""
    population = read_digits(clients, alpha, 1)
    assert (len(population), population.num_examples) == (clients, 1797)
    assert population.sizes().min() >= 1
    assert population.fingerprint == read_digits(clients, alpha, 1).fingerprint
    assert population.fingerprint != read_digits(clients, alpha, 2).fingerprint
