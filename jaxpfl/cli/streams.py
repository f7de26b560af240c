"""stdin, stdout and stderr of the command, which may be closed, full, or read by nobody any more.

A result that stdout cannot take is said on stderr and by the exit code. Messages that stderr cannot
take are dropped: the work goes on without them.
"""

import io
import os
import sys
from typing import Any

from jaxpfl.progress import Messages


def take() -> None:
    """Makes the streams of this process safe to use.

    A closed one is opened on nothing. Else the next file, such as the ledger, would get its number,
    and what a library writes to stderr would be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free, which is this one. A result, which is written
            # to the second, is still refused.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    # Without a buffer, nothing is left that Python would try to write once more when it ends.
    unbuffered: Any = io.FileIO(2, "w", closefd=False)
    text = io.TextIOWrapper(unbuffered, encoding, "backslashreplace", write_through=True)
    sys.stderr = Messages(text)


def write(text: str) -> OSError | None:
    """Writes a result to stdout; returns the error if not all of it could be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python would try once more when it ends.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return error
    return None
