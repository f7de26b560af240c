"""Progress: a bar on a terminal and in a notebook, elsewhere a line every ten seconds on stderr.

All show the latest values and when they were measured. Switched off, messages alone are printed.
"""

import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any, ClassVar, Self, TypeVar

from jaxpfl.printable import printable

_SECONDS_BETWEEN_LINES = 10.0
COMPILING = "compiling"
"""A first step takes as long as its programs take to compile."""

_T = TypeVar("_T")


class Messages:
    """A text stream that never fails: what it cannot take is dropped, and the work goes on.

    Its disk may be full, or its reader gone; `lost` is the last error, None without one.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.lost = stream or io.StringIO(), None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self.lost = error
        return len(text)

    def flush(self) -> None:
        """Everything is written at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """A context manager that shows how many of `total` steps are done, how fast, and some values.

    A `step` is called "round", for example. `clients` is their planned number in a step, to show
    clients per second. Never the sampled number, which is private.
    """

    latest: ClassVar[str] = ""  # the last line in this process; PRIVATE, as every time is

    def __init__(
        self,
        label: str,
        *,
        total: int | None = None,
        progress: bool = True,
        step: str = "step",
        clients: int | None = None,
        waiting: str = COMPILING,
    ) -> None:
        self._label, self._total, self._step, self._clients = label, total, step, clients
        self._progress, self._start, self._waiting, self._values = progress, 0, waiting, ""
        # The steps after which the speed is measured, and when: the first step compiles.
        self._timed: tuple[int, float] | None = None
        self._said = time.monotonic()
        self._bar: Any = None
        self._cell: Any = None
        if progress:
            from rich.console import Console

            stderr: Any = Messages(sys.stderr)
            console = Console(file=stderr)
            if console.is_terminal:
                self._bar = _rich_bar(console)
                self._task = self._bar.add_task(label, total=total, status="")
            elif console.is_jupyter:
                from IPython.display import HTML, display

                cell: Any = display(HTML(""), display_id=True)
                self._cell = lambda html: cell.update(HTML(html))

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            # A shared notebook must not show the time.
            self._cell("")

    def begin(self, done: int, total: int | None = None) -> None:
        """States that `done` steps of a `total` were done earlier."""
        self._start, self._timed = done, None
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, status=self._waiting)

    def update(self, done: int, values: Mapping[str, str] = {}) -> None:
        """Shows that `done` steps are done, and the values measured after the last of them."""
        if not self._progress:
            return
        now = time.monotonic()
        if values:
            measured = "  ".join(f"{name} {value}" for name, value in values.items())
            self._values = f"{measured} at {self._step} {done}"
        left = ""
        if self._timed is None and done > self._start:
            self._timed = done, now
        if self._timed is None:
            parts = [self._waiting]
        elif done == self._timed[0]:
            parts = [""]
        else:
            speed = (done - self._timed[0]) / max(now - self._timed[1], 1e-9)
            parts = ["" if self._step == "percent" else f"{speed:.2f} {self._step}s/s"]
            if self._total and done < self._total:
                left = f"{timedelta(seconds=round((self._total - done) / speed))} left"
            if self._clients is not None:
                parts.append(f"{speed * self._clients:.0f} clients/s")
        status = [parts[0], self._values, *parts[1:]]
        line = "  ".join(filter(None, [*status[:2], left, *status[2:]]))
        line = Progress.latest = f"{self._label}: {self._step} {done}/{self._total or '?'}  {line}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status="  ".join(filter(None, status)))
            return
        apart = _SECONDS_BETWEEN_LINES if self._cell is None else 0.2
        if now - self._said >= apart or done == self._total or parts == [self._waiting]:
            self._said = now
            if self._cell is None:
                self.message(line)
            else:
                bar = f"<progress value={done} max={self._total or done}></progress>"
                self._cell(f"{bar} {escape(line)}")

    def message(self, text: str) -> None:
        """Prints a line above the bar, even where progress is switched off."""
        text = printable(text, allowed="\n")
        if self._bar is None:
            Messages(sys.stderr).write(text + "\n")
        else:
            self._bar.console.print(text, markup=False, highlight=False)


def track(items: Sequence[_T], label: str, *, progress: bool) -> Iterator[_T]:
    """Yields the items, with a bar that counts those that are done."""
    with Progress(label, total=len(items), progress=progress) as bar:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done)


def _rich_bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # In a narrow window the status is cut, then the label: the bar, the count and the time stay.
    label = Column(no_wrap=True, overflow="ellipsis", max_width=34)
    status = Column(no_wrap=True, overflow="ellipsis", ratio=1)

    return Bar(
        # Labels are plain text: square brackets in a user's name are no markup.
        TextColumn("{task.description}", style="bold", markup=False, table_column=label),
        BarColumn(bar_width=14),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[status]}", markup=False, table_column=status),
        console=console,
        expand=True,
    )
