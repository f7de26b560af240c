"""`jaxpfl synthesize`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.cli.common import use_devices


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN_DIR", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="JSON Lines")
    parser.add_argument(
        "--texts",
        type=int,
        metavar="N",
        help="default: as many as the run made; more cost the clients nothing",
    )


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.texts is not None:
        checks.positive_int("--texts", arguments.texts)
    from jaxpfl.experiments.registry import load

    if (arguments.directory / "config.yaml").exists():
        use_devices(load(arguments.directory / "config.yaml"))
    from jaxpfl.experiments.systems.synthetic_text.synthesize import described, synthesize

    card = synthesize(arguments.directory, arguments.out, texts=arguments.texts)
    return {"out": str(arguments.out), "card": card, "text": described(card)}
