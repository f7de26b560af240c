"""`jaxpfl audit`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import add_config, use_devices

EXCEEDED = 5
"""The exit code of an audit that refutes a stated epsilon."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jaxpfl audit CONFIG [--section.key VALUE ...] [--canaries M] [--runs K] [--rounds T] "
        "[--confidence C] [--seed N] [--out FILE]"
    )
    add_config(parser)
    parser.add_argument(
        "--canaries", type=int, metavar="M", default=1_000, help="in each run (default: 1000)"
    )
    parser.add_argument(
        "--runs", type=int, metavar="K", default=8, help="of each release (default: 8)"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="T", default=20, help="at most, of each run (default: 20)"
    )
    parser.add_argument(
        "--confidence", type=float, metavar="C", default=0.99, help="of the bounds (default: 0.99)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the game (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the record as JSON")


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.registry import load

    config = use_devices(load(shipped.find(arguments.config), overrides))
    from jaxpfl import files
    from jaxpfl.experiments.audit import AuditSettings, audit

    names = ("canaries", "runs", "rounds", "confidence", "seed")
    settings = AuditSettings(**{name: getattr(arguments, name) for name in names})
    record = audit(config, settings)
    if arguments.out is not None:
        written = {name: value for name, value in record.items() if name != "text"}
        files.write_json(arguments.out, files.jsonable(written))
    return {**record, "exit_code": EXCEEDED if record["exceeded"] else 0}
