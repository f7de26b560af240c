"""`attempts.jsonl`: when a run was begun and resumed, and by which command.

How long an attempt took is not in it, because that depends on how much the sampled clients hold: it
is only said on the terminal.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

from jaxpfl import files
from jaxpfl.experiments.engine.tracking import read_lines

_FILE = "attempts.jsonl"
FROM_PYTHON = "from Python"


def record_attempt(directory: Path, command: str) -> None:
    """Adds a line for an attempt that begins now.

    Args:
      command: as it was typed, or `FROM_PYTHON`.
    """
    line = {"begun": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "command": command}
    lines = [json.dumps(each) + "\n" for each in [*read_lines(directory / _FILE), line]]
    files.write_atomically(directory / _FILE, "".join(lines))


def history(directory: Path) -> list[tuple[str, str]]:
    """The run's name, and for each attempt its date and command, as (what, text) pairs."""
    attempts = read_lines(directory / _FILE)
    named = [("run", directory.resolve().name)] if attempts else []
    return named + [
        (f"{'resumed' if number else 'begun'} {each['begun']}", each["command"])
        for number, each in enumerate(attempts)
    ]


def duration(seconds: float) -> str:
    """A duration in the two largest of its units, such as "2 min 5 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
