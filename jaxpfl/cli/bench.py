"""`jaxpfl bench`."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import unused_directory
from jaxpfl.errors import InputError

_ROOT = Path(__file__).parents[2]


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="or all; none lists them")
    parser.add_argument("--store", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/bench")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if not (_ROOT / "benchmarks" / "suite.py").exists():
        raise InputError(
            "jaxpfl bench: the benchmarks are in the repository and not in the installed package: "
            "clone it, and install it with `pip install -e .`"
        )
    command = [sys.executable, "-m", "benchmarks", *arguments.names]
    if not arguments.names:
        listed = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
        lines = listed.stdout.rstrip()
        names = dict(line.split(maxsplit=1) for line in lines.splitlines())
        return {"benchmarks": names, "text": lines}
    out = (arguments.out or unused_directory("bench")).resolve()
    command += ["--out", str(out), *(["--store"] if arguments.store else [])]
    # With --json, stdout is for the result alone.
    status = subprocess.run(command, cwd=_ROOT, stdout=sys.stderr if arguments.json else None)
    if status.returncode:
        raise InputError("jaxpfl bench: a benchmark did not end well; its message is above")
    record = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    return {**record, "out": str(out), "text": f"rows and comparison in {out}"}
