"""Publishes the record of each round: `metrics.jsonl`, TensorBoard's events, the progress bar.

Metrics are fetched one round late, so that the device never waits for the host, unless a function
is to be called after each round (`on_round`).
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.scoring import on_one_device
from jaxpfl.experiments.engine.run_directory import Run
from jaxpfl.experiments.engine.setting import Round, Tracking
from jaxpfl.experiments.records.lines import MetricsFile, flat
from jaxpfl.progress import Progress


class Observers(AbstractContextManager["Observers"]):
    """The public outputs of one run; a context manager that closes them.

    Earlier attempts completed the rounds `done`, and `kept` parameters.
    """

    def __init__(self, run: Run, tracking: Tracking, bar: Progress, *, done: int, kept: Any):
        self._run, self._tracking, self._bar = run, tracking, bar
        self._private = not run.stamp
        # A round that is not published; the device may still be computing its results.
        self._late: tuple[Any, ...] | None = None
        self.metrics = MetricsFile(run.path / "metrics.jsonl")
        # The functions were called for the rounds up to the last checkpoint.
        self.stopped, self.kept = bool(done and self.metrics.records[done].get("stopped")), kept
        self._board = None
        if find_spec("tensorboard") is not None:
            self._board = _TensorBoard(run.path / "tensorboard", done)

    def observe(self, round: int, metrics: Mapping[str, Any], state: Any) -> None:
        """Starts the evaluation of `round` without waiting for the device."""
        algorithm, tracking = self._run.algorithm, self._tracking
        due = round % tracking.evaluate_every == 0 or round == algorithm.rounds
        evaluation, sentences, params = None, None, None
        if algorithm.params is not None and (due or tracking.on_round):
            params = algorithm.params(state)
        if due and params is not None:
            evaluation = tracking.evaluate(params) if tracking.evaluate else None
            if tracking.sentences:
                sentences = tracking.sentences(on_one_device(params), round)
        self._late = round, due, metrics, evaluation, sentences, params
        if tracking.on_round:
            # Before the next round is charged, and takes the buffers of the parameters.
            self.publish()

    def publish(self) -> None:
        """Publishes the round that was observed last."""
        late, self._late = self._late, None
        if late is None:
            return
        round, due, metrics, evaluation, sentences, params = late
        record: dict[str, Any] = {"round": round, **({} if self._private else {"private": False})}
        record |= dict(sorted(jax.device_get(dict(metrics)).items()))
        if due:
            # Not in every round, because exact accounting takes about as long as a round.
            record["epsilon"] = self._run.cost.epsilon(round)
        if evaluation is not None:
            record["evaluation"] = evaluation.result()
        if sentences is not None:
            record["sentences"] = sentences
        record = files.jsonable(record)
        if self._tracking.on_round:
            self._ask(round, record, params)
        self.metrics.append(round, record)
        if self._board is not None:
            prefix = "" if self._private else "NOT_PRIVATE/"
            numbers = {prefix + name: value for name, value in flat(record).items()}
            self._board.append(round, numbers)
        evaluated = flat(record.get("evaluation") or {})
        names = [name for name in evaluated if name not in ("loss", "count")] or ["loss"]
        shown = {name: f"{evaluated[name]:.4g}" for name in names if name in evaluated}
        if record.get("epsilon") is not None and round:
            shown["this run's epsilon"] = f"{record['epsilon']:.4g}"
        self._bar.update(round, shown)

    def _ask(self, round: int, record: dict[str, Any], params: Any) -> None:
        """Calls `on_round`, and notes in the record of the round what it answers."""
        run, cost, past = self._run, self._run.cost.statement, self.metrics.records[:round]
        seen = Round(round, [*past, record], params, lambda: run.stated(cost(), round))
        # Before the first round there is nothing to stop.
        allowed = [None, *["stop"][:round], *["keep"][: params is not None]]
        answers = [function(seen) for function in self._tracking.on_round]
        for answer in answers:
            if answer not in allowed:
                raise InputError(f"on_round may return one of {allowed} here, found {answer!r}")
        if "keep" in answers:
            self.kept, record["kept"] = jax.tree.map(jnp.copy, params), True
        if "stop" in answers:
            self.stopped = record["stopped"] = True

    def __exit__(self, *_: object) -> None:
        self.metrics.file.close()
        if self._board is not None:
            self._board.writer.close()


class _TensorBoard:
    """Scalar events. Their wall time is the round, because real times would reveal cohort sizes."""

    def __init__(self, directory: Path, resumed_after: int) -> None:
        # Generated modules, whose names a type checker cannot see.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from tensorboard.summary.writer.record_writer import RecordWriter  # pyright: ignore

        self._event, self._summary = Event, Summary
        directory.mkdir(exist_ok=True)
        # TensorBoard's own writer puts the time, the machine and the process into the name, and
        # the time into the first event. Files are read in the order of their names.
        self._path = directory / f"events.out.tfevents.{len(list(directory.iterdir())):010}"
        self.writer = RecordWriter(open(self._path, "xb"))
        self._write(file_version="brain.Event:2", wall_time=resumed_after)
        if resumed_after:
            # Tells TensorBoard to discard what a crashed run logged after its checkpoint.
            started = SessionLog(status=SessionLog.START)
            self._write(step=resumed_after + 1, wall_time=resumed_after, session_log=started)

    def append(self, round: int, numbers: Mapping[str, float]) -> None:
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        entries = [self._summary.Value(tag=tag, simple_value=x) for tag, x in finite.items()]
        self._write(step=round, wall_time=round, summary=self._summary(value=entries))

    def _write(self, **fields: Any) -> None:
        self.writer.write(self._event(**fields).SerializeToString())
        self.writer.flush()
        files.without_times(self._path)
