"""Everything that a GPU is to measure, without anybody's attention.

    python -m benchmarks.gpu                             # all parts, four hours at most
    python -m benchmarks.gpu --only aggregate cifar10
    python -m benchmarks.gpu --tiny                      # on any machine: does each part end?

Every part (`benchmarks.gpu.parts`) is a process of its own of under ten minutes, and they run one
after the other. When a part ends, one line of JSON says how it went and holds its rows; a part that
fails or takes too long says so in "error", and the next one begins. Rows are appended to
benchmarks/results, and to the folder that the environment variable OUT names, if it is set. Those
of `--tiny` measure nothing and are appended to OUT alone.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.gpu.parts import LIMIT, Part, parts

# A process takes the memory that it needs, and leaves the rest to a peer on the same device.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclasses.dataclass(frozen=True)
class Config:
    only: tuple[str, ...] = ()  # parts by name; default all
    tiny: bool = False
    limit: int = LIMIT  # seconds of a part


def run(part: Part, config: Config) -> dict[str, Any]:
    """Runs a part; what is printed of it. Its rows are stored before this returns."""
    arguments = part.tiny if config.tiny else part.arguments
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **_ENVIRONMENT, harness.ELSEWHERE: folder}
        began, error = time.monotonic(), None
        try:
            done = subprocess.run(
                [sys.executable, "-m", part.module, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=config.limit,
                check=False,
            )
            if done.returncode:
                lines = done.stdout.strip().splitlines()[-3:]
                error = f"exit code {done.returncode}: {' | '.join(lines)}"[:600]
        except subprocess.TimeoutExpired:
            error = f"stopped after {config.limit} s"
        seconds = round(time.monotonic() - began, 1)
        rows = _stored(pathlib.Path(folder), _destinations(config.tiny))
    if error is None and not rows:
        error = "it recorded no row"
    return {"part": part.name, "seconds": seconds, "error": error, "rows": rows}


def _destinations(tiny: bool) -> list[pathlib.Path]:
    named = os.environ.get("OUT")
    own = [] if tiny else [harness.RESULTS]
    return [*own, *([pathlib.Path(named)] if named else [])]


def _stored(folder: pathlib.Path, destinations: list[pathlib.Path]) -> list[dict[str, Any]]:
    """Appends the files of a part to those of the same name; returns their rows."""
    rows = []
    for file in sorted(folder.glob("*.jsonl")):
        text = file.read_text(encoding="utf-8")
        rows += [json.loads(line) for line in text.splitlines()]
        for destination in destinations:
            destination.mkdir(parents=True, exist_ok=True)
            with (destination / file.name).open("a", encoding="utf-8") as stored:
                stored.write(text)
    return rows


def main(config: Config) -> int:
    """Runs the parts; returns how many of them failed."""
    known = {part.name: part for part in parts()}
    unknown = [name for name in config.only if name not in known]
    if unknown:
        raise SystemExit(f"--only must name parts ({', '.join(known)}), found {unknown[0]!r}")
    chosen = [known[name] for name in config.only or known]
    if config.tiny:
        # Parts that differ in their sizes alone are the same ones now.
        chosen = list({(part.module, part.tiny): part for part in chosen}.values())
    failed = 0
    for part in chosen:
        found = run(part, config)
        failed += found["error"] is not None
        print(json.dumps(found), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(tyro.cli(Config, description=__doc__))))
