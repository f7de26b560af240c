"""Fuzzes every reader of files: it reads an input and uses it, or raises the library's own error.

    python -m tests.fuzz --inputs 10_000_000 --workers 2
    python -m tests.fuzz --inputs 1000 --only "ledger" --first 5000

Each reader is in a process of its own, so that one that dies is noticed, and the others go on. An
input is a function of the reader's name and a number: a fault is repeated by `--only NAME --first
NUMBER --inputs 1`. Exit status 1 if there was a fault.
"""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tests.fuzz.targets import TARGETS, fuzzed


def _in_a_process(name: str, first: int, behind: int) -> tuple[list[str], float, int]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(fuzzed, name, first, behind).result()
        except BrokenProcessPool:
            return [f"the process of the inputs {first} to {behind - 1} died"], 0.0, first


def main() -> int:
    """Fuzzes as the command line says, and prints what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--workers", type=int, default=1, help="readers side by side")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one reader alone")
    arguments = parser.parse_args()
    chosen = [arguments.only] if arguments.only else list(TARGETS)
    first, shares = arguments.first, sum(TARGETS[name].share for name in chosen)
    counts = [max(1, round(arguments.inputs * TARGETS[name].share / shares)) for name in chosen]
    total = 0
    with ThreadPoolExecutor(arguments.workers) as pool:
        results = pool.map(
            _in_a_process, chosen, [first] * len(chosen), [first + n for n in counts]
        )
        for name, count, found in zip(chosen, counts, results, strict=True):
            faults, seconds, number = found
            total += len(faults)
            done = f"{name:28}{count:>10,} inputs, slowest {seconds:.2f} s (#{number})"
            sys.stdout.write("\n    ".join([done, *faults]) + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{sum(counts):,} inputs: {total} faults\n")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
