"""`jaxpfl init`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a table: .csv, .jsonl, .json, .parquet or .arrow"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="CONFIG",
        help="what to write (default: NAME-OF-FILE.yaml)",
    )
    parser.add_argument("--client", metavar="COLUMN", help="whose a row is; * makes each row one")
    parser.add_argument("--text", metavar="COLUMN", help="the texts")
    parser.add_argument("--label", metavar="COLUMN", help="the classes, whole numbers from 0")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    out = arguments.out or Path(Path(arguments.file).name.partition(".")[0] + ".yaml")
    if out.exists():
        raise InputError(f"{out} exists already; choose another file with --out")
    from jaxpfl.experiments.init import init

    config, guesses = init(
        arguments.file, client=arguments.client, text=arguments.text, label=arguments.label
    )
    with out.open("x", encoding="utf-8") as file:
        file.write(config)
    lines = [
        *guesses,
        "",
        f"{out} is a config for it, with a comment for each setting. A wrong guess is "
        "changed there, or by --client, --text and --label.",
        "A fifth of the clients, `valid` and `test` in it, are declared public: scores on them are "
        "shown without noise.",
        "",
        f"jaxpfl run {out}",
    ]
    return {"config": str(out), "guesses": guesses, "text": "\n".join(lines)}
