"""`jaxpfl sweep`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import add_config, add_dry_run, add_track, use_devices
from jaxpfl.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxpfl sweep CONFIG [--section.key VALUE ...] [--out DIR] [--dry-run]"
    add_config(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory (default: runs/NAME-OF-CONFIG); points finished there are kept",
    )
    add_track(parser)
    add_dry_run(parser)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.sweep.config import load_sweep

    path = shipped.find(arguments.config)
    sweep = load_sweep(path, overrides)
    devices = {point.config.run.devices for point in sweep.points}
    if len(devices) > 1:
        raise InputError(f"{path}: run.devices must be the same at all points")
    use_devices(sweep.points[0].config)
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run_sweep

        return dry_run_sweep(sweep)
    from jaxpfl.experiments.sweep.page import baseline_lines, measured_on, table_lines
    from jaxpfl.experiments.sweep.points import SIMULATION, run_sweep

    out = arguments.out or Path("runs", path.stem)
    print(f"sweep directory: {out}", file=sys.stderr)
    with shipped.form_without_data_named(path):
        outcome = run_sweep(sweep, out)
    report = outcome.out / "report.html"
    measured = measured_on(sweep.metric, outcome.scored_on)
    lines = [f"report: {report}", "", f"{measured}:", *table_lines(sweep, outcome.rows), ""]
    compared = baseline_lines(sweep, outcome.baselines)
    lines += [*compared, ""] if compared else []
    lines += [f"caution: {each}" for each in outcome.cautions] + [SIMULATION]
    return {
        "out": str(outcome.out),
        "report": str(report),
        "rows": outcome.rows,
        "baselines": outcome.baselines,
        "cautions": outcome.cautions,
        "note": SIMULATION,
        "text": "\n".join(lines),
    }
