"""The directory of one run.

run.json                 what the run is, written before its first charge, see `run_record`
private/secret.json      until the run is finished, see `run_secret`
metrics.jsonl, tensorboard/, private/rounds.jsonl          see `observers`
checkpoints/             see `checkpoint`
result.json              statement and last metrics, written when the run stops
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.cost import stamped
from jaxpfl.experiments.engine.run_record import begun, described, stamp_of
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.experiments.engine.setting import Setting, Tracking
from jaxpfl.federated.flow.captured import captured
from jaxpfl.federated.release.identity import environment
from jaxpfl.privacy.ledger import Ledger


class RunDirectory:
    """A run's directory, whose lock the caller holds.

    Args:
      algorithm, population, setting: the run.
      resume: continues the run in the directory; otherwise such a run is refused.

    Attributes:
      begun: whether an earlier attempt wrote `run.json`.
      secret: of noise and cohorts; None for a finished run.
      run_id: the run's name in its ledger.
      stamp: NOT PRIVATE and why, or ""; read back from `run.json`, so that it never disappears.

    Raises:
      InputError: the directory holds another run, or `resume` is false and it holds any run.
      CorruptFile: the secret of an unfinished run is missing or was altered.
    """

    def __init__(
        self,
        path: Path,
        algorithm: Algorithm,
        population: Population,
        setting: Setting,
        *,
        resume: bool,
    ) -> None:
        self.path = path
        self._algorithm, self._population, self._setting = algorithm, population, setting
        self._secret_path = files.private_directory(path / "private") / "secret.json"
        record = begun(path / "run.json", algorithm, setting)
        if record is not None and not resume:
            raise InputError(f"{path}: holds a run already; resume it or choose another --out")
        self.begun = record is not None
        self.secret = None
        if self._finished_rounds() < algorithm.rounds:
            self.secret = saved_secret(
                self._secret_path,
                reproducible_seed=setting.seed if setting.reproducible_noise else None,
                purpose=algorithm.name,
                run=None if record is None else record["run"],
            )
        if record is not None:
            self.run_id, self.stamp = record["run"], record["stamp"]
        elif self.secret is not None:
            self.run_id, self.stamp = run_id(self.secret), stamp_of(algorithm, setting)
        else:
            raise CorruptFile(f"{path}: holds result.json, but its run.json is missing")

    def begin(self, statement: str, tracking: Tracking, ledger_head: str) -> None:
        """Writes `run.json`, unless an earlier attempt did.

        Args:
          statement: the planned guarantee of the whole run.
          ledger_head: of the ledger before the first charge; identifies the ledger on resume.
        """
        if self.begun:
            return
        evaluate = tracking.evaluate
        record = {
            "run": self.run_id,
            "private": not self.stamp,
            "stamp": self.stamp,
            "statement": statement,
            "note": self._setting.note,
            **described(self._algorithm, self._setting),
            "plan": self._algorithm.queries[0].plan.to_dict(),
            # Public by declaration, so that a reader must be able to see what it is.
            "captured": {
                query.label: [*captured(query.client_fn), *captured(query.prepare)]
                for query in self._algorithm.queries
            },
            "evaluation": None if evaluate is None else evaluate.name,
            "unit": self._population.unit,
            "population": self._population.name,
            "ledger_head": ledger_head,
            "devices": jax.device_count(),
            "backend": jax.default_backend(),
            "environment": environment(),
            "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
        }
        files.write_json(self.path / "run.json", record)

    @property
    def evaluated_on(self) -> str | None:
        """Names the data of the evaluation, as `run.json` does; None without one."""
        return files.read_record(self.path / "run.json", {"evaluation": str | None})["evaluation"]

    def end(
        self,
        rounds: int,
        statement: str,
        metrics: Mapping[str, Any],
        epsilons: Mapping[str, float],
        ledger: Ledger,
    ) -> str:
        """Writes `result.json`, deletes a finished run's secret, and returns the statement.

        Args:
          epsilons: of `Cost.epsilons`.
          ledger: of the run; if it was changed from outside, nothing is written or deleted.
        """
        planned = self._algorithm.rounds
        if rounds < planned:
            statement += f", after {rounds} of {planned} rounds"
        statement = stamped(statement, self.stamp, self._setting.note)
        record = {
            "run": self.run_id,
            "rounds": rounds,
            "private": not self.stamp,
            "privacy": statement,
            "epsilons": epsilons,
            "evaluated_on": self.evaluated_on,
            "metrics": metrics,
        }
        ledger.require_unchanged()
        files.write_json(self.path / "result.json", record)
        if rounds == planned:
            forget(self._secret_path, ledger)
        return statement

    def _finished_rounds(self) -> int:
        path = self.path / "result.json"
        return files.read_record(path, {"rounds": int})["rounds"] if path.exists() else 0
