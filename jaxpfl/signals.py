"""SIGINT, SIGTERM and SIGHUP stop a run after its current round, so that it can be saved.

Before the first round, and in whatever has no rounds, they end the command at once, as exceptions.
SIGHUP says that the terminal is gone. Where it is ignored, as under nohup, it stays so.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from jaxpfl.errors import Interrupted

# The attribute of an exception that ended a run after a signal was answered: the signal's number.
_ANSWERED = "_answered_signal"
# Written by the handler itself, because a buffered stream may be in the middle of another write.
_ANSWER = b"\n%s: the round is finished and saved first; once more stops at once\n"


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received while there was nothing to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated`, as SIGINT raises KeyboardInterrupt; a second one kills."""

    def end(number: int, frame: FrameType | None) -> None:
        # Whatever hangs while it is put in order can still be ended. Kernel and shell both hang up.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        raise Terminated(number)

    with _handled(_ends(), end):
        yield


def _ends() -> list[int]:
    """SIGTERM and, unless it is ignored, SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


@contextmanager
def _handled(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Python lets the main thread alone set a handler; others go on without."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def at_once() -> Iterator[None]:
    """The signals end what is inside at once, within `caught_signals` too."""
    with _handled([signal.SIGINT], signal.default_int_handler), terminable():
        yield


@contextmanager
def resumable(directory: Path) -> Iterator[None]:
    """Says of an interrupt that no round has answered how the run in the directory is resumed."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        message = f"interrupted; resume with: jaxpfl resume {directory}"
        raise Interrupted(number, message) from error


@contextmanager
def caught_signals(late: str | None = None) -> Iterator[list[int]]:
    """Collects the first signal, so that the round can end; a second one acts at once.

    The first is answered by a line on stderr. If the block ends without an exception, `Interrupted`
    with the message `late` is raised: what follows the run, such as the next point of a sweep, must
    not begin. Without `late` the signal is dropped. An exception carries it, for
    `require_none_answered`.
    """
    caught: list[int] = []
    numbers = (signal.SIGINT, *_ends())
    before = {number: signal.getsignal(number) for number in numbers}

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if number != signal.SIGHUP:  # kernel and shell both send it
            for other, handler in before.items():
                signal.signal(other, handler)
        with suppress(OSError):  # the terminal may be gone
            os.write(2, _ANSWER % signal.Signals(number).name.encode())

    with _handled(numbers, catch):
        try:
            yield caught
        except BaseException as error:
            if caught and late is not None:
                setattr(error, _ANSWERED, caught[0])
            raise
    if caught and late is not None:
        raise Interrupted(caught[0], late)


def require_none_answered(failure: BaseException, message: str) -> None:
    """Raises `Interrupted` if a signal was answered before `failure`, or a cause of it, came."""
    error: BaseException | None = failure
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if hasattr(error, _ANSWERED):
            raise Interrupted(getattr(error, _ANSWERED), message) from failure
        seen.append(error)
        error = error.__cause__ or error.__context__
