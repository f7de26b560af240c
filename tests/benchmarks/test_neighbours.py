"""Precision and recall by nearest neighbours, against their definition text by text."""

import numpy as np
import pytest

from benchmarks.macro.neighbours import precision_recall
from tests.refusals import refusal


def plain(rows, centres, k):
    def far(one, other):
        return np.sqrt(((one - other) ** 2).sum())

    likely = []
    for row in rows:
        balls = []
        for i, centre in enumerate(centres):
            others = sorted(far(centre, x) for j, x in enumerate(centres) if j != i)
            balls.append(far(row, centre) <= others[k - 1])
        likely.append(any(balls))
    return np.mean(likely)


@pytest.mark.parametrize("k", [1, 5])
def test_they_are_those_of_the_definition(k):
    rng = np.random.default_rng(0)
    written, real = rng.standard_normal((40, 3)) * 0.6, rng.standard_normal((30, 3))
    found = precision_recall(written, real, k=k)
    assert found == pytest.approx((plain(written, real, k), plain(real, written, k)))
    assert found.recall < found.precision <= 1


def test_blocks_change_nothing_and_equal_texts_count(monkeypatch):
    rng = np.random.default_rng(1)
    rows, others = rng.standard_normal((2, 50, 4))
    found = precision_recall(rows, others)
    monkeypatch.setattr("benchmarks.macro.neighbours._ROWS", 7)
    assert precision_recall(rows, others) == found
    assert precision_recall(rows, rows) == (1, 1)
    # All the same text: every ball has radius 0.
    assert precision_recall(np.ones((9, 2)), np.ones((7, 2))) == (1, 1)
    assert precision_recall(np.ones((9, 2)), np.zeros((7, 2))) == (0, 0)


def test_too_few_texts_are_refused():
    refusal(lambda: precision_recall(np.ones((5, 2)), np.ones((9, 2))), "more than 5 5 and 9")
