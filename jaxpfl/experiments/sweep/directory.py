"""What a sweep's directory holds, and how several processes share it.

    points.json        what the sweep is, and the config of every point
    sweep.lock         held while `points.json`, the table and the page are written
    points/NAME/       the run of a point, with its own ledger, report and result.json
      point.lock       held by the process that carries it out
      point.json       the SHA-256 of the result.json of a finished point
      failed.json      why the last attempt failed, in one sentence
      point.yaml       its config, where it was a command of its own

What a killed process left, which locks nothing, is resumed by the next one. Processes on several
machines need a file system that shares `flock`.
"""

import json
import os
import re
import shutil
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from jaxpfl import files
from jaxpfl.data.catalogue import expanded
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.experiments.systems import CONFIG, RESULT

POINTS, LOCK = "points", "sweep.lock"
SELECTION = "private/selection"
"""The secret of a private selection, see `selection`."""
_FINISHED = "point.json"
FAILED = "failed.json"
_TRACEBACK = "private/failure.txt"


def begin(sweep: Sweep, out: Path, selected_by: Mapping[str, Any] | None = None) -> None:
    """Writes what the sweep is to its directory, in which no points of another may have begun.

    `selected_by` is how a private selection draws its points; None where all are shown.
    """
    content: dict[str, Any] = {"title": sweep.title, "metric": sweep.metric, "gap": sweep.gap}
    content["points"] = [
        {"name": point.name, "values": point.values, "config": to_mapping(point.config)}
        for point in sweep.points
    ]
    content |= {} if selected_by is None else {"selection": selected_by}
    text = json.dumps(content, indent=1) + "\n"
    for source in re.findall(r'"(\$\{?JAXPFL_DATA\b[^"?]*)', text):
        # Refuses the folder of data where the environment does not say where that is.
        expanded(source)
    path, points = out / "points.json", out / POINTS
    files.make_directory(out)
    with files.lock(out / LOCK, wait=True):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        other = InputError(f"{path}: the directory holds another sweep; choose another --out")
        if (out / SELECTION).exists():
            raise other
        for folder in map(PointFolder, points.glob("*")):
            with folder.claimed() as free:
                # A point that was refused has no run.
                if not free or folder.has_run or (folder.path / RESULT).exists():
                    raise other
        shutil.rmtree(points, ignore_errors=True)
        files.write_atomically(path, text)


class PointState(NamedTuple):
    """What the folder of a point says of it: its `result.json`, or why its last attempt failed."""

    state: Literal["finished", "failed", "unfinished"]
    result: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class PointFolder:
    """The folder of a point, which need not exist; `of` a point of the sweep in a directory."""

    path: Path

    @classmethod
    def of(cls, point: Point, out: Path) -> Self:
        return cls(out / POINTS / point.name)

    @property
    def has_run(self) -> bool:
        return (self.path / CONFIG).exists()

    @property
    def finished(self) -> bool:
        return (self.path / _FINISHED).exists()

    @property
    def failure(self) -> bytes | None:
        """The record of a failed attempt, different from any other's; None without one."""
        with suppress(FileNotFoundError):
            return (self.path / FAILED).read_bytes()

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether this process may carry out the point: no other one does, meanwhile."""
        self.path.mkdir(parents=True, exist_ok=True)
        with files.lock(self.path / "point.lock") as free:
            yield free is not None

    def state(self) -> PointState:
        result, finished, failed = self.path / RESULT, self.path / _FINISHED, self.path / FAILED
        try:
            if finished.exists():
                sha256 = files.read_record(finished, {"sha256": str})["sha256"]
                if files.sha256_file(result) != sha256:
                    altered = f"{result}: was altered after the point was finished"
                    how = f"its SHA-256 is another than in {_FINISHED}; delete that to resume it"
                    raise CorruptFile(f"{altered}: {how}")
                return PointState("finished", files.read_record(result))
            if failed.exists():
                error = files.read_record(failed, {"error": str})["error"]
                return PointState("failed", error=error)
        except (OSError, InputError) as error:
            # A process that tries the point again removes the record of its failure at any time.
            if finished.exists() or failed.exists():
                return PointState("failed", error=_sentence(error))
        return PointState("unfinished")

    def finish(self) -> None:
        files.write_json(self.path / _FINISHED, {"sha256": files.sha256_file(self.path / RESULT)})

    def fail(self, error: Exception) -> None:
        """Records why an attempt failed; a fault of the program is kept for the owner alone."""
        if not isinstance(error, (InputError, BudgetExhausted)):
            path = files.private_directory(self.path / "private").parent / _TRACEBACK
            files.write_atomically(path, "".join(traceback.format_exception(error)), mode=0o600)
        record = {"error": _sentence(error), "attempt": os.urandom(8).hex()}
        files.write_json(self.path / FAILED, record)


def _sentence(error: BaseException) -> str:
    """Why a point failed; of a fault of the program its kind alone, as its text may be private."""
    if isinstance(error, (InputError, BudgetExhausted)):
        # The name of the working folder may be a person's.
        return str(error).replace(files.where("."), " in the working folder")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    fault = f"{type(error).__name__}, a fault of the program or the machine"
    return f"{fault}: {_TRACEBACK} in the point's folder says where"
