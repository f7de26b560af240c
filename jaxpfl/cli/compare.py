"""`jaxpfl compare`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import unused_directory


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories")
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="the ledger of runs that have none in their directory and name none in their config",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/compare")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.compare import compare, lines

    out = arguments.out or unused_directory("compare")
    record = compare(arguments.runs, out, ledger=arguments.ledger)
    report = out / "report.html"
    text = "\n".join([f"report: {report}", "", *lines(record)])
    return {**record, "out": str(out), "report": str(report), "text": text}
