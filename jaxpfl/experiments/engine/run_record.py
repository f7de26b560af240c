"""`run.json`: what a run is, written before its first charge and compared when it is resumed."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, REPRODUCIBLE, Setting, Tracking
from jaxpfl.federated.release.identity import read_columns
from jaxpfl.models.base import Checking


def described(algorithm: Algorithm, setting: Setting) -> dict[str, Any]:
    """What must be the same when the run is resumed, as JSON data."""
    record: dict[str, Any] = {
        "label": algorithm.name,
        "config": setting.config,
        "seed": setting.seed,
        "queries": [
            {
                "label": query.label,
                "plan": query.plan.to_dict(),
                "cohort": dataclasses.asdict(query.cohort),
            }
            for query in algorithm.queries
        ],
    }
    return files.jsonable(record if setting.start is None else {**record, "start": setting.start})


def begun(path: Path, algorithm: Algorithm, setting: Setting) -> dict[str, Any] | None:
    """Returns the record that an earlier attempt wrote to `path`, or None.

    Raises:
      InputError: it is the record of another run; names the field that differs.
      CorruptFile: it is no record of a run.
    """
    if not path.exists():
        return None
    record = files.read_record(path, {"run": str, "stamp": str})
    expected = described(algorithm, setting)
    for name in sorted(expected.keys() | ({"start"} & record.keys())):
        if record.get(name) != expected.get(name):
            raise InputError(
                f"{path}: the field {name!r} of the run is not what it was when the run began; "
                "resume the run as it began, or choose another --out"
            )
    return record


def stamp_of(algorithm: Algorithm, setting: Setting) -> str:
    """The warning on everything that a run writes whose clients have no guarantee; else ""."""
    if not algorithm.private:
        return NOT_PRIVATE
    found = [REPRODUCIBLE] if setting.reproducible_noise else []
    simulated = [query.plan.simulation for query in algorithm.queries if query.plan.simulates]
    return "; ".join([*found, *simulated[:1]])


def check(algorithm: Algorithm, population: Population, tracking: Tracking) -> None:
    """Refuses a run that cannot be carried out, before any charge.

    Raises:
      InputError: the data does not fit the queries or the model, or there is no model to evaluate.
    """
    if (tracking.evaluate or tracking.sentences) and algorithm.params is None:
        raise InputError(
            f"{algorithm.name!r} trains no model, so nothing can be evaluated: leave out the "
            "evaluation"
        )
    units = {query.plan.unit for query in algorithm.queries}
    if len(units) > 1:
        raise InputError(
            f"all queries of {algorithm.name!r} must protect the same unit, found client and "
            "example"
        )
    if len({query.plan.simulates for query in algorithm.queries}) > 1:
        raise InputError(
            f"all queries of {algorithm.name!r} must simulate the same larger population, or none"
        )
    for query in algorithm.queries:
        plan = query.plan
        held = len(population) if plan.unit == "client" else population.num_examples
        if held != plan.population:
            raise InputError(
                f"the plan is for a population of {plan.population} {plan.unit}s, the data has "
                "another number, for which its epsilon is not valid"
            )
        slots, replicas = query.cohort.capacity, query.execution.replicas
        if slots % replicas:
            raise InputError(
                f"clients_per_bucket = {slots} must be a multiple of {replicas}, the number of "
                "devices that share a cohort, or of copies of the model on them"
            )
        for name in query.columns or ():
            if query.prepare is None and name not in population.columns:
                found = ", ".join(sorted(population.columns)) or "none"
                raise InputError(
                    f"{algorithm.name!r} reads a column {name!r}, but the data has only: {found}"
                )
        if query.prepare is None and isinstance(query.client_fn, Checking):
            query.client_fn.check(read_columns(query, population))
