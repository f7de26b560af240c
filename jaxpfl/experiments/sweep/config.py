"""What a sweep is: one experiment, and the values that some of its fields take in turn."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.reader import read_mapping
from jaxpfl.experiments.registry import from_mapping

MOST_POINTS = 1_000
CASE = "case"
_KEYS = ("base", "metric", "grid", "cases", "x", "line", "over", "gap")


@dataclass(frozen=True)
class Point:
    """One combination of the sweep's values, and the config it makes.

    Attributes:
      name: a folder's name that says the values of what varies.
      values: by field; "case" names the case, where there are cases.
    """

    name: str
    values: dict[str, Any]
    config: Any


@dataclass(frozen=True)
class Sweep:
    """A grid over the fields of one config.

    A point is one combination of values; it calibrates its own noise to the epsilon in its config,
    and has a directory and a ledger of its own. Points that differ in `over` alone are
    repetitions: table and plot show their mean and its standard error.

    In the file:

        base: popri_small.yaml            # a config, relative to the sweep's file
        metric: accuracy                  # compared: a name in the points' results
        grid:                             # field, as on the command line -> its values
          training.clients_per_round: [500, 1000, 2000]
          run.seed: [0, 1, 2]
        cases:                            # optional; each is crossed with the grid
          POPri: {method: popri}
          private evolution: {method: private_evolution}
        x: training.clients_per_round     # optional: the plot's horizontal axis
        line: case                        # optional: a line for each of its values
        over: run.seed                    # optional: what repetitions differ in
        gap: {from: public, to: DP-FedAvg}  # optional: two of the cases, see below

    With `gap`, every point says how much it closes of the gap between the two cases: in per cent,
    (its metric - that of `from`) / (that of `to` - that of `from`), both at the point's own other
    values, its repetition among them. So the standard error is that of the ratio. Source: POPri
    (Hou et al. 2025), Table 1.

    Attributes:
      title: the file's name without its suffix.
      metric, over: see above.
      points: all of them, checked.
      x: None where no field of the grid has numbers.
      line: None where nothing else varies.
      gap: the names of the cases `from` and `to`.
    """

    title: str
    metric: str
    over: str
    points: tuple[Point, ...] = field(repr=False)
    x: str | None
    line: str | None
    gap: tuple[str, str] | None = None

    @property
    def varied(self) -> tuple[str, ...]:
        """The fields that have more than one value, but not what repetitions differ in."""
        names = self.points[0].values
        return tuple(
            name
            for name in names
            if name != self.over and len({repr(p.values[name]) for p in self.points}) > 1
        )


def load_sweep(path: str | Path) -> Sweep:
    """Reads a sweep's YAML file and makes the config of every point.

    Raises:
      InputError: the file or its base cannot be read, a field does not exist, a value is refused
        at some point; the sentence names file, point, field and value.
    """
    path = Path(path)
    mapping, where = read_mapping(path), str(path)
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where}: a sweep must be a mapping of keys")
    for key in mapping:
        if key not in _KEYS:
            raise InputError(f"{where}: there is no key {key!r}; valid: {', '.join(_KEYS)}")
    for key in ("base", "metric"):
        if key not in mapping:
            raise InputError(f"{where}: {key} is required, found nothing")
    for key in ("base", "metric", "x", "line", "over"):
        if mapping.get(key) is not None and not isinstance(mapping[key], str):
            raise InputError(f"{where}: {key} must be text, found {mapping[key]!r}")
    grid, cases = _grid(mapping.get("grid"), where), _cases(mapping.get("cases"), where)
    over = mapping.get("over") or "run.seed"
    points = _points(read_mapping(path.parent / mapping["base"]), grid, cases, where)
    fields = [CASE, *grid] if cases else list(grid)
    for name in ("x", "line"):
        if mapping.get(name) is not None and mapping[name] not in fields:
            raise InputError(
                f"{where}: {name} must be one of {', '.join(map(repr, fields))}, found "
                f"{mapping[name]!r}"
            )
    free = [name for name in fields if name != over]
    x = mapping.get("x") or next(
        (
            n
            for n in free
            if n in grid and n != mapping.get("line") and len(grid[n]) > 1 and _numbers(grid[n])
        ),
        None,
    )
    if x is not None and not (x in grid and _numbers(grid[x])):
        raise InputError(f"{where}: x = {x!r} must have positive numbers as values")
    line = mapping.get("line") or next((name for name in free if name != x), None)
    gap = _gap(mapping.get("gap"), cases, over, where)
    return Sweep(path.stem, mapping["metric"], over, points, x, line, gap)


def _grid(grid: Any, where: str) -> dict[str, list[Any]]:
    if grid is None:
        return {}
    if not isinstance(grid, Mapping):
        raise InputError(f"{where}: grid must be a mapping of fields to lists, found {grid!r}")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}: grid.{name} must be a list of values, found {values!r}")
        if len({repr(value) for value in values}) != len(values):
            raise InputError(f"{where}: grid.{name} has a value twice: {values!r}")
    return {str(name): values for name, values in grid.items()}


def _cases(cases: Any, where: str) -> dict[str, dict[str, Any]]:
    if cases is None:
        return {}
    if not isinstance(cases, Mapping) or not cases:
        raise InputError(f"{where}: cases must be a mapping of names, found {cases!r}")
    for name, fields in cases.items():
        if not isinstance(name, str) or not isinstance(fields, Mapping):
            raise InputError(
                f"{where}: a case must be a name and a mapping of fields to values, found "
                f"{name!r}: {fields!r}"
            )
    return {name: dict(fields) for name, fields in cases.items()}


def _gap(
    gap: Any, cases: dict[str, dict[str, Any]], over: str, where: str
) -> tuple[str, str] | None:
    if gap is None:
        return None
    if not isinstance(gap, Mapping) or set(gap) != {"from", "to"}:
        raise InputError(f"{where}: gap must be {{from: CASE, to: CASE}}, found {gap!r}")
    if not cases or over == CASE:
        raise InputError(f"{where}: gap needs cases, and another field than 'case' as over")
    for end in ("from", "to"):
        checks.one_of(f"{where}: gap.{end}", gap[end], tuple(cases))
    if gap["from"] == gap["to"]:
        raise InputError(f"{where}: gap.from and gap.to must differ, found {gap['to']!r} twice")
    return gap["from"], gap["to"]


def _points(
    base: Any, grid: dict[str, list[Any]], cases: dict[str, dict[str, Any]], where: str
) -> tuple[Point, ...]:
    combinations = itertools.product(cases or [None], *grid.values())
    varied = [CASE, *(name for name, each in grid.items() if len(each) > 1)]
    points = []
    for case, *combination in combinations:
        fields = dict(cases[case]) if case is not None else {}
        values: dict[str, Any] = {} if case is None else {CASE: case}
        for name, value in zip(grid, combination, strict=True):
            if name in fields:
                raise InputError(f"{where}: {name} is in grid and in the case {case!r}")
            fields[name] = values[name] = value
        told = ", ".join(f"{name} = {value}" for name, value in values.items()) or "its point"
        mapping = base
        for name, value in fields.items():
            mapping = _set(mapping, str(name).split("."), value, f"{where}: at {told}: {name}")
        config = from_mapping(mapping, f"{where}: at {told}")
        privacy = getattr(config, "privacy", None)
        if privacy is not None and privacy.ledger is not None:
            raise InputError(
                f"{where}: at {told}: privacy.ledger must be absent in a sweep, where every point "
                "has a ledger of its own"
            )
        parts = [
            f"{name.rsplit('.', 1)[-1]}={value}" for name, value in values.items() if name in varied
        ]
        name = re.sub(r"[^\w.=,+-]+", "_", ",".join(parts)) or "point"
        points.append(Point(name, values, config))
        if len(points) > MOST_POINTS:
            raise InputError(f"{where}: a sweep has at most {MOST_POINTS} points")
    if len({point.name for point in points}) != len(points):
        raise InputError(f"{where}: two points of the sweep would have the same name")
    return tuple(points)


def _set(mapping: Any, path: list[str], value: Any, where: str) -> dict[str, Any]:
    """A copy of `mapping` with one field set; null removes it, so that its default holds."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where}: {path[0]!r} is in no section of the base config")
    changed = dict(mapping)
    if len(path) > 1:
        changed[path[0]] = _set(changed.get(path[0], {}), path[1:], value, where)
    elif value is None:
        changed.pop(path[0], None)
    else:
        changed[path[0]] = value
    return changed


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in values)
