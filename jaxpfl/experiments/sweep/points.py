"""Carries out the points of a sweep, one after the other in this process.

The points share compiled programs, which depend on shapes and not on the noise. A finished point is
not repeated. An interrupted point is resumed, and ends in the same bits. A point that fails is
recorded, and the others go on; the next call tries it again. Several processes may work on one
directory at once, see `directory`.

A sweep is a SIMULATION: each point spends its own epsilon on the same clients, on a ledger of its
own. Whoever publishes several points has released all of them, and the report says so.
"""

from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import RunLocked
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.engine.signals import require_none_answered
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.experiments.sweep.directory import PointFolder, SweepDirectory
from jaxpfl.experiments.sweep.results import SweepOutcome, collect, value_of
from jaxpfl.federated import mesh
from jaxpfl.progress import Progress


def run_sweep(sweep: Sweep, out: str | Path, *, progress: bool = True) -> SweepOutcome:
    """Carries out the unfinished points of `sweep` in the directory `out`.

    Points that another process is carrying out are left to it. The table is of what is there when
    this process has nothing left to do.

    Raises:
      InputError: `out` holds another sweep, or the result of a point lacks the metric.
      NoDataFolder: the environment does not name the folder of a point's data.
      Interrupted: SIGINT or SIGTERM was received; the same call continues the sweep.
    """
    mesh.require_one_process("a sweep needs")
    directory = SweepDirectory(out)
    directory.begin(sweep)
    known = {point.name: directory.point(point).failure for point in sweep.points}
    memory: dict[Any, Any] = {}
    total = len(sweep.points)
    left, before = dict(enumerate(sweep.points, 1)), total + 1
    with Progress(f"sweep {sweep.title}", total=total, progress=progress, step="point") as bar:
        # What another process was carrying out is looked at again, in case that process was killed.
        while len(left) < before:
            before = len(left)
            for number, point in list(left.items()):
                bar.message(f"point {number} of {total}: {point.name}")
                folder = directory.point(point)
                if not carry_out_point(point, folder, known[point.name], memory):
                    bar.message("another process is carrying it out")
                    continue
                del left[number]
                state = folder.state()
                if state.result is not None:
                    # That there is no such metric is said after the first point, not after all.
                    value_of(state.result, sweep.metric)
                elif state.error:
                    bar.message(f"failed: {point.name}: {state.error}")
                bar.update(total - len(left))
    return collect(sweep, directory)


def carry_out_point(
    point: Point, folder: PointFolder, known: bytes | None, memory: dict[Any, Any]
) -> bool:
    """Carries out one point of a sweep, unless it is finished; False if another process has it.

    An error is recorded and goes no further; but an interrupt does, because the point can be
    resumed.

    Args:
      known: the failure that was recorded of the point when this process began. Where there is
        another one by now, the point is not tried again.

    Raises:
      Interrupted: as `run_sweep`; also of a signal that was answered before the point failed.
    """
    with folder.claimed() as free:
        if not free:
            return False
        if folder.finished:
            return True
        if folder.failure not in (None, known):
            return True
        folder.begin()
        options: dict[str, Any] = {
            "memory": memory,
            "command": f"the point {point.name} of a sweep",
        }
        try:
            if folder.has_run:
                carry_out.resume(folder.path, progress=False, **options)
            else:
                carry_out.run(point.config, folder.path, progress=False, **options)
            folder.finish()
        except Exception as error:
            # The run of a locked point, or a folder that runs share, is used by another process.
            busy = isinstance(error, RunLocked)
            if not busy:
                folder.fail(error)
            after = f"interrupted after the point {point.name}; the same command goes on"
            require_none_answered(error, after)
            return not busy
        finally:
            files.without_times(folder.path)
        return True
