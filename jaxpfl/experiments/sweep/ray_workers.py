"""Carries out the points of a sweep in worker processes of Ray.

Each worker does what `points` does with one point, in the sweep's directory, which all machines
must see under the same path. Results are read from there; nothing else is exchanged.
"""

import os
from pathlib import Path

from jaxpfl import compilation_cache
from jaxpfl.errors import InputError, NoDataFolder
from jaxpfl.experiments.sweep import directory as folders
from jaxpfl.experiments.sweep.config import Sweep
from jaxpfl.experiments.sweep.points import carry_out_point, report_point
from jaxpfl.experiments.sweep.results import SweepOutcome, collect
from jaxpfl.progress import Progress


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
            "--ray needs Ray, which is not installed: pip install 'jaxpfl[ray]'"
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
