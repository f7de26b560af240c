"""Criteria T1, T2, T4 and T5 against plain loops, and what a selection keeps to itself."""

import numpy as np
import pytest

from jaxpfl.data import Population, from_clients
from jaxpfl.data.cohort import Cohort, CohortSpec
from jaxpfl.data.selection import (
    at_most,
    classified_examples,
    examples_of_slice,
    examples_of_users,
    random_examples,
)
from jaxpfl.errors import InputError
from tests.data.populations import SECRET
from tests.refusals import refusal

SIZES = [4, 0, 10, 5, 1, 7]
TOTAL = sum(SIZES)
WRONG_NUMBERS = [-0.1, 1.1, float("nan"), float("inf"), "0.5", True]


def clients() -> Population:
    return from_clients(
        {
            f"{SECRET} {k}": {
                "x": np.arange(size) + 100.0 * k,
                "label": np.arange(size, dtype=np.int32),
            }
            for k, size in enumerate(SIZES)
        }
    )


def test_nothing_shown_tells_how_many_match():
    """The size of a subpopulation is private: two selections of it look the same."""
    population = clients()
    few, many = (population.keeping(np.arange(TOTAL) < count) for count in (3, 21))
    assert repr(few) == repr(many) == repr(population)
    spec = CohortSpec(batch_size=2, max_examples=4, clients_per_bucket=2)
    for selection in (few, many):
        cohort = Cohort(selection, np.arange(6), spec, seed=0, round=0)
        # Everyone drawn is there, match or not.
        found = np.concatenate([b.key[b.weight > 0, 0] for b in cohort])
        assert len(set(found.tolist())) == 6
        with pytest.raises(InputError, match="kept must be one boolean") as raised:
            selection.keeping(np.ones(TOTAL, bool))
        assert not any(digit in str(raised.value).replace("1 axes", "") for digit in "0123456789")


def test_at_most_keeps_a_random_subset_of_each_client_that_depends_on_nobody_else():
    population = clients()
    kept = at_most(population, 4, seed=0)
    parts = np.split(kept, population.offsets[1:-1])
    assert [int(part.sum()) for part in parts] == [min(4, size) for size in SIZES]
    alone = at_most(population.select([2]), 4, seed=0)
    np.testing.assert_array_equal(alone, parts[2])
    # Each of a client's examples is kept as often as any other.
    often = np.mean([at_most(population, 4, seed=seed)[4:14] for seed in range(400)], axis=0)
    np.testing.assert_allclose(often, 0.4, atol=0.1)
    assert at_most(population, 10, seed=0).all()
    refusal(lambda: at_most(population, 0, seed=0), "limit must be at least 1, found 0")


def test_random_examples_are_a_share_that_depends_on_nobody_else():
    population = clients()
    big = from_clients({f"c{k}": {"x": np.arange(10)} for k in range(1_000)})
    kept = random_examples(big, 0.3, seed=0)
    # Binomial: five standard deviations.
    assert abs(kept.sum() - 3_000) < 5 * (10_000 * 0.3 * 0.7) ** 0.5
    assert 0.2 < np.mean(kept == random_examples(big, 0.3, seed=1)) < 0.7
    alone = random_examples(big.select([7]), 0.3, seed=0)
    np.testing.assert_array_equal(alone, kept[70:80])
    assert random_examples(population, 1, seed=0).all()
    assert not random_examples(population, 0.0, seed=0).any()
    for wrong in WRONG_NUMBERS:
        with pytest.raises(InputError, match="fraction must"):
            random_examples(population, wrong, seed=0)


@pytest.mark.parametrize("outcome", ["correct", "incorrect"])
@pytest.mark.parametrize("at_least", [1, 3, 5])
def test_classified_examples_are_those_of_clients_with_enough(outcome, at_least):
    population, expected = clients(), []
    correct = np.random.default_rng(3).uniform(size=TOTAL) < 0.5
    for mine in np.split(correct, population.offsets[1:-1]):
        wanted = [hit == (outcome == "correct") for hit in mine]
        expected += [w and sum(wanted) >= at_least for w in wanted]
    found = classified_examples(population, correct, outcome, at_least)
    assert found.dtype == bool and found.tolist() == expected
    refusal(lambda: classified_examples(population, correct, "wrong"), "'correct', 'incorrect'")
    for wrong in (0, 1.5, True, float("nan")):
        with pytest.raises(InputError, match="at_least must"):
            classified_examples(population, correct, outcome, wrong)


def test_users_are_selected_by_accuracy_strictly_and_never_without_examples():
    population = from_clients({str(k): {"x": np.zeros(n)} for k, n in enumerate([4, 0, 4, 4, 2])})
    # Accuracies 0.5, none, 0.75, 1 and 0: a threshold is exclusive.
    correct = np.array([1, 1, 0, 0] + [1, 1, 1, 0] + [1, 1, 1, 1] + [0, 0], bool)

    def users(side, threshold) -> list[int]:
        sizes = population.keeping(examples_of_users(population, correct, side, threshold)).sizes()
        assert all(some in (0, all_) for some, all_ in zip(sizes, population.sizes(), strict=True))
        return np.flatnonzero(sizes).tolist()

    assert users("below", 0.5) == [4]
    assert users("below", 0.75) == [0, 4]
    assert users("below", 0) == []
    assert users("above", 0.5) == [2, 3]
    assert users("above", 0.75) == [3]
    assert users("above", 1.0) == []
    assert users("above", 0) == [0, 2, 3]
    # TRUST 9.
    for wrong in WRONG_NUMBERS:
        with pytest.raises(InputError, match="threshold must"):
            users("above", wrong)
    refusal(lambda: users("beside", 0.5), "side must be one of 'below', 'above'")


@pytest.mark.parametrize("countries", [["fr", "de", "fr"], np.array([33, 49, 33], np.uint8)])
def test_a_slice_is_the_examples_of_one_value_of_a_column(countries):
    population = from_clients(
        {
            f"c{k}": {"x": np.arange(2.0), "country": [value] * 2}
            for k, value in enumerate(countries)
        }
    )
    found = examples_of_slice(population, "country", str(countries[0]))
    assert found.tolist() == [True, True, False, False, True, True]
    assert not examples_of_slice(population, "country", "es").any()
    images = from_clients({f"{SECRET} 0": {"image": np.zeros((2, 4, 4, 1))}})
    for column in ("country", "image"):
        with pytest.raises(InputError, match=f"a column '{column}' with one value") as raised:
            examples_of_slice(images, column, "fr")
        assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [np.ones(TOTAL), np.ones(TOTAL, int), np.ones((TOTAL, 1), bool), np.ones(3, bool), [SECRET]],
)
def test_criteria_of_another_kind_are_refused_and_no_value_is_told(wrong):
    """TRUST 7"""
    population = clients()
    uses = (classified_examples, lambda *args: examples_of_users(*args, "below", 0.5))
    for use in (Population.keeping, *uses):
        with pytest.raises(InputError, match="must be one boolean for each example") as raised:
            use(population, wrong)
        assert SECRET not in str(raised.value)
