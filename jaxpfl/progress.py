"""The progress bar: what a long computation shows on stderr, where the user wants to see it.

On a terminal it is a bar; into a file goes a line every ten seconds. Nothing is imported, and
nothing is printed, where it is switched off.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

_SECONDS_BETWEEN_LINES = 10.0
_T = TypeVar("_T")


class Progress:
    """A context manager that shows how many of `total` steps are done, how fast, and some values.

    Args:
      label: what is being done.
      total: how many steps there are; None where that is not known yet.
      progress: whether anything is shown.
      step: what one step is called, such as "round".
      clients: clients a step by plan, never as drawn; shows their speed, too. None shows none.
    """

    def __init__(
        self,
        label: str,
        *,
        total: int | None = None,
        progress: bool = True,
        step: str = "step",
        clients: int | None = None,
    ) -> None:
        self._label, self._total, self._step, self._clients = label, total, step, clients
        self._progress = progress
        self._start = 0
        self._began = self._said = time.monotonic()
        self._bar: Any = None
        if progress:
            from rich.console import Console

            console = Console(stderr=True)
            # A bar needs a terminal.
            self._bar = _rich_bar(console) if console.is_terminal else None
        self._task = (
            None if self._bar is None else self._bar.add_task(label, total=total, status="")
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, done: int) -> None:
        """So many steps were done before: the speed is that of the rest."""
        self._start = done
        self._began = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def update(
        self, done: int, values: Mapping[str, str] = {}, *, total: int | None = None
    ) -> None:
        """Shows that `done` steps are done, with values such as the epsilon so far.

        Args:
          total: where it became known, or changed.
        """
        if not self._progress:
            return
        self._total = self._total if total is None else total
        now = time.monotonic()
        status = "  ".join(
            [
                *self._speeds(done, now - self._began),
                *(f"{name} {value}".rstrip() for name, value in values.items()),
            ]
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, status=status)
        elif now - self._said >= _SECONDS_BETWEEN_LINES or done == self._total:
            self._said = now
            self.message(f"{self._label}: {self._step} {done}/{self._total or '?'}  {status}")

    def message(self, text: str) -> None:
        """Prints a line above the bar; also where progress is not shown."""
        if self._bar is None:
            sys.stderr.write(text + "\n")
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def _speeds(self, done: int, seconds: float) -> list[str]:
        speed = (done - self._start) / max(seconds, 1e-9)
        found = [f"{speed:.2f} {self._step}s/s"]
        if self._clients is not None:
            found.append(f"{speed * self._clients:.0f} clients/s")
        return found


def track(items: Sequence[_T], label: str, *, progress: bool) -> Iterator[_T]:
    """The items, one after the other, with a bar that counts those which are done."""
    with Progress(label, total=len(items), progress=progress) as bar:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done)


def _rich_bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
    )
