"""`run.json`: what a run is, written before its first charge and compared when it is resumed."""

import dataclasses
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.setting import NOT_PRIVATE, REPRODUCIBLE, Setting, Tracking
from jaxpfl.federated.identity import environment


@dataclass(frozen=True)
class RunRecord:
    """The record of the run of `algorithm` on `population`; `path` is that of `run.json`."""

    path: Path
    algorithm: Algorithm
    population: Population
    setting: Setting

    def begun(self) -> dict[str, Any] | None:
        """Returns what an earlier attempt wrote, or None.

        Raises:
          InputError: it is the record of another run; names the field that differs.
        """
        if not self.path.exists():
            return None
        begun, described = files.read_json(self.path), files.jsonable(self._described())
        for name in sorted(described.keys() | ({"start"} & begun.keys())):
            if begun.get(name) != described.get(name):
                raise InputError(
                    f"{self.path}: the field {name!r} of the run is not what it was when the run "
                    "began; resume the run as it began, or choose another --out"
                )
        return begun

    def write(
        self, run: str, stamp: str, statement: str, tracking: Tracking, ledger_head: str
    ) -> None:
        """Writes the file.

        Args:
          run: the run's name in its ledger.
          stamp: NOT PRIVATE and why, or "".
          statement: the planned guarantee of the whole run.
          ledger_head: of the ledger before the first charge; identifies the ledger on resume.
        """
        evaluate = tracking.evaluate
        record = {
            "run": run,
            "private": not stamp,
            "stamp": stamp,
            "statement": statement,
            "note": self.setting.note,
            **self._described(),
            "plan": self.algorithm.queries[0].plan.to_dict(),
            "evaluation": None if evaluate is None else evaluate.name,
            "unit": self.population.unit,
            "population": self.population.name,
            "ledger_head": ledger_head,
            "devices": jax.device_count(),
            "backend": jax.default_backend(),
            "environment": environment(),
            "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
        }
        files.write_json(self.path, record)

    def _described(self) -> dict[str, Any]:
        """What must be the same when the run is resumed."""
        described: dict[str, Any] = {
            "label": self.algorithm.name,
            "config": self.setting.config,
            "seed": self.setting.seed,
            "queries": [
                {
                    "label": query.label,
                    "plan": query.plan.to_dict(),
                    "cohort": dataclasses.asdict(query.cohort),
                }
                for query in self.algorithm.queries
            ],
        }
        start = self.setting.start
        return described if start is None else {**described, "start": start}


def stamp_of(algorithm: Algorithm, setting: Setting) -> str:
    """The warning on everything that a run without privacy writes; "" for a private run."""
    if not algorithm.private:
        return NOT_PRIVATE
    return REPRODUCIBLE if setting.reproducible_noise else ""


def check(algorithm: Algorithm, population: Population, tracking: Tracking) -> None:
    """Refuses a run that cannot be carried out, before any charge.

    Raises:
      InputError: the data does not fit the queries, or there is no model to evaluate.
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
    for query in algorithm.queries:
        plan = query.plan
        held = len(population) if plan.unit == "client" else population.num_examples
        if held != plan.population:
            raise InputError(
                f"the plan is for a population of {plan.population} {plan.unit}s, the data has "
                f"{held}: an epsilon is only true for its own population"
            )
        slots, devices = query.cohort.clients_per_bucket, query.execution.devices.size
        if slots % devices:
            raise InputError(
                f"clients_per_bucket = {slots} must be a multiple of the {devices} devices that "
                "share a cohort"
            )
        for name in query.columns or ():
            if query.prepare is None and name not in population.columns:
                found = ", ".join(sorted(population.columns)) or "none"
                raise InputError(
                    f"{algorithm.name!r} reads a column {name!r}, but the data has only: {found}"
                )
