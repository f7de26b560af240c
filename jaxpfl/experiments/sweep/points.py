"""Carries out the points of a sweep, one after the other in this process.

The points share compiled programs, which depend on shapes and not on the noise. With a launcher,
each is a `jaxpfl run` on several hosts instead. A finished point is not repeated, an interrupted
one is resumed, and one that failed is tried again by the next call. Several processes, such as
workers of Ray, may share a directory under one path: each takes the next free point.
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import compilation_cache, errors, files, memory
from jaxpfl.errors import Interrupted, RunLocked
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.config.reader import to_yaml
from jaxpfl.experiments.launch import Start, cluster, record_in
from jaxpfl.experiments.sweep.config import Point, Sweep
from jaxpfl.experiments.sweep.directory import FAILED, PointFolder, begin
from jaxpfl.experiments.sweep.results import SweepOutcome, collect, value_of
from jaxpfl.federated import mesh
from jaxpfl.progress import Progress
from jaxpfl.signals import require_none_answered

Carry = Callable[[Point, PointFolder], object]


def run_sweep(
    sweep: Sweep, out: str | Path, *, progress: bool = True, carry: Carry | None = None
) -> SweepOutcome:
    """Carries out the unfinished points of `sweep` in the directory `out`.

    Points of another process are left to it. The table is of what is there when this process has
    nothing left to do. After `Interrupted`, the same call continues the sweep. `carry` is
    `launched` by what starts a command on several hosts; None = in this process.
    """
    mesh.require_one_process("a sweep", "--launcher and --hosts share each point among several")
    if carry is None:
        mesh.all_devices()  # Without one, nothing is begun.
        carry = partial(here, {})
    begin(sweep, out := files.user_path(out))
    earlier = {point.name: PointFolder.of(point, out).failure for point in sweep.points}
    total = len(sweep.points)
    left, before = dict(enumerate(sweep.points, 1)), total + 1
    with Progress(f"sweep {sweep.title}", total=total, progress=progress, step="point") as bar:
        # Points of other processes are tried again, in case such a process was killed.
        while len(left) < before:
            before = len(left)
            for number, point in list(left.items()):
                bar.message(f"point {number} of {total}: {point.name}")
                folder = PointFolder.of(point, out)
                if not carry_out_point(point, folder, earlier[point.name], carry):
                    bar.message("another process is carrying it out")
                    continue
                del left[number]
                state = folder.state()
                if state.result is not None:
                    # Refuses an unknown metric after the first point, not after all.
                    value_of(state.result, sweep.metric)
                elif state.error:
                    bar.message(f"failed: {point.name}: {state.error}")
                bar.update(total - len(left))
    return collect(sweep, out)


def carry_out_point(point: Point, folder: PointFolder, earlier: bytes | None, carry: Carry) -> bool:
    """Carries out one point of a sweep, unless it is finished; False if another process has it.

    An error is recorded and goes no further; but an interrupt does, because the point can be
    resumed. If another failure than the `earlier` one is recorded, it is not tried again.
    """
    with folder.claimed() as free:
        if not free:
            return False
        if folder.finished or folder.failure not in (None, earlier):
            return True
        (folder.path / FAILED).unlink(missing_ok=True)
        try:
            carry(point, folder)
            folder.finish()
        except Exception as error:
            # The run of a locked point, or a folder that runs share, is used by another process.
            if not (busy := isinstance(error, RunLocked)):
                folder.fail(error)
            after = f"interrupted after the point {point.name}; the same command goes on"
            require_none_answered(error, after)
            return not busy
        finally:
            files.without_times(folder.path)
        return True


def here(memory: dict[Any, Any], point: Point, folder: PointFolder) -> None:
    """Carries out a point in this process; points share what is in `memory`."""
    command = f"the point {point.name} of a sweep"
    options: dict[str, Any] = {"progress": False, "memory": memory, "command": command}
    act = carry_out.resume if folder.has_run else partial(carry_out.run, point.config)
    act(folder.path, **options)


def launched(start: Start, point: Point, folder: PointFolder) -> None:
    """Carries out a point by a command that one of `launch.LAUNCHERS` starts on several hosts."""
    config, out = folder.path / "point.yaml", str(folder.path)
    files.write_atomically(config, to_yaml(point.config))
    command = ["resume", out] if folder.has_run else ["run", str(config), "--out", out]
    code, text = start([*command, "--json"])
    if code in (130, 143):
        raise Interrupted(code - 128, f"interrupted at {point.name}; the same command goes on")
    if code:
        ended = {"kind": "", "message": f"its processes ended with status {code}: see their output"}
        error = record_in(text).get("error", ended)
        unknown = partial(ChildProcessError, errno.ECHILD)
        raise getattr(errors, error["kind"], unknown)(error["message"])


def run_on_ray(sweep: Sweep, out: str | Path, *, workers: int, devices: int) -> SweepOutcome:
    """Carries out the unfinished points in this many workers of Ray, see `launch.cluster`.

    A worker has so many virtual CPU devices, and asks for one CPU, and for one GPU where the
    cluster has any. What a lost one had is unfinished.
    """
    out = files.user_path(out).resolve()
    with cluster(workers, logs=False) as ray:
        begin(sweep, out)
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work)
        for worker in [task.remote(sweep, out, devices, os.getcwd()) for _ in range(workers)]:
            try:
                ray.get(worker)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError:
                pass  # The worker is lost; the table lists what it left unfinished.
    return collect(sweep, out)


def _work(sweep: Sweep, out: Path, devices: int, here: str) -> None:
    import jax

    # Paths of a config may be relative to where the sweep was started.
    os.chdir(here)
    compilation_cache.enable()
    jax.config.update("jax_num_cpu_devices", devices)
    memory.give_back_after_compiling()
    run_sweep(sweep, out, progress=False)
