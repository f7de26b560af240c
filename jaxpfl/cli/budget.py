"""`jaxpfl budget`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ledger", metavar="LEDGER", type=Path)
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument("--accountant", choices=("pld", "rdp"))


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    delta = checks.open_fraction("--delta", arguments.delta)
    from jaxpfl.privacy.ledger import Ledger

    if not arguments.ledger.is_file():
        raise InputError(f"{arguments.ledger}: there is no such ledger")
    ledger = Ledger.read(arguments.ledger)
    ledger.verify()
    record = ledger.summary(delta, arguments.accountant)
    text = (
        f"epsilon = {record['epsilon']:.4g} at delta = {delta:g}, {record['charges']} releases, "
        f"unit = {record['unit']}, adjacency = {record['adjacency']}, "
        f"accountant = {record['accountant']}"
    )
    return {"ledger": str(arguments.ledger), **record, "text": text}
