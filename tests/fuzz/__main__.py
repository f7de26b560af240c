"""Fuzzes every reader of files: it reads an input and uses it, or raises the library's own error.

    python -m tests.fuzz --inputs 10_000_000 --workers 2
    python -m tests.fuzz --inputs 1000 --only "ledger" --first 5000

Each reader is in a process of its own, so that one that dies is noticed, and the others go on. An
input is a function of the reader's name and a number: a fault is repeated by `--only NAME --first
NUMBER --inputs 1`. Exit status 1 if there was a fault.
"""

import argparse
import contextlib
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.mutants import mutant
from tests.fuzz.targets import TARGETS, made, run_input

_LONGEST_SECONDS = 60.0
_MOST_FAULTS = 20


def _work(name: str, first: int, behind: int, folder: Path, note: Path) -> None:
    """Reads the inputs first .. behind - 1; notes each number before it is read."""
    target = TARGETS[name]
    seed = made(target, folder)
    slowest, faults = (0.0, first), []
    # Before the first input, so that what the libraries themselves take is known.
    run_input(target, folder, seed)
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = first - 1
    with note.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shown:
        for number in range(first, behind):
            shown[:] = number.to_bytes(8, "little")
            began = time.monotonic()
            try:
                run_input(target, folder, mutant(seed, name, number))
            except Exception as error:
                faults.append([number, f"{type(error).__name__}: {error}"[:300]])
            slowest = max(slowest, (time.monotonic() - began, number))
            if len(faults) == _MOST_FAULTS:
                break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"done": number + 1 - first, "faults": faults, "slowest": slowest}
    _say(json.dumps({**found, "peak": peak, "more": peak - begin}))


def _fuzz(name: str, first: int, behind: int) -> dict[str, Any]:
    """What the inputs of one reader do, in processes that may die."""
    total: dict[str, Any] = {"done": 0, "faults": [], "peak": 0, "more": 0, "slowest": (0.0, first)}
    fast = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as place:
        note = Path(place, "number")
        while first < behind and len(total["faults"]) < _MOST_FAULTS:
            note.write_bytes(first.to_bytes(8, "little"))
            with tempfile.TemporaryDirectory(dir=place) as folder:
                work = ["--work", folder, "--note", str(note), "--only", name]
                command = [sys.executable, "-m", "tests.fuzz", *work]
                command += ["--first", str(first), "--inputs", str(behind - first)]
                died = _run(command, note, total)
            if not died:
                break
            number = int.from_bytes(note.read_bytes(), "little")
            total["faults"].append([number, died])
            total["done"] += number + 1 - first
            first = number + 1
    return total


def _run(command: list[str], note: Path, total: dict[str, Any]) -> str:
    """Adds what a process found to `total`; returns how it died, or "" if it did not."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        known, since = b"", time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=2)
                break
            if (now := note.read_bytes()) != known:
                known, since = now, time.monotonic()
            elif time.monotonic() - since > _LONGEST_SECONDS:
                process.kill()
                process.communicate()
                return f"took more than {_LONGEST_SECONDS:g} s"
    if process.returncode:
        return f"the process ended with status {process.returncode}"
    found = json.loads(output)
    for key in ("done", "faults"):
        total[key] += found[key]
    for key in ("peak", "more"):
        total[key] = max(total[key], found[key])
    total["slowest"] = max(total["slowest"], tuple(found["slowest"]))
    return ""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Fuzzes as the command line says, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--workers", type=int, default=1, help="readers side by side")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one reader alone")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    first = arguments.first
    if arguments.work is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        warnings.simplefilter("error")
        _work(arguments.only, first, first + arguments.inputs, arguments.work, arguments.note)
        return 0
    chosen = [arguments.only] if arguments.only else list(TARGETS)
    shares = sum(TARGETS[name].share for name in chosen)
    began, done, faults = time.monotonic(), 0, 0
    titles = f"{'reader':28}{'inputs':>10}{'faults':>8}{'slowest':>10}{'peak':>9}{'more':>8}"
    _say(titles)

    def fuzzed(name: str) -> dict[str, Any]:
        inputs = max(1, round(arguments.inputs * TARGETS[name].share / shares))
        return _fuzz(name, first, first + inputs)

    with ThreadPoolExecutor(arguments.workers) as pool:
        for name, found in zip(chosen, pool.map(fuzzed, chosen), strict=True):
            seconds, number = found["slowest"]
            _say(
                f"{name:28}{found['done']:>10,}{len(found['faults']):>8}{seconds:>8.2f} s"
                f"{found['peak'] >> 10:>6} MB{found['more'] >> 10:>5} MB   #{number}"
            )
            for number, what in found["faults"]:
                _say(f"    #{number}: {what}")
            done, faults = done + found["done"], faults + len(found["faults"])
    _say(f"{done:,} inputs in {time.monotonic() - began:,.0f} s: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
