"""The config of a sweep: one experiment, and the values that some fields of its config take."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpfl import checks, files
from jaxpfl.checked import Checked, Positive
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import reader
from jaxpfl.experiments.config.reader import parse_overrides, read_mapping, with_value
from jaxpfl.experiments.registry import config_type, from_mapping
from jaxpfl.privacy.selection import Law

MOST_POINTS = 1_000
CASE = "case"
SEED = "run.seed"
OF = "of"
"""What the values of a metric are of, where a run has several: corpora, GANs, shares of a bug."""


@dataclass(frozen=True)
class SelectionConfig(Checked):
    """The law of the secret number of points that `--private-selection` tries, and its mean.

    "geometric" and "logarithmic", which costs less and tries a single point more often, are at
    least 1; "poisson" varies least, and may be 0. A mean of None: the number of points in the grid.
    """

    law: Law = "geometric"
    mean: Positive | None = None

    def check_fields(self) -> None:
        if self.mean is not None:
            checks.at_least_one("selection.mean", self.mean)


@dataclass(frozen=True)
class _File:
    base: str
    metric: str
    grid: dict[str, tuple[Any, ...]] | None = None
    cases: Any = None
    gap: dict[str, str] | None = None
    selection: SelectionConfig = SelectionConfig()


@dataclass(frozen=True)
class Point:
    """A combination of values by field (or "case"), its folder's name, and a system's config."""

    name: str
    values: dict[str, Any]
    config: Any


@dataclass(frozen=True)
class Sweep:
    """A grid over the fields of one config; docs/sweeps.md shows its file.

    Each point calibrates its noise to the epsilon in its own config, and has its own directory and
    ledger. Points that differ only in `run.seed` are repetitions: the table and the figure show
    their mean and standard deviation.

    Attributes:
      gap: names of the cases `from` and `to` of `results.gap_closed`, or None.
      ledger: the file that all points charge, where their configs name one.
    """

    title: str  # the file's name without its suffix
    metric: str
    points: tuple[Point, ...] = field(repr=False)
    gap: tuple[str, str] | None = None
    ledger: Path | None = None
    selection: SelectionConfig = SelectionConfig()

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
        for name in self.varied:
            if all(type(value) in (int, float) and value > 0 for value in self._values(name)):
                return name
        return None

    def _values(self, name: str) -> list[Any]:
        return list({repr(p.values[name]): p.values[name] for p in self.points}.values())


def load_sweep(
    path: str | Path, overrides: Sequence[str] = (), *, seeds: int | None = None
) -> Sweep:
    """Reads the YAML file of a sweep and builds the config of every point.

    `overrides`, such as `--training.rounds 5`, are of the base, and in place of all values of that
    field in the grid; a case's own fields hold. Every point is repeated with so many `seeds`, from
    the first of the file's `run.seed` on, or that of its base; None: with the file's own.
    """
    path = files.user_path(path)
    mapping, where = read_mapping(path), str(path)
    if isinstance(mapping, Mapping) and "base" not in mapping:
        other = "found none; what has no base is one experiment, for `jaxpfl run`"
        raise InputError(f"{where}: a sweep names its experiment by the key base, {other}")
    file = reader.from_mapping(mapping, where, _File)
    grid: dict[str, Sequence[Any]] = dict(file.grid or {})
    for name, values in grid.items():
        if len(set(map(repr, values))) < len(values):
            expected = f"grid.{name} must be a list of values, none of them twice"
            raise InputError(f"{where}: {expected}, found {list(values)}")
    pairs = file.cases.items() if isinstance(file.cases, Mapping) else ()
    valid = [isinstance(name, str) and isinstance(fields, Mapping) for name, fields in pairs]
    if file.cases is not None and not (valid and all(valid)):
        form = "a mapping of names, at least one, each to a mapping of fields to values"
        raise InputError(f"{where}: cases must be {form}, found {file.cases!r}")
    cases = {name: dict(fields) for name, fields in pairs}
    # A case may be of another experiment.
    bases = {case: fields.pop("base", file.base) for case, fields in cases.items()}
    bases = {None: file.base, **bases}
    for case, name in bases.items():
        base = read_mapping(path.parent / str(name))
        for key, value in parse_overrides(config_type(base, where), overrides).items():
            if key in grid:
                grid[key] = [value]
            base = with_value(base, key, value, f"command line: --{key}")
        bases[case] = base
    if seeds is not None:
        run = bases[None].get("run") if isinstance(bases[None], Mapping) else None
        given = run.get("seed", 0) if isinstance(run, Mapping) else 0
        first = checks.non_negative_int(SEED, grid.pop(SEED, [given])[0])
        number = min(checks.positive_int("--seeds", seeds), MOST_POINTS + 1)
        grid[SEED] = range(first, first + number)
    gap = None
    if (ends := file.gap) is not None:
        if set(ends) != {"from", "to"} or ends["from"] == ends["to"]:
            form = "{from: CASE, to: CASE}, two cases"
            raise InputError(f"{where}: gap must be {form}, found {ends!r}")
        for end, case in ends.items():
            checks.one_of(f"{where}: gap.{end}", case, tuple(cases))
        gap = ends["from"], ends["to"]
    points = _points(bases, grid, cases, where)
    ledger = _checked(points, file.metric, where)
    return Sweep(path.stem, file.metric, points, gap, ledger, file.selection)


def _checked(points: Sequence[Point], metric: str, where: str) -> Path | None:
    """The ledger that all points name, or None; refuses a metric that one of them will not have."""
    for point in points:
        if metric not in (metrics := getattr(point.config, "metrics", [metric])):
            names = f"in the results of {point.name}, one of {', '.join(sorted(metrics))}"
            raise InputError(f"{where}: metric must be a number {names}, found {metric!r}")
    privacy = (getattr(point.config, "privacy", None) for point in points)
    ledgers = {section and section.ledger for section in privacy}
    if len(ledgers) > 1:
        form = f"absent, or the same at all points, found {len(ledgers)} different ones"
        raise InputError(f"{where}: privacy.ledger must be {form}")
    ledger = ledgers.pop()
    return ledger and files.user_path(ledger)


def _points(
    bases: Mapping[Any, Any], grid: dict[str, Sequence], cases: dict[str, dict], where: str
) -> tuple[Point, ...]:
    if math.prod(map(len, grid.values())) * max(1, len(cases)) > MOST_POINTS:
        raise InputError(f"{where}: a sweep must have at most {MOST_POINTS} points, found more")
    varied = [CASE, *(name for name, values in grid.items() if len(values) > 1)]
    points: dict[str, Point] = {}
    for case, *combination in itertools.product(cases or [None], *grid.values()):
        fields = dict(cases[case]) if case is not None else {}
        for both in sorted(fields.keys() & grid.keys()):
            raise InputError(f"{where}: {both} is in grid and in the case {case!r}, expected one")
        values = dict(zip(grid, combination, strict=True))
        fields |= values
        values = values if case is None else {CASE: case, **values}
        at = ", ".join(f"{name} = {value}" for name, value in values.items()) or "its point"
        mapping = bases[case]
        for name, value in fields.items():
            mapping = with_value(mapping, str(name), value, f"{where}: at {at}: {name}")
        config = from_mapping(mapping, f"{where}: at {at}")
        parts = [f"{n.rsplit('.', 1)[-1]}={value}" for n, value in values.items() if n in varied]
        name = re.sub(r"[^\w.=,+-]+", "_", ",".join(parts)) or "point"
        if name in points:
            only = "names are made of values in which only letters, digits and . = , + - count"
            what = f"the points of a sweep must have different names, found {name!r} twice"
            raise InputError(f"{where}: {what}: {only}")
        points[name] = Point(name, values, config)
    return tuple(points.values())
