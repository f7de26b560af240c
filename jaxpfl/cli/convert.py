"""`jaxpfl convert`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what to read; see jaxpfl.data.open")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder; it is private")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.data.convert import convert

    record = convert(arguments.source, arguments.out)
    return {**record, "text": f"{record['clients']} clients written to {record['out']}"}
