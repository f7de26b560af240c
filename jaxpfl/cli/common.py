"""Helpers that several commands share."""

import argparse
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any


def use_devices(config: Any) -> Any:
    """Sets JAX's number of virtual CPU devices to the config's, by default one per core.

    Returns:
      The config with that number, so that a resumed run uses the same. Accelerators ignore it.
    """
    import jax

    devices = config.run.devices
    if devices is None:
        affinity = getattr(os, "sched_getaffinity", None)
        devices = len(affinity(0)) if affinity else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, devices=devices))


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that `experiments.config.shipped.find` finds the file of."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        help="a YAML file, or the name of a config that comes with jaxpfl, such as quickstart; "
        "`jaxpfl configs` lists them",
    )


def add_track(parser: argparse.ArgumentParser) -> None:
    """Adds --track to a command that carries out runs."""
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        metavar="SERVICE:PROJECT",
        help="also log public metrics to wandb:PROJECT, mlflow:EXPERIMENT or trackio:PROJECT",
    )


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Adds --dry-run to a command that carries out a config."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, shapes, memory and epsilon: read no client, fetch, charge and write "
        "nothing (--data.clients N gives their number where the config does not)",
    )


def unused_directory(name: str) -> Path:
    """Returns `runs/NAME` or, where that exists, the first free one of `runs/NAME-2`, -3 and on."""
    others = (f"{name}-{number}" for number in itertools.count(2))
    paths = (Path("runs", each) for each in itertools.chain([name], others))
    return next(path for path in paths if not path.exists())


def add_distributed(parser: argparse.ArgumentParser) -> None:
    """Adds --distributed to a command that carries out a run."""
    parser.add_argument(
        "--distributed",
        metavar="HOW",
        help="share the run with the same command in other processes, such as one a machine: auto "
        "(Slurm, Kubernetes, Cloud TPU, Open MPI), or HOST:PORT,INDEX/COUNT, with HOST:PORT of "
        "process 0, such as 10.0.0.5:1234,0/2 here and 10.0.0.5:1234,1/2 there",
    )


def join(how: str | None) -> bool:
    """Joins the processes of --distributed, if it was given; whether this one keeps the files."""
    if how is None:
        return True
    from jaxpfl.federated import mesh
    from jaxpfl.federated.hosts import processes

    processes.join(how)
    return mesh.leads()
