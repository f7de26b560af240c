"""Options and steps that several commands share."""

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import checks, cores, files, memory
from jaxpfl.errors import InputError


def path(text: str) -> Path:
    """An argument that is a file or a folder, as its user means it."""
    try:
        return files.user_path(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_SHARED: dict[str, dict[str, Any]] = {
    "config": {
        "metavar": "CONFIG",
        "type": path,
        "help": "a YAML file, or the name of a config that comes with jaxpfl, such as quickstart; "
        "`jaxpfl configs` lists them",
    },
    "directory": {"metavar": "RUN", "type": path, "help": "directory of a run"},
    "--dry-run": {
        "action": "store_true",
        "help": "show shapes, memory and epsilon; read no client; fetch, charge and write nothing "
        "(--data.clients N: their number, if it is not in the config)",
    },
    "--distributed": {
        "metavar": "HOW",
        "help": "share the run with the same command in other processes, such as one a machine: "
        "auto (Slurm, Kubernetes, Cloud TPU, Open MPI), or HOST:PORT,INDEX/COUNT, with HOST:PORT "
        "of process 0, such as 10.0.0.5:1234,0/2 here and 10.0.0.5:1234,1/2 there",
    },
    "--launcher": {
        "choices": ("ray", "slurm"),
        "help": "share a run, or each run of a sweep, among processes on --hosts N nodes",
    },
    "--accountant": {"help": "pld, rdp, ... (default: what fits the sampling)"},
    "--hosts": {"type": int, "metavar": "N", "help": "the number of nodes of --launcher"},
}


def load(path: Path, overrides: Sequence[str] = ()) -> Any:
    """Reads the config of any system, and uses the devices that it names."""
    from jaxpfl.experiments import registry

    return use_devices(registry.load(path, overrides))


def use_run(directory: Path) -> None:
    from jaxpfl.experiments import registry

    use_devices(registry.load_run(directory))


def use_devices(config: Any) -> Any:
    """Sets JAX's number of virtual CPU devices to the config's, by default one per core.

    Returns the config with that number, so that a resumed run uses the same.
    """
    import jax

    here = cores.number()
    devices = here if config.run.devices is None else config.run.devices
    if devices > 64 * here:  # more would only take hours to compile for
        limit = f"at most {64 * here} on this machine, which has {here} cores"
        raise InputError(f"run.devices must be {limit}, found {devices}")
    jax.config.update("jax_num_cpu_devices", devices)
    memory.give_back_after_compiling()
    return dataclasses.replace(config, run=dataclasses.replace(config.run, devices=devices))


def add(parser: argparse.ArgumentParser, *names: str, **differs: Any) -> None:
    """Adds arguments and options that several commands have, but for what `differs` in one."""
    for name in names:
        parser.add_argument(name, **{**_SHARED[name], **differs})


def add_path(parser: argparse.ArgumentParser, name: str, metavar: str, text: str) -> None:
    """Adds an option that is a file or a folder."""
    parser.add_argument(name, type=path, metavar=metavar, help=text)


def unused(name: str, folder: Path = Path("runs"), ending: str = "") -> Path:
    """Returns FOLDER/NAMEENDING or, where that exists, FOLDER/NAME-2ENDING, -3 and on."""
    others = (f"{name}-{number}" for number in itertools.count(2))
    paths = (folder / f"{stem}{ending}" for stem in itertools.chain([name], others))
    return next(path for path in paths if not path.exists())


def launcher(arguments: argparse.Namespace) -> Callable[[Sequence[str]], tuple[int, str]] | None:
    """What starts a command on the hosts of --launcher, see `launch`; None without it."""
    name, hosts = arguments.launcher, arguments.hosts
    if (name is None) != (hosts is None):
        raise InputError("--launcher and --hosts go together: give both")
    if name is None:
        return None
    from jaxpfl.experiments.launch import LAUNCHERS

    return partial(LAUNCHERS[name], hosts=checks.positive_int("--hosts", hosts))


def launched(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The result of this command, with --distributed, by --launcher; None if it is done here."""
    start = launcher(arguments)
    if start is None or arguments.distributed is not None:
        return None
    from jaxpfl.experiments.launch import record_in

    code, text = start(shlex.split(arguments.command_line)[1:])
    record = record_in(text) if arguments.json else {}
    return {**record, "text": text.rstrip("\n"), "exit_code": code}


def join(how: str | None) -> bool:
    """Joins the processes of --distributed, if it was given; whether this one keeps the files."""
    if how is None:
        return True
    from jaxpfl.federated import mesh
    from jaxpfl.federated.hosts import processes

    processes.join(how)
    return mesh.leads()
