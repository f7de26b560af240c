"""Rows of a benchmark beside the last stored rows of the same machine that measured the same.

A row's numbers with a fraction, and rates, are what was measured; its words, truth values and whole
numbers are the setting. Two rows measured the same if their settings, machine and device are equal;
versions and dates may differ.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]

CONTEXT = ("date", "python", "jax", "jaxlib", "flax")
_PLACE = ("device", "machine")

# The measure that stands for a row: the first of these that it has. Of rates more is better.
_RATES = ("GFLOP/s", "GB/s", "clients/s", "tokens/s", "examples/s", "ours/s", "rows/s", "a minute")
_TIMES = (
    "seconds",
    "seconds a step",
    "ms/client step",
    "ms",
    "milliseconds",
    "blocked",
    "client s",
)


class Compared(NamedTuple):
    """A measure of one row, and of the last stored row that measured the same.

    Attributes:
      setting: what was measured, in words.
      unit: of the measure, such as "seconds" or "GB/s".
      now: its value.
      before: its last stored value, and None if there is none.
      date: of that value.
      better: how many times better than before; above 1 is better, for rates as for times.
    """

    setting: str
    unit: str
    now: float
    before: float | None
    date: str | None
    better: float | None


def compared(rows: Sequence[Row], stored: Sequence[Row]) -> list[Compared]:
    """Each row that has a known measure, beside the last of the stored rows that fits it."""
    last = {_key(row): row for row in stored}
    found = []
    for row in rows:
        unit = next((name for name in (*_RATES, *_TIMES) if _measured(row.get(name))), None)
        if unit is None:
            continue
        now, before = float(row[unit]), last.get(_key(row), {}).get(unit)
        better = None
        if before:
            better = now / before if unit in _RATES else before / now
        date = last[_key(row)]["date"] if before else None
        words = (
            value if isinstance(value, str) else f"{name} {value}"
            for name, value in _setting(row)
            if name not in _PLACE
        )
        setting = ", ".join(words)
        found.append(Compared(setting, unit, now, before, date, better))
    return found


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file of JSON lines; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _measured(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _setting(row: Row) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in row.items()
        if isinstance(value, str | bool | int)
        and name not in CONTEXT
        and name not in _RATES
        and name not in _TIMES
    ]


def _key(row: Row) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(_setting(row), key=lambda pair: pair[0]))
