"""Carries out the points of a sweep, one after the other in this process.

The points share compiled programs, which depend on shapes and not on the noise. A finished point is
not repeated. An interrupted point is resumed, and ends in the same bits. A point that fails is
recorded, and the others go on; the next call tries it again. Several processes may work on one
directory at once, see `directory`.

A sweep is a SIMULATION: each point spends its own epsilon on the same clients, on a ledger of its
own. Whoever publishes several points has released all of them, and the report says so.
"""

from pathlib import Path
from typing import Any, Literal

from jaxpfl.errors import NoDataFolder, RunLocked
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.engine.signals import require_none_answered
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.experiments.sweep.results import SweepOutcome, collect, value_of
from jaxpfl.experiments.systems import CONFIG
from jaxpfl.federated import mesh
from jaxpfl.progress import Progress

Ended = Literal["finished", "failed", "busy"]


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
    directory = Path(out)
    folders.begin(sweep, directory)
    known = folders.failures(sweep, directory)
    memory: dict[Any, Any] = {}
    label, total = f"sweep {sweep.title}", len(sweep.points)
    left, before = dict(enumerate(sweep.points, 1)), total + 1
    with Progress(label, total=total, progress=progress, step="point") as bar:
        # What another process was carrying out is looked at again, in case that process was killed.
        while len(left) < before:
            before = len(left)
            for number, point in list(left.items()):
                bar.message(f"point {number} of {total}: {point.name}")
                try:
                    ended = carry_out_point(
                        point, directory, sweep.title, known=known[point.name], memory=memory
                    )
                except NoDataFolder:
                    folders.take_back(directory)
                    raise
                if ended == "busy":
                    bar.message("another process is carrying it out")
                    continue
                del left[number]
                report_point(bar, directory, point, sweep.metric)
                bar.update(total - len(left))
    return collect(sweep, directory)


def report_point(bar: Progress, directory: Path, point: Point, metric: str) -> None:
    """Says why a point failed; refuses a metric that the result of a finished one lacks.

    Raises:
      InputError: there is no such metric. It is said after the first point, not after all.
    """
    state = folders.state_of(folders.of_point(directory, point))
    if state.result is not None:
        value_of(state.result, metric)
    elif state.state == "failed":
        bar.message(f"failed: {point.name}: {state.error}")


def carry_out_point(
    point: Point,
    directory: Path,
    title: str,
    *,
    known: folders.Failure | None,
    memory: dict[Any, Any] | None = None,
) -> Ended:
    """Carries out one point of a sweep, unless it is finished or another process has it.

    Args:
      directory, title: of the sweep.
      known: the failure that was recorded of the point when this process began. Where there is
        another one by now, the point is not tried again.
      memory: results that the points share, see `systems.base.Workspace`.

    Raises:
      NoDataFolder, Interrupted: as `run_sweep`.
    """
    folder = folders.of_point(directory, point)
    finished = folder / folders.FINISHED
    with folders.held(folder) as free:
        if not free:
            return "busy"
        if finished.exists():
            return "failed" if folders.state_of(folder).error else "finished"
        if folders.failure(folder) not in (None, known):
            return "failed"
        options: dict[str, Any] = {"memory": memory, "command": f"a point of the sweep {title}"}
        with folders.attempted(folder):
            try:
                if (folder / CONFIG).exists():
                    carry_out.resume(folder, progress=False, **options)
                else:
                    carry_out.run(point.config, folder, progress=False, **options)
            except RunLocked as error:
                # Somebody resumes this very run, or uses a folder that runs share.
                require_none_answered(error, folders.interrupted_after(folder))
                return "busy"
            folders.finish(folder)
        return "finished" if finished.exists() else "failed"
