"""The loop over rounds: one for a fresh run, a resumed one, and the one without privacy beside it.

    for each round r:
        step                                   its releases are charged on the disk BEFORE any
                                               client's data is read (`federated.release`)
        write the metrics of round r - 1       the device never waits for the host
        every so often: evaluate, checkpoint

What a crash can leave behind is a ledger ahead of the metrics, and metrics ahead of the
checkpoint. A resumed run therefore replays the rounds after its checkpoint. With the saved secret
a replayed round makes the same release, which costs nothing more; one that comes out otherwise is
another release, and the releaser charges it. What the run cost is therefore read from its ledger.

Rounds count from 1: round r leads from the state after r - 1 rounds to the state after r.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.data.population import Population
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments.engine.checkpoint import Checkpoints
from jaxpfl.experiments.engine.cost import Cost, stamped
from jaxpfl.experiments.engine.evaluate import Pending
from jaxpfl.experiments.engine.run_record import RunRecord, check, stamp_of
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.experiments.engine.setting import Result, Setting, Tracking
from jaxpfl.experiments.engine.signals import Interrupted, caught_signals
from jaxpfl.experiments.engine.tracking import (
    MetricsFile,
    PrivateLog,
    Progress,
    TensorBoard,
    jsonable,
)
from jaxpfl.federated.release import Releaser
from jaxpfl.privacy.keys import INITIAL_STATE, training_root
from jaxpfl.privacy.ledger import Budget, Ledger


@dataclass(frozen=True)
class _Late:
    """A round that was dispatched and whose metrics are not yet fetched."""

    round: int
    due: bool
    metrics: Mapping[str, Any]
    evaluation: Pending | None
    sentences: list[str] | None


class Loop:
    """One run in one directory, whose lock the caller holds.

    Args:
      algorithm, population: what asks, and whom.
      directory: the run directory.
      ledger: file charged before every release.
      budget: hard limit of the whole ledger, or None.
      tracking: evaluation and checkpoints.
      setting: all else that the run is.
      resume: continues what is in `directory`, else refuses to touch an earlier run.

    Raises:
      InputError: the data does not fit the plan or model, or the directory holds another run.
      CorruptFile: the secret of an unfinished run is missing or altered.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        population: Population,
        *,
        directory: Path,
        ledger: str | Path,
        budget: Budget | None,
        tracking: Tracking,
        setting: Setting,
        resume: bool,
    ) -> None:
        check(algorithm, population, tracking)
        self.algorithm = algorithm
        self.population = population
        self.directory = directory
        self.tracking = tracking
        self.setting = setting
        self._ledger_path, self._budget = ledger, budget
        self._secret_path = files.private_directory(directory / "private") / "secret.json"
        self._shown: dict[str, str] = {}
        self._record_of_run = RunRecord(directory / "run.json", algorithm, population, setting)
        begun = self._record_of_run.begun()
        if begun is not None and not resume:
            raise InputError(f"{directory}: holds a run already; resume it or choose another --out")
        self._begun = begun is not None
        # A finished run has no secret and needs none.
        self._secret = None
        if self._finished_rounds() < algorithm.rounds:
            self._secret = saved_secret(
                self._secret_path,
                reproducible_seed=setting.seed if setting.reproducible_noise else None,
                purpose=algorithm.name,
                begun=self._begun,
            )
        if begun is None:
            assert self._secret is not None
            self.run_id = run_id(self._secret)
            self.stamp = stamp_of(algorithm, setting)
            return
        # Read back: what was stamped stays so.
        self.run_id, self.stamp = str(begun["run"]), str(begun["stamp"])
        if self._secret is not None and run_id(self._secret) != self.run_id:
            raise InputError(
                f"{directory / 'run.json'}: is of run {self.run_id}, the secret in private/ of "
                "another: one of them was replaced"
            )

    def run(self) -> Result:
        """Does the rounds that are left; see the head of this file.

        Raises:
          BudgetExhausted: the next round does not fit; the rounds before are saved.
          Interrupted: SIGTERM or SIGINT came; the rounds so far are saved.
        """
        algorithm, every = self.algorithm, self.tracking.checkpoint_every
        with ExitStack() as stack:
            signals = stack.enter_context(caught_signals())
            self._progress = stack.enter_context(self._bar())
            self.ledger = stack.enter_context(
                Ledger(
                    self._ledger_path,
                    self.population,
                    budget=self._budget,
                    unit=self.algorithm.queries[0].plan.unit,
                )
            )
            self._cost = Cost(self.ledger, self.algorithm, self.run_id, self.setting.prior)
            if not self._begun:
                self._record_of_run.write(
                    self.run_id, self.stamp, self._cost.planned(), self.tracking, self.ledger.head
                )
            checkpoints = Checkpoints(
                self.directory / "checkpoints", run=self.run_id, private=not self.stamp
            )
            state, done = self._start(checkpoints)
            saved = done
            self._open_files(stack, done)
            releaser = self._releaser()
            late = None if done else self._observe(0, {}, state)
            failure: BaseException | None = None
            while done < algorithm.rounds and failure is None:
                assert releaser is not None
                try:
                    state, metrics = releaser.step(algorithm.step, state, done + 1)
                except BudgetExhausted as error:
                    failure = error
                else:
                    done += 1
                # If this raises, the last round may not be released: nothing of it is saved.
                self._record(late, releaser)
                late = None if failure else self._observe(done, metrics, state)
                if signals and failure is None:
                    again = f"jaxpfl resume {self.setting.resumed_as or self.directory}"
                    failure = Interrupted(
                        signals[0], f"interrupted after round {done}; go on with: {again}"
                    )
                stop = failure is not None or done == algorithm.rounds
                if done != saved and (stop or done % every == 0):
                    self._record(late, releaser)
                    late = None
                    self._metrics.sync()
                    checkpoints.save(done, state, ledger_head=self.ledger.head)
                    saved = done
            self._record(late, releaser)
            result = self._finish(state, done)
            if failure is not None:
                raise failure
            return result

    def _bar(self) -> Progress:
        plan = self.algorithm.queries[0].plan
        name = f"{self.algorithm.name} (NOT PRIVATE)" if self.stamp else self.algorithm.name
        return Progress(
            name,
            rounds=self.algorithm.rounds,
            clients=plan.clients_per_round,
            shown=self.tracking.shown,
        )

    def _releaser(self) -> Releaser | None:
        if self._secret is None:
            return None
        began = time.monotonic()

        def observe(record: dict[str, Any]) -> None:
            self._private.append({**record, "seconds": time.monotonic() - began})

        return Releaser(
            self.population,
            self.ledger,
            self._secret,
            run=self.run_id,
            name=self.algorithm.name,
            queries=self.algorithm.queries,
            warn=lambda message: self._progress.message(f"warning: {message}"),
            observe=observe,
        )

    def _finished_rounds(self) -> int:
        path = self.directory / "result.json"
        return files.read_json(path).get("rounds", 0) if path.exists() else 0

    def _start(self, checkpoints: Checkpoints) -> tuple[Any, int]:
        """The state to go on from and the rounds behind it; the ledger must lead up to it."""
        state = initial_state(self.algorithm, self.setting.seed)
        restored = checkpoints.restore(state, warn=self._progress.message)
        if self._secret is None and (restored is None or restored.round < self.algorithm.rounds):
            raise CorruptFile(
                f"{self.directory}/checkpoints: the run is finished and its secret is gone, so no "
                "round can be repeated, but its last checkpoint is missing or damaged"
            )
        if restored is None:
            # A run goes on with the ledger that it began with, also before its first checkpoint.
            begun = files.read_json(self.directory / "run.json")
            self.ledger.verify(begun["ledger_head"])
            return state, 0
        # A ledger cut off after the checkpoint would be charged too little.
        self.ledger.verify(restored.ledger_head)
        state = jax.tree.map(
            lambda new, old: (
                jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else np.asarray(new)
            ),
            restored.state,
            state,
        )
        self._progress.message(f"resumed after round {restored.round}")
        return state, restored.round

    def _open_files(self, stack: ExitStack, done: int) -> None:
        self._metrics = MetricsFile(self.directory / "metrics.jsonl")
        stack.callback(self._metrics.close)
        self._tensorboard = TensorBoard(
            self.directory / "tensorboard", resumed_after=done if done else None
        )
        stack.callback(self._tensorboard.close)
        self._private = PrivateLog(self.directory / "private")
        stack.callback(self._private.close)
        self._progress.begin(done)

    def _observe(self, round: int, metrics: Mapping[str, Any], state: Any) -> _Late:
        """Starts what is to be recorded of `round`, without waiting for the device."""
        tracking = self.tracking
        due = round % tracking.evaluate_every == 0 or round == self.algorithm.rounds
        evaluation, sentences = None, None
        if due and self.algorithm.params is not None:
            params = self.algorithm.params(state)
            evaluation = tracking.evaluate(params) if tracking.evaluate else None
            sentences = tracking.sentences(params, round) if tracking.sentences else None
        return _Late(round, due, metrics, evaluation, sentences)

    def _record(self, late: _Late | None, releaser: Releaser | None) -> None:
        """Fetches and writes one round's public metrics, once its releases are confirmed."""
        if late is None:
            return
        if releaser is not None:
            releaser.confirm(before=late.round + 1)
        record: dict[str, Any] = {"round": late.round}
        if self.stamp:
            record["private"] = False
        record |= dict(sorted(jax.device_get(dict(late.metrics)).items()))
        if late.due:
            # Not every round: exact accounting takes about as long as a round does.
            record["epsilon"] = self._cost.epsilon(late.round)
        if late.evaluation is not None:
            record["evaluation"] = late.evaluation.result()
        if late.sentences is not None:
            record["sentences"] = late.sentences
        record = jsonable(record)
        self._metrics.append(late.round, record)
        shown = _flat(record)
        prefix = "NOT_PRIVATE/" if self.stamp else ""
        self._tensorboard.scalars(
            late.round, {prefix + name: value for name, value in shown.items()}
        )
        if record.get("epsilon") is not None and late.round:
            # Of the latest evaluation, which may be some rounds ago.
            self._shown["epsilon"] = f"{record['epsilon']:.4g} at round {late.round}"
        for name in ("perplexity", "accuracy"):
            if f"evaluation/{name}" in shown:
                self._shown[name] = f"{shown[f'evaluation/{name}']:.4g}"
        self._progress.update(late.round, self._shown)

    def _finish(self, state: Any, done: int) -> Result:
        """Writes `result.json`, forgets the secret of a run that ended, and returns the result."""
        metrics: dict[str, Any] = {}
        for round in range(done + 1):
            metrics.update(self._metrics.recorded(round) or {})
        # Those of the last evaluation may be older than the last round.
        metrics["epsilon"] = self._cost.epsilon()
        statement = self._cost.statement()
        if done < self.algorithm.rounds:
            statement += f", after {done} of {self.algorithm.rounds} rounds"
        statement = stamped(statement, self.stamp, self.setting.note)
        record = {
            "run": self.run_id,
            "rounds": done,
            "private": not self.stamp,
            "privacy": statement,
            "metrics": metrics,
        }
        files.write_atomically(
            self.directory / "result.json", json.dumps(jsonable(record), indent=1) + "\n"
        )
        if done == self.algorithm.rounds:
            forget(self._secret_path)
        params = None if self.algorithm.params is None else self.algorithm.params(state)
        return Result(statement, metrics, done, self.directory, state, params)


def initial_state(algorithm: Algorithm, seed: int) -> Any:
    """The state before round 1, a function of the seed."""
    return algorithm.init(jax.random.fold_in(training_root(seed), INITIAL_STATE))


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, nested ones under `name/inner`."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers.update(_flat(value, f"{prefix}{name}/"))
        elif isinstance(value, float):
            numbers[f"{prefix}{name}"] = value
    return numbers
