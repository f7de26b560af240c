"""Checks of public parameters: each refuses NaN, infinities, strings and booleans.

Each tests for the valid range: a test for the invalid one, such as `value <= 0`, lets NaN pass.
"""

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from jaxpfl.errors import InputError

_T = TypeVar("_T")


def real(name: str, value: object) -> float:
    """Returns `value` as a float; refuses anything that is not a finite real number."""
    try:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, found {value!r}")
        return float(value)
    except OverflowError:
        raise InputError(f"{name} must be a finite number, found a larger whole number") from None


def _in_range(fits: Callable[[float], bool], expected: str) -> Callable[[str, object], float]:
    def in_range(name: str, value: object) -> float:
        number = real(name, value)
        if not fits(number):
            raise InputError(f"{name} must {expected}, found {value!r}")
        return number

    return in_range


# Each takes a name and a value, and returns the value as a float.
positive = _in_range(lambda number: number > 0, "be positive")
non_negative = _in_range(lambda number: number >= 0, "be zero or positive")
at_least_one = _in_range(lambda number: number >= 1, "be at least 1")
open_fraction = _in_range(lambda number: 0 < number < 1, "lie strictly between 0 and 1")
fraction = _in_range(lambda number: 0 <= number <= 1, "lie in 0 .. 1")
positive_fraction = _in_range(lambda number: 0 < number <= 1, "be greater than 0 and at most 1")


def positive_float32(name: str, value: object) -> float:
    """Returns a number that is positive and finite in float32, too, and no subnormal one there."""
    number = positive(name, value)
    limits = np.finfo(np.float32)
    smallest, largest = float(limits.tiny), float(limits.max)
    if not smallest <= number <= largest:
        limits_of = f"{smallest:.3g} to {largest:.3g}, the limits of float32"
        raise InputError(f"{name} must be from {limits_of}, found {number:g}")
    return number


def positive_int(name: str, value: object) -> int:
    """Returns `value` as an int from 1 to 2^63 - 1; refuses floats, even whole ones."""
    return _whole(name, value, 1, 63)


def non_negative_int(name: str, value: object) -> int:
    """Returns `value` as an int from 0 to 2^128 - 1, which is also the range of seeds."""
    return _whole(name, value, 0, 128)


def _whole(name: str, value: object, least: int, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, found {value!r}")
    if value < least:
        raise InputError(f"{name} must be at least {least}, found {value!r}")
    # A number of thousands of digits cannot be printed.
    if int(value) >= 2**bits:
        raise InputError(f"{name} must be below 2^{bits}, found a larger number")
    return int(value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise InputError(f"{name} must be one of {choices}, found {value!r}")
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """Proposes the one of some names that is most like an unknown one; "" if none is like it."""
    near = difflib.get_close_matches(name, [*names], 1, 0.5)
    return f" (did you mean {near[0]!r}?)" if near and near[0] != name else ""


def instance(name: str, value: Any, kind: type[_T] | tuple[type[_T], ...], hint: str) -> _T:
    """Returns `value`, which must be a `kind`; `hint` says how a caller gets one."""
    if not isinstance(value, kind):
        raise InputError(f"{name} must be {hint}, found {type(value).__name__}")
    return value


def arguments(name: str, function: Any, wanted: str) -> None:
    """Refuses anything but a function of the arguments `wanted`, such as "(params, batch)"."""
    try:
        inspect.signature(function).bind(*wanted.split(", "))
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{name} must be a function of {wanted}: {reason}") from None


def machine_memory() -> int:
    """The memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fits_memory(what: str, size: int) -> None:
    """Refuses `what`, of `size` bytes, if this machine does not have so much memory."""
    memory = machine_memory()
    if size > memory:
        here = f"this machine has {memory >> 30:,} GiB of memory"
        raise InputError(f"{what} would take {size >> 30:,} GiB, but {here}")
