"""Two real processes that `jax.distributed` joins, on this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# A process's number and the address come first among the arguments of its script.
JOINED = """
import os, sys
import jax
index, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, index)
"""


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def start(
    command: Sequence[str], *, devices: int = 2, variables: Mapping[str, str] = {}
) -> "subprocess.Popen[str]":
    """A Python process with this many virtual devices."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
            "JAX_NUM_CPU_DEVICES": str(devices),
            **variables,
        },
    )


def ended(
    processes: Sequence["subprocess.Popen[str]"], seconds: float = 240
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process; none outlives this call."""
    try:
        found = [process.communicate(timeout=seconds) for process in processes]
        return [(p.returncode, *text) for p, text in zip(processes, found, strict=True)]
    finally:
        for process in processes:
            process.kill()


def together(script: str, *arguments: str, processes: int = 2) -> list[tuple[int, str, str]]:
    """What processes end with that run a script; it gets their number, an address and the rest."""
    address = free_address()
    return ended(
        [
            start(["-c", script, str(index), address, *arguments], devices=4 // processes)
            for index in range(processes)
        ]
    )
