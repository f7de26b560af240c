"""What a sweep's directory holds, and how several processes share it.

    points.json                 what the sweep is, and the config of every point
    sweep.lock                  held while `points.json`, the table and the page are written
    points/NAME/                the run of a point, with its own ledger, report and result.json
      point.lock                held by the process that carries it out
      point.json                the SHA-256 of the result.json of a finished point
      failed.json               why the last attempt failed, in one sentence
      private/durations.json    how long its attempts took

The kernel releases a lock when its process ends, however it ends: what a killed process left is
resumed by the next one. Processes on several machines need a file system that shares `flock`.
"""

import json
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpfl import files
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, NoDataFolder
from jaxpfl.experiments.config.reader import to_mapping
from jaxpfl.experiments.engine.signals import require_none_answered
from jaxpfl.experiments.registry import from_mapping
from jaxpfl.experiments.sweep.config import CASE, Point, Sweep
from jaxpfl.experiments.systems import CONFIG, RESULT

POINTS = "points"
DESCRIBED = "points.json"
_LOCK = "sweep.lock"
FINISHED = "point.json"
_FAILED = "failed.json"

_PRIVATE = "private"
_DURATIONS = "durations.json"
_TRACEBACK = "failure.txt"
_SWEEP = {"title": str, "metric": str, "points": list, "gap": list | None}
_TIMES = {"seconds": float, "begun": int, "ended": int}
Failure = tuple[int, int]


@dataclass(frozen=True)
class PointState:
    """What the folder of a point says of it.

    Attributes:
      result: the content of its `result.json`; None unless it is finished.
      error: why its last attempt failed; "" unless it failed.
      seconds: how long its attempts took together; None where that is not known, such as after a
        crash. PRIVATE: it depends on what the clients hold.
    """

    state: Literal["finished", "failed", "unfinished"]
    result: dict[str, Any] | None = None
    error: str = ""
    seconds: float | None = None


def begin(sweep: Sweep, directory: Path) -> None:
    """Writes what the sweep is, or refuses a directory that holds another sweep.

    Raises:
      InputError: the directory cannot be made, or holds another sweep.
    """
    described = {
        "title": sweep.title,
        "metric": sweep.metric,
        "gap": sweep.gap,
        "points": [
            {"name": point.name, "values": point.values, "config": to_mapping(point.config)}
            for point in sweep.points
        ],
    }
    text = json.dumps(described, indent=1) + "\n"
    path = directory / DESCRIBED
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "is a file" if directory.is_file() else f"cannot be made: {error.strerror}"
        raise InputError(f"{directory}: {reason}, expected a directory or a new name") from error
    with sweep_lock(directory):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        if _any_begun(directory):
            raise InputError(f"{path}: the directory holds another sweep; choose another --out")
        shutil.rmtree(directory / POINTS, ignore_errors=True)
        files.write_atomically(path, text)


def take_back(directory: Path) -> None:
    """Removes what `begin` wrote, unless a point has begun.

    The lock file stays: a process that waits for it would not see that the next one locks another.
    """
    with sweep_lock(directory):
        if _any_begun(directory):
            return
        shutil.rmtree(directory / POINTS, ignore_errors=True)
        (directory / DESCRIBED).unlink(missing_ok=True)


def _any_begun(directory: Path) -> bool:
    """Whether a point has begun, or is about to. One that was refused has not."""
    for folder in (directory / POINTS).glob("*"):
        if (folder / CONFIG).exists() or (folder / RESULT).exists():
            return True
        with held(folder) as free:
            if not free:
                return True
    return False


def of_point(directory: Path, point: Point) -> Path:
    """The folder of a point."""
    return directory / POINTS / point.name


def is_sweep(directory: Path) -> bool:
    """Whether a directory holds a sweep."""
    return (directory / DESCRIBED).is_file()


def load_begun(directory: Path) -> Sweep:
    """The sweep that a directory holds.

    Raises:
      InputError: it holds none.
      CorruptFile: its `points.json` is damaged.
    """
    if not is_sweep(directory):
        found = f"there is no {DESCRIBED} in it" if directory.is_dir() else "no such directory"
        raise InputError(f"{directory}: holds no sweep: {found}")
    found = files.read_record(directory / DESCRIBED, _SWEEP)
    points = tuple(_point(each, directory) for each in found["points"])
    gap, cases = found["gap"], [point.values.get(CASE) for point in points]
    if (
        not points
        or any(point.values.keys() != points[0].values.keys() for point in points)
        or (gap and (len(gap) != 2 or any(end not in cases for end in gap)))
    ):
        raise CorruptFile(f"{directory / DESCRIBED}: its fields do not describe one sweep")
    return Sweep(found["title"], found["metric"], points, gap and tuple(gap))


