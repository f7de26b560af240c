"""An exact test of the inequality that differential privacy is: p <= growth r + delta.

p and r are the probabilities of one event with and without somebody's data, of which x in n and y
in m independent trials were counted. The test is one of both rates together: two confidence bounds,
one on each rate, would allow for both being unlucky at once.

Trials are ordered by x / n - weight y / m, and the p-value is the largest probability, over all
rates that satisfy the inequality, of counts that are at least as far up. p is then as large as it
may be, min(1, growth r + delta), because the order rises with x; for r, only a confidence interval
is searched, whose own probability of error is added (Berger and Boos 1994, "P values maximized over
a confidence set for the nuisance parameter"). The interval is searched in cells, and counts are
taken in blocks; both are rounded against the claim, so that the p-value is never too small.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

# Of the interval of r, and of a standard deviation of y: more would only cost time.
_CELLS, _BLOCKS = 96, 16

# Of the p-value that decides, the share that may be spent on the interval of r.
_SHARE = 1 / 20


class Counts(NamedTuple):
    """The event was seen x times in n trials at rate p, and y times in m trials at rate r."""

    x: int
    n: int
    y: int
    m: int


def refuted(
    counts: Counts, *, weight: float, growth: float, delta: float, confidence: float
) -> bool:
    """Returns whether p <= growth r + delta is refuted with the confidence.

    If the inequality is true, that happens with probability 1 - confidence at most.

    Args:
      weight: positive; the test is strongest where it is `growth`, and valid for any that does not
        depend on the counts. For a fixed weight, whoever refutes a growth refutes smaller ones.
    """
    x, n, y, m = counts
    if not n or not m:
        return False
    spent = _SHARE * (1 - confidence)
    edge_C = _cells(y, m, spent)
    least_C, most_C = edge_C[:-1, None], np.minimum(1.0, growth * edge_C[1:, None] + delta)
    y_B = _blocks(m, float(edge_C[0]), float(edge_C[-1]))
    # At y itself exactly x, whatever is rounded; beyond n nothing is left.
    needed_B = np.ceil(np.minimum(x + n * weight / m * (y_B[:-1] - y) - 1e-9, n + 1.0))
    mass_CxB = -np.diff(_at_least(y_B[None, :], m, least_C), axis=1)
    p_value_C = (mass_CxB * _at_least(needed_B[None, :], n, most_C)).sum(axis=1)
    # A sum of thousands of terms is off by less than 1e-10.
    return float(p_value_C.max()) + 1e-10 + spent <= 1 - confidence


def upper_rate(errors: np.ndarray, trials: np.ndarray | float, confidence: float) -> np.ndarray:
    """Returns Clopper and Pearson's upper bounds on a rate, given numbers of errors.

    The rate at which so few errors, or fewer, would have the probability 1 - confidence.
    """
    left = trials - np.asarray(errors)
    found = special.betaincinv(np.asarray(errors) + 1.0, np.maximum(left, 1e-9), confidence)
    return np.where(left > 0, found, 1.0)


def _cells(y: int, m: int, error: float) -> np.ndarray:
    """The edges of the cells of r, which r leaves with probability `error` at most."""
    high = float(upper_rate(np.array(y), m, 1 - error / 2))
    low = 1 - float(upper_rate(np.array(m - y), m, 1 - error / 2))
    # In this scale, all rates are counted equally well.
    scale_C = np.linspace(math.asin(math.sqrt(low)), math.asin(math.sqrt(high)), _CELLS + 1)
    edge_C = np.sin(scale_C) ** 2
    edge_C[0], edge_C[-1] = low, high
    return edge_C


def _blocks(m: int, low: float, high: float) -> np.ndarray:
    """The edges of blocks of y, from 0 to m + 1: fine where y is likely for a rate in low..high."""
    reach = 7 * math.sqrt(m * high) + 10
    width = max(1, int(math.sqrt(m * high * (1 - low)) / _BLOCKS))
    first, last = math.floor(m * low - reach), math.ceil(m * high + reach)
    fine = np.arange(max(first, 0), min(last, m) + 1, width)
    return np.unique(np.concatenate([[0], fine, [m + 1]])).astype(np.float64)


def _at_least(count: np.ndarray, trials: int, rate: np.ndarray) -> np.ndarray:
    """The probability of `count` or more of so many trials."""
    inside = np.clip(count, 1, trials)
    found = special.betainc(inside, trials - inside + 1, rate)
    return np.where(count <= 0, 1.0, np.where(count > trials, 0.0, found))
