"""`jaxpfl synthesize`."""

import argparse
from collections.abc import Mapping, Sequence
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
    from jaxpfl.experiments.registry import load_run

    use_devices(load_run(arguments.directory))
    from jaxpfl.experiments import carry_out

    card = carry_out.synthesize(arguments.directory, arguments.out, texts=arguments.texts)
    return {"out": str(arguments.out), "card": card, "text": described(card)}


def described(card: Mapping[str, Any]) -> str:
    """The card in a few lines, for a terminal."""
    lines = [f"{card['texts']} texts, of which {card['written_after_the_run']} beyond the run's"]
    if card["stamp"]:
        lines.append(card["stamp"])
    return "\n".join([*lines, card["statement"]])
