"""The config of a sweep: one experiment, and the values that some fields of its config take."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.errors import InputError
from jaxpfl.experiments.config.reader import REMOVED, parse_overrides, read_mapping, with_value
from jaxpfl.experiments.registry import config_type, from_mapping

MOST_POINTS = 1_000
CASE = "case"
SEED = "run.seed"
_KEYS = ("base", "metric", "grid", "cases", "gap")


@dataclass(frozen=True)
class Point:
    """One combination of values, and the config of a system that has them.

    Attributes:
      name: name of the point's folder, made of the values that differ between points.
      values: by field; the field "case" has the name of the case, if there are cases.
    """

    name: str
    values: dict[str, Any]
    config: Any


@dataclass(frozen=True)
class Sweep:
    """A grid over the fields of one config.

    Each point calibrates its noise to the epsilon in its own config, and has its own directory and
    ledger. Points that differ only in `run.seed` are repetitions: the table and the figure show
    their mean and standard deviation.

    The file of a sweep:

        base: popri_small.yaml            # a config, relative to the sweep's file
        metric: accuracy                  # what is compared: a name in the points' results
        grid:                             # the values of each field, named as on the command line
          training.clients_per_round: [500, 1000, 2000]
          run.seed: [0, 1, 2]
        cases:                            # optional; each is crossed with the grid
          POPri: {method: popri}
          private evolution: {method: private_evolution}
        gap: {from: public, to: DP-FedAvg}  # optional: two of the cases, see below

    With `gap`, each point states how much of the gap between two cases it closes, in per cent:
    (its metric - that of `from`) / (that of `to` - that of `from`), with all other values,
    including the seed, equal. The standard deviation is that of this ratio. Source: POPri
    (Hou et al. 2025), Table 1.

    Attributes:
      title: the file's name without its suffix.
      gap: names of the cases `from` and `to`, or None.
    """

    title: str
    metric: str
    points: tuple[Point, ...] = field(repr=False)
    gap: tuple[str, str] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the sweep sets, except the seed."""
        return tuple(name for name in self.points[0].values if name != SEED)

    @property
    def varied(self) -> tuple[str, ...]:
        """Those of them with more than one value."""
        return tuple(name for name in self.fields if len(self._values(name)) > 1)

    @property
    def x(self) -> str | None:
        """The field on the figure's horizontal axis: the first that varies in positive numbers."""
        return next((n for n in self.varied if all(map(_positive, self._values(n)))), None)

    def _values(self, name: str) -> list[Any]:
        return list({repr(each.values[name]): each.values[name] for each in self.points}.values())


def load_sweep(
    path: str | Path, overrides: Sequence[str] = (), *, seeds: int | None = None
) -> Sweep:
    """Reads the YAML file of a sweep and builds the config of every point.

    Args:
      overrides: arguments such as `--training.rounds 5`, of the base and in place of all values of
        that field in the grid. A case's own fields hold.
      seeds: every point is repeated with so many seeds, from the first of the file's `run.seed`
        on, or from that of its base, in place of the file's own. None: the file's own.

    Raises:
      InputError: the file or its base cannot be read, a field does not exist, or a value is
        refused at some point. The message names file, point, field and value.
    """
    path = Path(path)
    mapping, where = read_mapping(path), str(path)
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where}: a sweep must be a mapping of keys, found {mapping!r}")
    if "base" not in mapping:
        raise InputError(
            f"{where}: a sweep names its experiment by the key base, found none; what has no base "
            f"is one experiment, for `jaxpfl run`"
        )
    for key in mapping:
        if key not in _KEYS:
            raise InputError(f"{where}: there is no key {key!r}; valid keys: {', '.join(_KEYS)}")
    if "metric" not in mapping:
        raise InputError(f"{where}: the key metric is required, but is missing")
    for key in ("base", "metric"):
        if not isinstance(mapping.get(key), str):
            raise InputError(f"{where}: {key} must be text, found {mapping.get(key)!r}")
    grid, cases = _grid(mapping.get("grid"), where), _cases(mapping.get("cases"), where)
    base = read_mapping(path.parent / mapping["base"])
    for name, value in parse_overrides(config_type(base, where), overrides).items():
        if name in grid:
            grid[name] = [value]
        base = with_value(base, name, value, f"command line: --{name}")
    if seeds is not None:
        grid = _repeated(grid, cases, base, seeds)
    gap = _gap(mapping.get("gap"), cases, where)
    return Sweep(path.stem, mapping["metric"], _points(base, grid, cases, where), gap)


