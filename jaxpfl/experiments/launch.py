"""Starts one command on several hosts: Slurm or Ray starts it, and `jax.distributed` joins it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.lazy import require

_JAXPFL = [sys.executable, "-m", "jaxpfl"]


def by_slurm(arguments: Sequence[str], hosts: int) -> tuple[int, str]:
    """Runs `jaxpfl ARGUMENTS` on nodes by `srun`: the largest exit code, stdout of process 0."""
    # The processes that live need up to 30 seconds to say why they end.
    start = ["srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--output=0", "--kill-on-bad-exit=0"]
    try:
        return _done([*start, *_JAXPFL, *arguments, "--distributed", "auto"])
    except FileNotFoundError as error:
        raise InputError("--launcher slurm needs srun, which is not on the PATH here") from error


def by_ray(arguments: Sequence[str], hosts: int) -> tuple[int, str]:
    """As `by_slurm`, on nodes of Ray's cluster; a process gets all GPUs of its node."""
    with cluster(hosts, logs=True) as ray:
        strategies = require("ray.util.scheduling_strategies", "ray")
        gpus = max(node["Resources"].get("GPU", 0) for node in ray.nodes())
        # Processes run on different nodes, as long as there are enough.
        group = ray.util.placement_group([{"CPU": 1, "GPU": gpus}] * hosts, strategy="SPREAD")

        def on(index: int, function: Callable) -> Any:
            on_node = strategies.PlacementGroupSchedulingStrategy
            there = on_node(group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}
            return ray.remote(function).options(scheduling_strategy=there, **options)

        def free_address() -> str:
            with socket.socket() as free:
                free.bind(("", 0))
                return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

        address = ray.get(on(0, free_address).remote())
        started, ended = [], []
        for index in range(hosts):
            joined = "--distributed", f"{address},{index}/{hosts}"
            command = [*_JAXPFL, *arguments, *joined]
            started.append(on(index, _done).remote(command, os.getcwd()))
        for process in started:
            try:
                ended.append(ray.get(process))
            except ray.exceptions.RayError:
                ended.append((1, ""))  # The other processes say that the node is lost.
        return max(code for code, _ in ended), ended[0][1]


@contextmanager
def cluster(workers: int, *, logs: bool) -> Iterator[Any]:
    """Ray, at RAY_ADDRESS or started here for so many workers; `logs`: what these write, too."""
    ray = require("ray", "ray")
    # Ray reports its usage to its makers unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    started = {"address": address} if address else {"address": "local", "num_cpus": workers}
    ray.init(**started, include_dashboard=False, log_to_driver=logs, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()


Start = Callable[[Sequence[str]], tuple[int, str]]
LAUNCHERS = {"ray": by_ray, "slurm": by_slurm}


def record_in(text: str) -> dict[str, Any]:
    """What process 0 wrote with --json, among lines of JAX's collectives; {} if it was killed."""
    start = text.find("{")
    return {} if start < 0 else json.JSONDecoder().raw_decode(text, start)[0]


def _done(command: Sequence[str], folder: str | None = None) -> tuple[int, str]:
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except KeyboardInterrupt as error:
            # The command stops after its round.
            process.send_signal(number := getattr(error, "number", signal.SIGINT))
            return 128 + number, process.communicate()[0]
    return abs(process.returncode), printed
