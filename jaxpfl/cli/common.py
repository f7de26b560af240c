"""Options and steps that several commands share."""

import argparse
import dataclasses
import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
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


_SHARED = {
    "config": "a YAML file, or the name of a config that comes with jaxpfl, such as quickstart; "
    "`jaxpfl configs` lists them",
    "directory": "directory of a run",
    "--dry-run": "show shapes, memory and epsilon; read no client; fetch, charge and write nothing "
    "(--data.clients N: their number, if it is not in the config)",
    "--distributed": "share the run with the same command in other processes, such as one a "
    "machine: auto (Slurm, Kubernetes, Cloud TPU, Open MPI), or HOST:PORT,INDEX/COUNT, with "
    "HOST:PORT of process 0, such as 10.0.0.5:1234,0/2 here and 10.0.0.5:1234,1/2 there",
    "--accountant": "pld, rdp, ... (default: what fits the sampling)",
    "--cut": "cut all texts alike: messages (default), sentences, words:N or documents:N",
    "--ledger": "default: OUT/ledger.jsonl",
}
LAUNCHED = {
    "--launcher {ray,slurm}": "share a run, or each run of a sweep, among processes on --hosts N "
    "nodes",
    "--hosts N": "the number of nodes of --launcher",
}
_TYPES = {
    **dict.fromkeys(("EPSILON", "DELTA", "NORM", "SHARE", "MULTIPLIER"), float),
    **dict.fromkeys(("N", "K", "IDS", "ROUNDS", "CLIENTS"), int),
    **dict.fromkeys(("CONFIG", "RUN", "FILE", "DIR", "FOLDER", "MODEL", "LEDGER"), path),
    **dict.fromkeys(("CERTIFICATE", "OUT"), path),
}


def load(path: Path, overrides: Sequence[str] = ()) -> Any:
    """Reads the config of any system, and uses the devices that it names."""
    from jaxpfl.experiments import registry

    return use_devices(registry.load(path, overrides))


def use_run(directory: Path) -> None:
    from jaxpfl.experiments import registry

    use_devices(registry.load_run(directory))


def use_devices(config: Any) -> Any:
    """The config with its number of virtual CPU devices, by default one per core, which JAX has."""
    import jax

    here = cores.number()
    devices = here if config.run.devices is None else config.run.devices
    if devices > 64 * here:  # more would only take hours to compile for
        limit = f"at most {64 * here} on this machine, which has {here} cores"
        raise InputError(f"run.devices must be {limit}, found {devices}")
    jax.config.update("jax_num_cpu_devices", devices)
    memory.give_back_after_compiling()
    return dataclasses.replace(config, run=dataclasses.replace(config.run, devices=devices))


def add(parser: argparse.ArgumentParser, arguments: Mapping[str, str]) -> None:
    """Adds arguments, each as its usage, such as "--texts N=1000", and its help.

    The second word says the type, or which {a,b} may be chosen; without it an option is a flag. ?
    may be left out, + one or more, * may be repeated, ! required, =VALUE is the default. A help of
    "" is one that several commands have.
    """
    for usage, text in arguments.items():
        name, _, form = usage.partition(" ")
        form, _, default = form.partition("=")
        metavar, marks = form.strip("?+*!"), set(form) & set("?+*!")
        how: dict[str, Any] = {"metavar": metavar, "type": _TYPES.get(metavar, str)}
        if metavar.startswith("{"):
            how = {"choices": metavar.strip("{}").split(","), "type": partial(re.sub, "_", "-")}
        elif not metavar:
            how = {"action": "store_true"}
        for mark in marks & {"?", "+"}:
            how["nargs"] = mark
        how |= {"action": "append", "default": []} if "*" in marks else {}
        how |= {"required": True} if "!" in marks else {}
        how |= {"default": default} if default else {}
        parser.add_argument(name, help=text or _SHARED[name], **how)


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