def _grid(grid: Any, where: str) -> dict[str, list[Any]]:
    if grid is not None and not isinstance(grid, Mapping):
        raise InputError(
            f"{where}: grid must be a mapping of fields to lists of values, found {grid!r}"
        )
    for name, values in (grid or {}).items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{where}: grid.{name} must be a list of values, found {values!r}")
        if len({repr(value) for value in values}) != len(values):
            raise InputError(f"{where}: grid.{name} must not have a value twice, found {values!r}")
    return {str(name): values for name, values in (grid or {}).items()}


def _repeated(
    grid: dict[str, list[Any]], cases: dict[str, dict[str, Any]], base: Any, seeds: int
) -> dict[str, list[Any]]:
    """The grid with this number of seeds."""
    if checks.positive_int("--seeds", seeds) > MOST_POINTS:
        raise InputError(f"--seeds must be at most {MOST_POINTS}, found {seeds}")
    for name, fields in cases.items():
        if SEED in fields:
            raise InputError(f"--seeds needs cases without {SEED}, found it in the case {name!r}")
    run = base.get("run") if isinstance(base, Mapping) else None
    first = grid.get(SEED, [run.get("seed", 0) if isinstance(run, Mapping) else 0])[0]
    checks.non_negative_int(SEED, first)
    others = {name: values for name, values in grid.items() if name != SEED}
    return {**others, SEED: [first + number for number in range(seeds)]}


def _cases(cases: Any, where: str) -> dict[str, dict[str, Any]]:
    if cases is None:
        return {}
    if not isinstance(cases, Mapping) or not cases:
        raise InputError(
            f"{where}: cases must be a mapping of names to fields, at least one, found {cases!r}"
        )
    for name, fields in cases.items():
        if not isinstance(name, str) or not isinstance(fields, Mapping):
            raise InputError(
                f"{where}: a case must be a name and a mapping of fields to values, found "
                f"{name!r}: {fields!r}"
            )
    return {name: dict(fields) for name, fields in cases.items()}


def _gap(gap: Any, cases: dict[str, dict[str, Any]], where: str) -> tuple[str, str] | None:
    if gap is None:
        return None
    if not isinstance(gap, Mapping) or set(gap) != {"from", "to"}:
        raise InputError(f"{where}: gap must be {{from: CASE, to: CASE}}, found {gap!r}")
    if not cases:
        raise InputError(f"{where}: gap needs cases to compare, found none")
    for end in ("from", "to"):
        checks.one_of(f"{where}: gap.{end}", gap[end], tuple(cases))
    if gap["from"] == gap["to"]:
        raise InputError(f"{where}: gap.from and gap.to must differ, found {gap['to']!r} twice")
    return gap["from"], gap["to"]


def _points(
    base: Any, grid: dict[str, list[Any]], cases: dict[str, dict[str, Any]], where: str
) -> tuple[Point, ...]:
    varied = [CASE, *(name for name, each in grid.items() if len(each) > 1)]
    points = []
    for case, *combination in itertools.product(cases or [None], *grid.values()):
        fields = dict(cases[case]) if case is not None else {}
        both = sorted(fields.keys() & grid.keys())
        if both:
            raise InputError(
                f"{where}: {both[0]} must be in grid or in a case, found it in grid and in the "
                f"case {case!r}"
            )
        values = dict(zip(grid, combination, strict=True))
        fields |= values
        values = values if case is None else {CASE: case, **values}
        at = ", ".join(f"{name} = {value}" for name, value in values.items()) or "its point"
        mapping = base
        for name, value in fields.items():
            # A null in a sweep's file stands for the default.
            wanted = REMOVED if value is None else value
            mapping = with_value(mapping, str(name), wanted, f"{where}: at {at}: {name}")
        config = from_mapping(mapping, f"{where}: at {at}")
        privacy = getattr(config, "privacy", None)
        if privacy is not None and privacy.ledger is not None:
            raise InputError(
                f"{where}: at {at}: privacy.ledger must be absent in a sweep, because every "
                "point has a ledger of its own"
            )
        parts = [f"{n.rsplit('.', 1)[-1]}={value}" for n, value in values.items() if n in varied]
        name = re.sub(r"[^\w.=,+-]+", "_", ",".join(parts)) or "point"
        points.append(Point(name, values, config))
        if len(points) > MOST_POINTS:
            raise InputError(f"{where}: a sweep must have at most {MOST_POINTS} points, found more")
    if len({point.name for point in points}) != len(points):
        raise InputError(
            f"{where}: the points of a sweep must have different names, found two with one name: "
            "names are made of values in which only letters, digits and . = , + - count"
        )
    return tuple(points)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
