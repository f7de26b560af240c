"""Prints the lowest version of each of the core's dependencies that pyproject.toml allows.

python tools/oldest.py > constraints      for `pip install --constraint constraints .`
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BOUND = re.compile(r"([\w-]+)(?:>=|==)([\d.]+)(?:,<[\d.]+)?")


def lowest() -> list[str]:
    """`name==version` of each dependency; raises `ValueError` for one without a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = {each: _BOUND.fullmatch(each) for each in project["dependencies"]}
    if unbounded := [each for each, match in found.items() if match is None]:
        raise ValueError(f"pyproject.toml: no lowest version of {', '.join(unbounded)}")
    return ["==".join(match.groups()) for match in found.values() if match is not None]


if __name__ == "__main__":
    print("\n".join(lowest()))
