"""The type of a setting says which values it may have."""

from dataclasses import dataclass
from typing import Literal

import pytest

from jaxpfl.checked import Checked, NonNegative, PositiveInt
from jaxpfl.errors import InputError


@dataclass(frozen=True)
class Settings(Checked):
    steps: PositiveInt = 1
    ladder: tuple[PositiveInt, ...] | None = None
    decay: NonNegative | None = None
    kind: Literal["flat", "per_layer"] | None = "flat"
    shape: tuple[PositiveInt, PositiveInt] = (1, 1)


@pytest.mark.parametrize(
    "given",
    [{}, {"ladder": (1, 2), "decay": 0, "kind": None}, {"ladder": [1, 2], "kind": "per_layer"}],
)
def test_what_a_type_allows_is_taken_as_it_is(given):
    found = Settings(**given)
    assert {name: getattr(found, name) for name in given} == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", True),
        ("steps", 1.0),
        ("steps", (1, 2)),
        ("ladder", (1, 0)),
        ("ladder", [1, 2.5]),
        ("decay", float("nan")),
        ("decay", "1"),
        ("kind", "round"),
        ("kind", ("flat",)),
        ("shape", (1, 0)),
    ],
)
def test_what_it_excludes_is_refused_by_the_name_of_the_field(name, value):
    with pytest.raises(InputError, match=f"^{name} must be"):
        Settings(**{name: value})
