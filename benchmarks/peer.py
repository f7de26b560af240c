"""The other side of a comparison: a program in an interpreter of its own that takes its turns."""

import json
import pathlib
import subprocess
import tempfile
from typing import Any

import numpy as np


class Peer:
    """A script that is started once and makes one turn of its work for every line that it reads.

    Args:
      python: the interpreter, or the folder of its environment.
      script: it is given the path of an .npz file; it answers its start with a JSON object, and
        every later line with a number, or what else `ask` expects.
      arrays: what the file holds.

    Attributes:
      hello: the JSON object.
    """

    def __init__(self, python: pathlib.Path, script: pathlib.Path, arrays: dict[str, Any]):
        if python.is_dir():
            python = python / "bin" / "python"
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "data.npz"
            np.savez(file, **arrays)
            self._process = subprocess.Popen(
                [str(python), str(script), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.hello: dict[str, Any] = json.loads(self._read())

    def turn(self) -> float:
        """Makes a turn; returns the number that the script answers with."""
        return float(self.ask(""))

    def ask(self, line: str) -> str:
        """The script's answer to a line."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._read()

    def peak_memory_mb(self) -> float:
        """The process's peak resident memory so far, in MB (Linux)."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with exit code {self._process.wait()}")
        return line


def check(name: str, found: float, expected: float, tolerance: float) -> None:
    """Ends the benchmark if a peer does not compute what ours does."""
    if not abs(found - expected) <= tolerance * abs(expected):
        raise SystemExit(f"{name}: {found}, ours {expected}: not the same computation")
