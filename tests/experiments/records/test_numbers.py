"""Numbers on pages and terminals."""

import math

import pytest

from jaxpfl.experiments.records.numbers import duration, number, percent


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_to_be(value):
    assert number(value) == "not finite"


def test_numbers_have_four_digits():
    assert [number(each) for each in (0.0, 3.14159, 12345.6, 1.5e7)] == [
        "0", "3.142", "12346", "1.5e+07",
    ]  # fmt: skip
    assert percent(0.12345) == "12.35 %"
    assert percent(None) == ""


def test_durations_have_their_two_largest_units():
    assert [duration(each) for each in (0.04, 9.94, 59.6, 125, 3600, 7_500)] == [
        "0.0 s", "9.9 s", "1 min 0 s", "2 min 5 s", "1 h 0 min", "2 h 5 min",
    ]  # fmt: skip
