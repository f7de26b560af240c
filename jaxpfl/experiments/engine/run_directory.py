"""The directory of one run: what it is, its secret while it needs one, and what it ends with.

run.json                 what the run is, written before its first charge, see `run_record`
private/secret.json      until the run is finished, see `run_secret`
metrics.jsonl, tensorboard/, private/rounds.jsonl          see `observers`
checkpoints/             see `checkpoint`
result.json              statement and last metrics, when the run stops
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.engine.checkpoint import Checkpoints
from jaxpfl.experiments.engine.cost import stamped
from jaxpfl.experiments.engine.run_record import RunRecord, stamp_of
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.experiments.engine.setting import Setting, Tracking


class RunDirectory:
    """The files that make a directory a run's; its lock is held by the caller.

    Args:
      path: of the directory.
      algorithm, population, setting: the run.
      resume: goes on with the run in the directory, else refuses to touch it.

    Attributes:
      begun: whether an earlier attempt wrote `run.json`.
      secret: of noise and cohorts; None for a finished run, which needs none.
      run_id: the run's name in its ledger.
      stamp: NOT PRIVATE and why, or ""; read back, so that what was stamped stays so.

    Raises:
      InputError: the directory holds another run, or one that is not to be resumed.
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
        self._setting = setting
        self._rounds = algorithm.rounds
        self._secret_path = files.private_directory(path / "private") / "secret.json"
        self._record = RunRecord(path / "run.json", algorithm, population, setting)
        record = self._record.begun()
        if record is not None and not resume:
            raise InputError(f"{path}: holds a run already; resume it or choose another --out")
        self.begun = record is not None
        self.secret = None
        if self._finished_rounds() < algorithm.rounds:
            self.secret = saved_secret(
                self._secret_path,
                reproducible_seed=setting.seed if setting.reproducible_noise else None,
                purpose=algorithm.name,
                begun=self.begun,
            )
        if record is None:
            if self.secret is None:
                raise CorruptFile(f"{path / 'result.json'}: is of a finished run without run.json")
            self.run_id, self.stamp = run_id(self.secret), stamp_of(algorithm, setting)
            return
        self.run_id, self.stamp = str(record["run"]), str(record["stamp"])
        if self.secret is not None and run_id(self.secret) != self.run_id:
            raise InputError(
                f"{path / 'run.json'}: is of run {self.run_id}, but the secret in private/ is of "
                "another run: one of the two files was replaced"
            )

    def begin(self, statement: str, tracking: Tracking, ledger_head: str) -> None:
        """Writes `run.json`, unless an earlier attempt did.

        Args:
          statement: what the run will have cost when it ends.
          ledger_head: of the ledger before the first charge.
        """
        if not self.begun:
            self._record.write(self.run_id, self.stamp, statement, tracking, ledger_head)

    def ledger_head(self) -> str:
        """The head of the ledger that the run began with; it goes on with this ledger alone."""
        return files.read_json(self.path / "run.json")["ledger_head"]

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", run=self.run_id, private=not self.stamp)

    def end(self, rounds: int, statement: str, metrics: Mapping[str, Any]) -> str:
        """Writes `result.json`; a run that is finished forgets its secret.

        Returns:
          The statement as it is written there.
        """
        if rounds < self._rounds:
            statement += f", after {rounds} of {self._rounds} rounds"
        statement = stamped(statement, self.stamp, self._setting.note)
        record = {
            "run": self.run_id,
            "rounds": rounds,
            "private": not self.stamp,
            "privacy": statement,
            "metrics": metrics,
        }
        files.write_json(self.path / "result.json", record)
        if rounds == self._rounds:
            forget(self._secret_path)
        return statement

    def _finished_rounds(self) -> int:
        path = self.path / "result.json"
        record = files.read_json(path) if path.exists() else {"rounds": 0}
        rounds = record.get("rounds") if isinstance(record, dict) else None
        if type(rounds) is not int:
            raise CorruptFile(f"{path}: is not the result of a run: it has no number of rounds")
        return rounds
