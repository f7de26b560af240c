"""Carries out the points of a sweep in worker processes: of Ray, or as array jobs of Slurm.

Each worker does what `points` does with one point, in the sweep's directory, which all machines
must see under the same path. Results are read from there; nothing else is exchanged.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpfl import compilation_cache, files
from jaxpfl.errors import InputError, NoDataFolder
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.config import Sweep
from jaxpfl.experiments.sweep.points import carry_out_point, report_point
from jaxpfl.experiments.sweep.results import SweepOutcome, collect
from jaxpfl.progress import Progress

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --output="{log}"
#SBATCH --open-mode=append
cd {here} || exit 1
exec {command}
"""


def run_on_ray(
    sweep: Sweep, out: str | Path, *, workers: int, devices: int, progress: bool = True
) -> SweepOutcome:
    """Carries out the unfinished points as tasks of Ray, `workers` at a time.

    Joins the cluster that the environment variable RAY_ADDRESS names; without it, Ray is started on
    this machine and ended afterwards. A task asks for one CPU, and for one GPU where the cluster
    has any.

    Args:
      devices: virtual CPU devices of each worker.

    Raises:
      InputError: Ray is not installed, `out` holds another sweep, or a result lacks the metric.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            "--launcher ray needs Ray, which is not installed: pip install 'jaxpfl[ray]'"
        ) from error
    directory = Path(out).resolve()
    folders.begin(sweep, directory)
    known = folders.failures(sweep, directory)
    # Ray reports its usage to its makers unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    started = {"address": address} if address else {"address": "local", "num_cpus": workers}
    ray.init(**started, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_on_worker)
        label, total = f"sweep {sweep.title}", len(sweep.points)
        waiting, running = list(enumerate(sweep.points, 1)), {}
        with Progress(label, total=total, progress=progress, step="point") as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    number, point = waiting.pop(0)
                    bar.message(f"point {number} of {total}: {point.name}")
                    arguments = directory, number, known[point.name], devices, os.getcwd()
                    running[task.remote(*arguments)] = point
                (ended, *_), _ = ray.wait(list(running))
                point = running.pop(ended)
                try:
                    ray.get(ended)
                except ray.exceptions.RayError as error:
                    sentence = f"its worker process ended: {type(error).__name__}"
                    folders.fail(folders.of_point(directory, point), sentence)
                report_point(bar, directory, point, sweep.metric)
                bar.update(total - len(waiting) - len(running))
    finally:
        ray.shutdown()
    return collect(sweep, directory)


def _on_worker(
    directory: Path, number: int, known: folders.Failure | None, devices: int, here: str
) -> None:
    """Carries out a point in a worker process, which has the options of the first one."""
    import jax

    # Paths of a config may be relative to where the sweep was started.
    os.chdir(here)
    compilation_cache.enable()
    jax.config.update("jax_num_cpu_devices", devices)
    sweep = folders.load_begun(directory)
    point = sweep.points[number - 1]
    try:
        carry_out_point(point, directory, sweep.title, known=known)
    except NoDataFolder as error:
        folders.fail(folders.of_point(directory, point), str(error))


def submit_to_slurm(
    sweep: Sweep, out: str | Path, *, workers: int | None, options: Sequence[str] = ()
) -> list[str]:
    """Submits an array job with a task for each unfinished point, and a job that collects them.

    Partition, account, time and devices are given to `sbatch` by its environment variables, such as
    SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and SBATCH_GPUS. The scripts and the logs,
    which have durations, lie in the sweep's directory, in `private/slurm`.

    Args:
      workers: the most tasks at a time; None sets no limit.
      options: further arguments of each task's `jaxpfl sweep`.

    Returns:
      What was submitted, in lines for a terminal.

    Raises:
      InputError: there is no sbatch, it refuses a job, or `out` holds another sweep.
    """
    directory = Path(out).resolve()
    folders.begin(sweep, directory)
    folder = files.private_directory(files.private_directory(directory / "private") / "slurm")
    numbers = [
        number
        for number, point in enumerate(sweep.points, 1)
        if folders.state_of(folders.of_point(directory, point)).state != "finished"
    ]
    if not numbers:
        return [f"all {len(sweep.points)} points are finished: nothing was submitted"]
    name = re.sub(r"[^\w.-]+", "_", f"jaxpfl-{sweep.title}")
    command = [sys.executable, "-m", "jaxpfl", "sweep", str(directory)]
    task = f'{shlex.join([*command, *options])} --point "$SLURM_ARRAY_TASK_ID"'
    after = shlex.join([*command, "--collect"])
    here = shlex.quote(os.getcwd())
    array, collecting = folder / "array.sh", folder / "collect.sh"
    for path, job, log, line in (
        (array, name, folder / "%A_%a.log", task),
        (collecting, f"{name}-collect", folder / "%j_collect.log", after),
    ):
        text = _SCRIPT.format(name=job, log=log, here=here, command=line)
        files.write_atomically(path, text, mode=0o700)
    at_once = "" if workers is None else f"%{workers}"
    job = _sbatch(f"--array={_ranges(numbers)}{at_once}", str(array))
    after = _sbatch(f"--dependency=afterany:{job}", str(collecting))
    return [
        f"submitted {len(numbers)} of {len(sweep.points)} points as array job {job}",
        f"job {after} makes the table when they have ended; at any time: "
        f"jaxpfl sweep --collect {shlex.quote(str(out))}",
        f"scripts and logs: {folder}",
    ]


def _sbatch(*arguments: str) -> str:
    """Submits a job and returns its number."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments], capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        raise InputError("--launcher slurm needs the program sbatch, found none on PATH") from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split()) or f"exit status {error.returncode}"
        raise InputError(f"sbatch refused {arguments[-1]}: {said}") from error
    # On a cluster of clusters: JOB;CLUSTER.
    return done.stdout.strip().partition(";")[0]


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as sbatch takes them: "1-3,5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, each)) for each in found)
