"""A program as a process: it is asked for rounds, and what they cost is read from Linux.

Between its rounds a program is stopped, so that what it does in the background, such as the polling
of Ray's servers, takes no time from the others.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Turn(NamedTuple):
    """What one round took.

    Attributes:
      seconds: of wall time.
      cpu_seconds: of the program and of all processes that it started.
      foreign: processors that anything else kept busy meanwhile, on average.
      norm: of the mean change before noise; None if the program does not tell it.
    """

    seconds: float
    cpu_seconds: float
    foreign: float
    norm: float | None


class Ended(SystemExit):
    """A program ended where it should have answered.

    Attributes:
      reason: in few words.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        # Linux kills with SIGKILL what takes the last memory.
        self.reason = "killed, out of memory" if status == -9 else f"failed, status {status}"


class Program:
    """A running program, in a session of its own, so that its processes can be found.

    Attributes:
      hello: its first answer, the versions that it runs.
      start_seconds: from its start to that answer.
    """

    def __init__(self, command: list[str], folder: Path, log: Path):
        began = time.perf_counter()
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.hello = self._answer()
        self.start_seconds = time.perf_counter() - began
        self._send(signal.SIGSTOP)

    def turn(self) -> Turn:
        """Runs one round."""
        self._send(signal.SIGCONT)
        own, every, began = self._cpu_seconds(), _busy_seconds(), time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._answer()
        seconds = time.perf_counter() - began
        own, every = self._cpu_seconds() - own, _busy_seconds() - every
        self._send(signal.SIGSTOP)
        return Turn(seconds, own, max(0.0, every - own) / seconds, answer["norm"])

    def peak_memory_mb(self) -> float:
        """The sum of its processes' peaks of resident memory."""
        total = 0
        for pid in self._session():
            for line in _lines(_PROC / pid / "status"):
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1])
        return total / 1024

    def close(self) -> None:
        """Hangs up, and waits for the end of the program, which comes within ten seconds."""
        self._send(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # TFF's executor and Ray's servers would outlive the program that started them.
        self._send(signal.SIGKILL)
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            status, errors = self._process.returncode, self._log.read_text()[-2_000:]
            message = f"{self._process.args!r} ended with status {status}:\n{errors}"
            raise Ended(message, status)
        return json.loads(line)

    def _send(self, number: int) -> None:
        """Sends a signal to all of its processes."""
        for pid in self._session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def _session(self) -> list[str]:
        """The processes of its session."""
        pids = [path.name for path in _PROC.iterdir() if path.name.isdigit()]
        session = str(self._process.pid)
        return [pid for pid in pids if _fields(pid)[3:4] == [session]]

    def _cpu_seconds(self) -> float:
        # utime, stime, and those of children that have ended.
        ticks = (int(field) for pid in self._session() for field in _fields(pid)[11:15])
        return sum(ticks) / _TICKS


def _fields(pid: str) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if the process has ended."""
    text = "".join(_lines(_PROC / pid / "stat"))
    return text[text.rfind(")") + 2 :].split()


def _busy_seconds() -> float:
    """Seconds that all processors together were busy, or taken by another virtual machine."""
    user, nice, system, _, _, irq, softirq, steal = map(int, _lines(_PROC / "stat")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
