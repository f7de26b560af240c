"""`jaxpfl budget`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl import checks


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ledger", metavar="LEDGER", type=Path, help="such as ledger.jsonl of a run")
    parser.add_argument("--delta", type=float, required=True, help="of the guarantee, such as 1e-5")
    parser.add_argument("--accountant", help="pld, rdp ...; default: by the sampling")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    delta = checks.open_fraction("--delta", arguments.delta)
    from jaxpfl.privacy.ledger import Ledger

    ledger = Ledger.read(arguments.ledger)
    ledger.verify()
    record = ledger.summary(delta, arguments.accountant)
    text = (
        f"epsilon = {record['epsilon']:.4g} at delta = {delta:g}, {record['charges']} releases, "
        f"unit = {record['unit']}, adjacency = {record['adjacency']}, "
        f"accountant = {record['accountant']}"
    )
    return {"ledger": str(arguments.ledger), **record, "text": text}
