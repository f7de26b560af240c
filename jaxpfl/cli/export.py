"""`jaxpfl export`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import use_devices


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", type=Path, help="directory of a finished run")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload it to this repository of the Hugging Face hub, which is created as one "
        "that only its owner can see",
    )


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.registry import load

    config = arguments.directory / "config.yaml"
    if config.exists():
        use_devices(load(config))
    from jaxpfl.experiments.export import export

    found = export(arguments.directory, arguments.folder, push=arguments.push)
    lines = [f"{arguments.folder}/{name}" for name in found["files"]]
    lines += [found["stamp"]] if found["stamp"] else []
    lines += [found["privacy"], *found.get("pushed", [])]
    return {**found, "text": "\n".join(lines)}
