"""`jaxpfl run`, `resume` and `report`: a config of any system."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import (
    add_config,
    add_distributed,
    add_dry_run,
    add_track,
    join,
    unused_directory,
    use_devices,
)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jaxpfl run CONFIG [--section.key VALUE ...] [--ledger FILE] [--out DIR] [--dry-run] "
        "[--distributed HOW]"
    )
    add_config(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory (default: runs/NAME-OF-CONFIG)"
    )
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="same as --privacy.ledger: a ledger that several runs on these clients share "
        "(default: the run's own, in its directory)",
    )
    add_track(parser)
    add_dry_run(parser)
    add_distributed(parser)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.registry import load

    path = shipped.find(arguments.config)
    if arguments.ledger is not None:
        overrides = [*overrides, "--privacy.ledger", str(arguments.ledger)]
    config = use_devices(load(path, overrides))
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run

        return dry_run(config)
    keeps_files = join(arguments.distributed)
    out = arguments.out or unused_directory(path.stem)
    if keeps_files:
        print(f"run directory: {out}", file=sys.stderr)
    from jaxpfl.experiments import carry_out

    with shipped.form_without_data_named(path):
        return carry_out.run(config, out, command=arguments.command_line).to_dict()


def add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path)


def add_resume(parser: argparse.ArgumentParser) -> None:
    add_directory(parser)
    add_track(parser)
    add_distributed(parser)


def resume(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.registry import load_run

    use_devices(load_run(arguments.directory))
    join(arguments.distributed)
    from jaxpfl.experiments import carry_out

    return carry_out.resume(arguments.directory, command=arguments.command_line).to_dict()


def report(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments import carry_out

    path = carry_out.report(arguments.directory)
    return {"report": str(path), "text": str(path)}
