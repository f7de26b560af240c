"""What a run writes while it runs, and what it shows.

`metrics.jsonl` holds one line per round: public values only, and no clock, so that an interrupted
and resumed run writes the same bytes as a straight one. Times, true cohort sizes and padding waste
depend on the clients: they go to `private/rounds.jsonl`.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxpfl.errors import CorruptFile


def jsonable(value: Any) -> Any:
    """`value` as JSON has it: arrays and numpy scalars unpacked, what is not finite as null."""
    if isinstance(value, dict):
        return {str(key): jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in value]
    if hasattr(value, "dtype"):
        return jsonable(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(_whole_lines(path.read_bytes()), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CorruptFile(f"{path}: line {number} is not JSON") from error
        if not isinstance(record, dict):
            raise CorruptFile(f"{path}: line {number} is not a JSON object")
        records.append(record)
    return records


def _whole_lines(content: bytes) -> list[bytes]:
    return content.split(b"\n")[:-1]


class MetricsFile:
    """`metrics.jsonl`: line i is the state after i rounds; line 0 is the untrained model.

    Opened on an earlier run's file it keeps that file as it is: a replayed round must give the
    line that stands there, or `append` says that it does not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = _whole_lines(path.read_bytes()) if path.exists() else []
        read_lines(path)
        self._file = open(path, "r+b" if path.exists() else "w+b")
        self._file.truncate(sum(len(line) + 1 for line in self._lines))
        self._file.seek(0, os.SEEK_END)

    def recorded(self, round: int) -> dict[str, Any] | None:
        """The record of `round` that stands in the file, or None."""
        return json.loads(self._lines[round]) if round < len(self._lines) else None

    def append(self, round: int, record: dict[str, Any]) -> None:
        """Writes the record of `round`, replacing it and all later ones where it differs.

        Raises:
          CorruptFile: if earlier rounds are missing.
        """
        line = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False).encode()
        if round < len(self._lines) and self._lines[round] == line:
            return
        if round > len(self._lines):
            raise CorruptFile(
                f"{self.path}: has {len(self._lines)} rounds, expected {round} before this one"
            )
        del self._lines[round:]
        self._file.truncate(sum(len(kept) + 1 for kept in self._lines))
        self._file.seek(0, os.SEEK_END)
        self._file.write(line + b"\n")
        self._file.flush()
        self._lines.append(line)

    def sync(self) -> None:
        """Returns when what was appended is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalar and text events. Their wall time is the round: the clock would tell cohort sizes."""

    def __init__(self, directory: Path, *, resumed_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))
        if resumed_after is not None:
            # Tells TensorBoard to forget what a crashed run logged beyond its checkpoint.
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(step=resumed_after + 1, wall_time=resumed_after, session_log=started)
            )

    def scalars(self, round: int, values: dict[str, float]) -> None:
        # Generated modules, whose names a type checker cannot see.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        entries = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
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
        self._file.write(json.dumps(jsonable(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Progress:
    """A bar on stderr: rounds/s, clients/s by the PLANNED cohort size, epsilon so far.

    With `clients` None there is no speed in clients, and `step` says what is counted.
    """

    def __init__(
        self, label: str, *, rounds: int, clients: int | None, shown: bool, step: str = "round"
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._clients = clients
        self._step = step
        self._start = 0
        self._began = time.monotonic()
        self._said = self._began
        self._rounds = rounds
        self._label = label
        # A bar needs a terminal; a log file gets a line every now and then.
        self._plain = shown and not console.is_terminal
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not shown or self._plain,
        )
        self._task = self._bar.add_task(label, total=rounds, status="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, done: int) -> None:
        """Rounds up to `done` were done before: the speed is that of the rest."""
        self._start = done
        self._began = time.monotonic()
        self._bar.update(self._task, completed=done)

    def update(self, round: int, shown: dict[str, str]) -> None:
        """Shows that `round` rounds are done, with `shown` values such as the epsilon."""
        now = time.monotonic()
        speed = (round - self._start) / max(now - self._began, 1e-9)
        speeds = [f"{speed:.2f} {self._step}s/s"]
        if self._clients is not None:
            speeds.append(f"{speed * self._clients:.0f} clients/s")
        status = "  ".join(
            [
                *speeds,
                *(f"{name} {value}".rstrip() for name, value in shown.items()),
            ]
        )
        self._bar.update(self._task, completed=round, status=status)
        if self._plain and (now - self._said >= 10 or round == self._rounds):
            self._said = now
            self.message(f"{self._label}: {self._step} {round}/{self._rounds}  {status}")

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar.disable:
            sys.stderr.write(text + "\n")
        else:
            self._bar.console.print(text, markup=False, highlight=False)
