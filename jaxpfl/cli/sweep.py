"""`jaxpfl sweep`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.cli import common
from jaxpfl.errors import InputError

_FAILED = 4


def add(parser: argparse.ArgumentParser) -> None:
    common.add(parser, "config", "--dry-run", "--launcher", "--hosts")
    out = "default: runs/NAME-OF-CONFIG; points finished there are kept, failed ones tried again"
    common.add_path(parser, "--out", "DIR", out)
    seeds = "repeat every point with N seeds, from the config's run.seed on"
    parser.add_argument("--seeds", type=int, metavar="N", help=seeds)
    ray = "carry out N points at a time, each in a process of Ray (default: one at a time, here)"
    parser.add_argument("--ray", type=int, metavar="N", help=ray)
    private = "release only the best of a random number of points, and charge for the choice"
    parser.add_argument("--private-selection", action="store_true", help=private)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    if arguments.ray is not None:
        checks.positive_int("--ray", arguments.ray)
        if arguments.dry_run or arguments.launcher:
            raise InputError("--ray goes neither with --dry-run nor --launcher: give one of them")
    if arguments.private_selection and (arguments.ray or arguments.launcher):
        raise InputError("--private-selection goes neither with --ray nor --launcher")
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.sweep.config import load_sweep

    start = common.launcher(arguments)
    path = shipped.find(arguments.config)
    sweep = load_sweep(path, overrides, seeds=arguments.seeds)
    out = arguments.out or Path("runs", path.stem)
    if len({point.config.run.devices for point in sweep.points}) > 1:
        raise InputError(f"{path}: run.devices must be the same at all points")
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run_sweep

        return dry_run_sweep(sweep, selection=arguments.private_selection)
    from jaxpfl.experiments.sweep.points import launched, run_on_ray, run_sweep

    print(f"sweep directory: {out}", file=sys.stderr)
    devices = common.use_devices(sweep.points[0].config).run.devices
    if arguments.private_selection:
        from jaxpfl.experiments.sweep.selection import lines, select

        print("the points are carried out under private/; their number is secret", file=sys.stderr)
        with shipped.form_without_data_named(path):
            record = select(sweep, out)
        report = str(out / "report.html")
        text = "\n".join([f"report: {report}", "", *lines(record)])
        return {**record, "out": str(out), "report": report, "text": text}
    if arguments.ray is not None:
        return _result(sweep, run_on_ray(sweep, out, workers=arguments.ray, devices=devices))
    with shipped.form_without_data_named(path):
        carry = start and partial(launched, start)
        return _result(sweep, run_sweep(sweep, out, carry=carry))


def _result(sweep: Any, outcome: Any) -> dict[str, Any]:
    from jaxpfl.experiments.sweep.page import lines

    record, report = outcome.record, str(outcome.out / "report.html")
    text = [f"report: {report}", "", *lines(sweep, record), ""]
    text += [f"caution: {caution}" for caution in record["cautions"]]
    # Points that failed for the same reason share a line.
    reasons: dict[str, list[str]] = {}
    for name, error in outcome.failed.items():
        reasons.setdefault(error, []).append(name)
    text += [f"failed: {_listed(names)}: {error}" for error, names in reasons.items()]
    if outcome.failed:
        text.append("the same command tries the points that failed again")
    if outcome.unfinished:
        text.append(f"not finished, by this process or another: {_listed(outcome.unfinished)}")
    return {
        **{name: record[name] for name in ("rows", "cautions", "note")},
        "out": str(outcome.out),
        "report": report,
        "failed": outcome.failed,
        "unfinished": outcome.unfinished,
        "text": "\n".join([*text, record["note"]]),
        "exit_code": _FAILED if outcome.failed else 0,
    }


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{' and '.join(names[:3])}{more}"
