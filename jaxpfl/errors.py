"""Errors a user can act on, each with the exit code that the command line gives it."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input (a file, a field, a number): exit code 2.

    The message is one sentence that names where the fault is, what was found and what was
    expected. It never contains a client's value.
    """

    exit_code = 2


class CorruptFile(InputError):
    """A file is truncated, altered or not of the stated format: exit code 2."""


class NoDataFolder(InputError):
    """The environment variable that names the folder of a data set is not set: exit code 2."""


class RunLocked(InputError):
    """Another process is using the run directory or the ledger: exit code 2."""


class BudgetExhausted(RuntimeError):
    """The next release would exceed the privacy budget, so it was not made: exit code 3."""

    exit_code = 3


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP was received; the run was saved and can be resumed."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class InformationLeak(InputError):
    """A release's program may tell something of the clients without noise: exit code 2."""


@contextmanager
def named(where: object, kind: type[InputError] = InputError) -> Iterator[None]:
    """Begins the sentence of an `InputError` with the place of the fault, unless it is there."""
    try:
        yield
    except InputError as error:
        sentence = str(error)
        raise kind(sentence if str(where) in sentence else f"{where}: {sentence}") from None


def summary(error: BaseException) -> str:
    """The class of an error of a library and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