def _point(described: Any, directory: Path) -> Point:
    place = str(directory / DESCRIBED)
    found = files.record_of(described, place, {"name": str, "values": dict, "config": dict})
    name = found["name"]
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise CorruptFile(f"{place}: the name of a point must be a file name, found {name!r}")
    return Point(name, found["values"], from_mapping(found["config"], f"{place}: {name}"))


def sweep_lock(directory: Path) -> Any:
    """A context in which no other process writes the sweep's own files."""
    return files.lock(directory / _LOCK, wait=True)


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether this process may carry out the point of a folder: no other one does, meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder / "point.lock") as free:
        yield free is not None


def state_of(folder: Path) -> PointState:
    """What the folder of a point, which need not exist, says of it."""
    result, finished, failed = folder / RESULT, folder / FINISHED, folder / _FAILED
    if finished.exists():
        try:
            if files.sha256_file(result) != files.read_record(finished, {"sha256": str})["sha256"]:
                raise CorruptFile(
                    f"{result}: was altered after the point was finished: it does not match the "
                    f"SHA-256 in {FINISHED}; delete that file to resume the point"
                )
            record = files.read_record(result)
        except (OSError, InputError) as error:
            return PointState("failed", error=sentence_of(error))
        times = _times(folder)
        seconds = times["seconds"] if times["begun"] == times["ended"] > 0 else None
        return PointState("finished", record, seconds=seconds)
    if not failed.exists():
        return PointState("unfinished")
    try:
        return PointState("failed", error=files.read_record(failed, {"error": str})["error"])
    except CorruptFile as error:
        # A process that tries the point again removes it, at any time.
        gone = not failed.exists()
        return PointState("unfinished") if gone else PointState("failed", error=str(error))


def finish(folder: Path) -> None:
    """Records that the point of a folder is finished."""
    files.write_json(folder / FINISHED, {"sha256": files.sha256_file(folder / RESULT)})


def fail(folder: Path, sentence: str) -> None:
    """Records why an attempt failed."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / _FAILED, {"error": sentence})


def failures(sweep: Sweep, directory: Path) -> dict[str, Failure | None]:
    """By the names of the points: the `failure` that is recorded of each."""
    return {point.name: failure(of_point(directory, point)) for point in sweep.points}


def failure(folder: Path) -> Failure | None:
    """Identifies the failed attempt that is recorded of a point; None if there is none.

    It is compared for equality alone, and no clock is asked.
    """
    try:
        recorded = (folder / _FAILED).stat()
    except FileNotFoundError:
        return None
    return recorded.st_ino, _times(folder)["begun"]


@contextmanager
def attempted(folder: Path) -> Iterator[None]:
    """Counts and times an attempt, and records the error that ends it, which goes no further.

    An interrupt does go further: the point can be resumed. So does the name of a folder of data
    that is not set: it is no point's own fault.

    Raises:
      Interrupted: also of a signal that was answered before the attempt failed.
    """
    (folder / _FAILED).unlink(missing_ok=True)
    path = files.private_directory(folder / _PRIVATE) / _DURATIONS
    before = _times(folder)
    before["begun"] += 1
    files.write_json(path, before, mode=0o600)
    began = time.monotonic()
    try:
        yield
    except NoDataFolder:
        raise
    except Exception as error:
        if not isinstance(error, (InputError, BudgetExhausted)):
            text = traceback.format_exc()
            files.write_atomically(folder / _PRIVATE / _TRACEBACK, text, mode=0o600)
        fail(folder, sentence_of(error))
        require_none_answered(error, interrupted_after(folder))
    finally:
        before["seconds"] += time.monotonic() - began
        before["ended"] += 1
        files.write_json(path, before, mode=0o600)
        files.without_times(folder)


def interrupted_after(folder: Path) -> str:
    """The sentence of a signal that was answered in a point whose attempt then failed."""
    return (
        f"interrupted after the point {folder.name}; go on with: jaxpfl sweep {folder.parents[1]}"
    )


def _times(folder: Path) -> dict[str, Any]:
    """What `durations.json` holds of a point; it is for display alone, and stops nothing."""
    path = folder / _PRIVATE / _DURATIONS
    if not path.exists():
        return {"seconds": 0.0, "begun": 0, "ended": 0}
    try:
        return files.read_record(path, _TIMES)
    except CorruptFile:
        # An attempt whose end is not known, so that no time is shown.
        return {"seconds": 0.0, "begun": 1, "ended": 0}


def sentence_of(error: BaseException) -> str:
    """Why a point failed; of a fault of the program its kind alone, because its text may say more
    of the clients than is public."""
    if isinstance(error, (InputError, BudgetExhausted)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return (
        f"{type(error).__name__}, a fault of the program or the machine: {_PRIVATE}/{_TRACEBACK} "
        "in the point's folder says where"
    )
