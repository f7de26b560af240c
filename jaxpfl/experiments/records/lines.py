"""Files of JSON lines: `metrics.jsonl` and `attempts.jsonl`; and where a run was begun.

Neither tells how long anything took, because that depends on how much the sampled clients hold. A
resumed run writes the same bytes into `metrics.jsonl` as an uninterrupted one.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import CorruptFile, InputError

_ATTEMPTS = "attempts.jsonl"
# The working folder, whose name may be a person's.
_BEGUN_IN = "private/begun_in"
FROM_PYTHON = "from Python"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file without a last line that a crash cut short."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            records.append(files.parse_json(line))
        except ValueError as error:
            raise CorruptFile(f"{path}: line {number} is not JSON") from error
        if not isinstance(records[-1], dict):
            raise CorruptFile(f"{path}: line {number} is not a JSON object")
    return records


def leaves(record: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """The values of a record that hold no others, by the path of names that leads to them."""
    values: dict[str, Any] = {}
    for name, value in record.items():
        path, nested = f"{prefix}{name}", isinstance(value, Mapping)
        values |= leaves(value, separator, f"{path}{separator}") if nested else {path: value}
    return values


def flat(record: Mapping[str, Any]) -> dict[str, float]:
    """The floats of a record, nested ones under `name/inner`."""
    return {name: x for name, x in leaves(record, "/").items() if isinstance(x, float)}


class MetricsFile:
    """`metrics.jsonl`: line i describes the state after i rounds, line 0 the untrained model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        self.records = read_lines(path)
        self.file = open(path, "r+b" if path.exists() else "w+b")
        self._cut(len(self._lines))

    def append(self, round: int, record: dict[str, Any]) -> None:
        """Writes the record of `round`; if the file holds another, it and all later ones go."""
        line = json.dumps(files.jsonable(record), ensure_ascii=False, allow_nan=False).encode()
        if round < len(self._lines) and self._lines[round] == line:
            return
        if round > (lines := len(self._lines)):
            raise CorruptFile(f"{self.path}: has {lines} lines, expected {round} before this round")
        self._cut(round)
        self.file.write(line + b"\n")
        self.file.flush()
        files.without_times(self.path)
        self._lines.append(line)
        self.records.append(json.loads(line))

    def _cut(self, rounds: int) -> None:
        del self._lines[rounds:], self.records[rounds:]
        self.file.truncate(sum(len(line) + 1 for line in self._lines))
        self.file.seek(0, os.SEEK_END)


def record_attempt(directory: Path, command: str) -> None:
    """Adds to `attempts.jsonl` that the run is begun or resumed now, by a command as typed."""
    records, begun_in = read_lines(directory / _ATTEMPTS), directory / _BEGUN_IN
    if not records:
        files.private_directory(begun_in.parent)
        files.write_atomically(begun_in, os.fsencode(os.getcwd()), mode=0o600)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = [json.dumps(line) + "\n" for line in [*records, {"begun": now, "command": command}]]
    files.write_atomically(directory / _ATTEMPTS, "".join(lines))


@contextmanager
def where_begun(directory: Path) -> Iterator[Path]:
    """Inside, relative paths mean the folder where the run in `directory`, which it yields, began.

    If that folder is gone, as after the move of a whole project, they mean the working folder.
    """
    note, here = directory / _BEGUN_IN, Path.cwd()
    folder = Path(os.fsdecode(note.read_bytes())) if note.is_file() else here
    if folder.is_dir():
        with chdir(folder):
            yield directory if folder.samefile(here) else here / directory
        return
    try:
        yield directory
    except InputError as error:
        gone = f"the run was begun in {folder}, which is not there any more"
        raise type(error)(f"{error}; {gone}") from error


def attempts(directory: Path) -> list[tuple[str, str]]:
    """The run's name, and for each attempt its date and command, as (what, text) pairs."""
    lines = []
    for record in read_lines(directory / _ATTEMPTS):
        lines = lines or [("run", directory.resolve().name)]
        verb = "resumed" if len(lines) > 1 else "begun"
        lines.append((f"{verb} {record['begun']}", record["command"]))
    return lines
