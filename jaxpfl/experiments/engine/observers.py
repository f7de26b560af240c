"""What observes a run: each is given the record of a round, once, when its releases are confirmed.

    metrics.jsonl            one line a round: public values and no clock, see `tracking`
    tensorboard/             the same numbers, where the extra `tensorboard` is installed
    stderr                   the progress bar
    private/rounds.jsonl     seconds, true cohort sizes, padding waste: these depend on the clients

Metrics are fetched one round late: the device never waits for the host.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import jax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.experiments.engine.cost import Cost
from jaxpfl.experiments.engine.evaluate import Pending
from jaxpfl.experiments.engine.run_directory import RunDirectory
from jaxpfl.experiments.engine.setting import Tracking
from jaxpfl.experiments.engine.tracking import MetricsFile
from jaxpfl.progress import Progress


class Observer(Protocol):
    """Is given the public record of each round."""

    def append(self, round: int, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Values(NamedTuple):
    """What a round gave; the device may still be computing it."""

    round: int
    due: bool
    metrics: Mapping[str, Any]
    evaluation: Pending | None
    sentences: list[str] | None


class Observers:
    """All observers of one run; a context manager that closes them.

    Args:
      directory: of the run.
      algorithm: whose parameters are evaluated.
      tracking: what is evaluated, and when.
      cost: the epsilon of the rounds so far.
      bar: shows the latest values.
      done: rounds that earlier attempts did.
      confirm: `(before)`: returns when the releases of all rounds before `before` are confirmed.
    """

    def __init__(
        self,
        directory: RunDirectory,
        algorithm: Algorithm,
        tracking: Tracking,
        cost: Cost,
        bar: Progress,
        *,
        done: int,
        confirm: Callable[[int], None],
    ) -> None:
        self._algorithm, self._tracking, self._cost = algorithm, tracking, cost
        self._confirm = confirm
        self._stamp = directory.stamp
        self._late: Values | None = None
        self._closing = ExitStack()
        prefix = "NOT_PRIVATE/" if self._stamp else ""
        self.metrics = MetricsFile(directory.path / "metrics.jsonl")
        self._observers: list[Observer] = [self.metrics]
        if find_spec("tensorboard") is not None:
            board = TensorBoard(directory.path / "tensorboard", resumed_after=done, prefix=prefix)
            self._observers.append(board)
        self._observers.append(Shown(bar))
        for observer in self._observers:
            self._closing.callback(observer.close)

    def observe(self, round: int, metrics: Mapping[str, Any], state: Any) -> None:
        """Starts what is to be recorded of `round`, without waiting for the device."""
        algorithm, tracking = self._algorithm, self._tracking
        due = round % tracking.evaluate_every == 0 or round == algorithm.rounds
        evaluation, sentences = None, None
        if due and algorithm.params is not None:
            params = algorithm.params(state)
            evaluation = tracking.evaluate(params) if tracking.evaluate else None
            sentences = tracking.sentences(params, round) if tracking.sentences else None
        self._late = Values(round, due, metrics, evaluation, sentences)

    def publish(self) -> None:
        """Fetches what was observed last and gives it to all, once its releases are confirmed.

        Raises:
          BudgetExhausted: the round came out otherwise than before and cannot be paid for again.
        """
        late, self._late = self._late, None
        if late is None:
            return
        self._confirm(late.round + 1)
        record: dict[str, Any] = {"round": late.round}
        if self._stamp:
            record["private"] = False
        record |= dict(sorted(jax.device_get(dict(late.metrics)).items()))
        if late.due:
            # Not every round: exact accounting takes about as long as a round does.
            record["epsilon"] = self._cost.epsilon(late.round)
        if late.evaluation is not None:
            record["evaluation"] = late.evaluation.result()
        if late.sentences is not None:
            record["sentences"] = late.sentences
        record = files.jsonable(record)
        for observer in self._observers:
            observer.append(late.round, record)

    def latest(self, done: int) -> dict[str, Any]:
        """The latest public metrics by name; those of an evaluation may be of an earlier round."""
        found: dict[str, Any] = {}
        for round in range(done + 1):
            found.update(self.metrics.recorded(round) or {})
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


class Shown:
    """Shows the latest epsilon and evaluation beside the progress bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._values: dict[str, str] = {}

    def append(self, round: int, record: dict[str, Any]) -> None:
        if record.get("epsilon") is not None and round:
            # Of the latest evaluation, which may be some rounds ago.
            self._values["epsilon"] = f"{record['epsilon']:.4g} at round {round}"
        numbers = flat(record)
        for name in ("perplexity", "accuracy"):
            if f"evaluation/{name}" in numbers:
                self._values[name] = f"{numbers[f'evaluation/{name}']:.4g}"
        self._bar.update(round, self._values)

    def close(self) -> None:
        pass


class TensorBoard:
    """Scalar events. Their wall time is the round: the clock would tell cohort sizes.

    Args:
      resumed_after: rounds that earlier attempts did.
      prefix: of all names.
    """

    def __init__(self, directory: Path, *, resumed_after: int = 0, prefix: str = "") -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore

        self._prefix = prefix
        self._writer = EventFileWriter(str(directory))
        if resumed_after:
            # Tells TensorBoard to forget what a crashed run logged beyond its checkpoint.
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(step=resumed_after + 1, wall_time=resumed_after, session_log=started)
            )

    def append(self, round: int, record: dict[str, Any]) -> None:
        # Generated modules, whose names a type checker cannot see.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        entries = [
            Summary.Value(tag=self._prefix + name, simple_value=value)
            for name, value in flat(record).items()
            if math.isfinite(value)
        ]
        self._writer.add_event(Event(step=round, wall_time=round, summary=Summary(value=entries)))

    def close(self) -> None:
        self._writer.close()


class PrivateLog:
    """`private/rounds.jsonl`: per round the seconds, the true cohort size, the padding waste."""

    def __init__(self, directory: Path) -> None:
        self._file = open(directory / "rounds.jsonl", "a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(files.jsonable(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, nested ones under `name/inner`."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            numbers.update(flat(value, f"{prefix}{name}/"))
        elif isinstance(value, float):
            numbers[f"{prefix}{name}"] = value
    return numbers
