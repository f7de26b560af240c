"""Carries out a sweep in worker processes of Ray.

Each worker does what any process does that is started on the sweep's directory, which all machines
must see under the same path: it takes the next free point until none is left.
"""

import os
from pathlib import Path

from jaxpfl import compilation_cache
from jaxpfl.errors import InputError
from jaxpfl.experiments.sweep.config import Sweep
from jaxpfl.experiments.sweep.directory import SweepDirectory
from jaxpfl.experiments.sweep.points import run_sweep
from jaxpfl.experiments.sweep.results import SweepOutcome, collect


def run_on_ray(sweep: Sweep, out: str | Path, *, workers: int, devices: int) -> SweepOutcome:
    """Carries out the unfinished points in this many workers; what a lost one had is unfinished.

    Joins the cluster that the environment variable RAY_ADDRESS names; without it, Ray is started on
    this machine and ended afterwards. A worker has so many virtual CPU devices, and asks for one
    CPU, and for one GPU where the cluster has any.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            "--ray needs Ray, which is not installed: pip install 'jaxpfl[ray]'"
        ) from error
    directory = SweepDirectory(Path(out).resolve())
    directory.begin(sweep)
    # Ray reports its usage to its makers unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    started = {"address": address} if address else {"address": "local", "num_cpus": workers}
    ray.init(**started, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_work)
        arguments = sweep, directory.path, devices, os.getcwd()
        for each in [task.remote(*arguments) for _ in range(workers)]:
            try:
                ray.get(each)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError:
                # The worker is lost; the table lists what it left unfinished.
                continue
    finally:
        ray.shutdown()
    return collect(sweep, directory)


def _work(sweep: Sweep, path: Path, devices: int, here: str) -> None:
    import jax

    # Paths of a config may be relative to where the sweep was started.
    os.chdir(here)
    compilation_cache.enable()
    jax.config.update("jax_num_cpu_devices", devices)
    run_sweep(sweep, path, progress=False)
