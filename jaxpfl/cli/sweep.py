"""`jaxpfl sweep`."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.cli import common
from jaxpfl.errors import InputError

_FAILED = 4


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxpfl sweep CONFIG [--section.key VALUE ...] [--out DIR] [option ...]"
    config = (
        "a YAML file, the name of a config that comes with jaxpfl, or the directory of a sweep "
        "that was begun"
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help=config)
    common.add_path(
        parser,
        "--out",
        "DIR",
        "directory (default: runs/NAME-OF-CONFIG); points finished there are kept, failed ones "
        "tried again; several processes may work on it at once",
    )
    seeds = "repeat every point with N seeds, from the config's run.seed on"
    parser.add_argument("--seeds", type=int, metavar="N", help=seeds)
    ray = (
        "carry out N points at a time, each in a process of Ray (default: one after the other here)"
    )
    parser.add_argument("--ray", type=int, metavar="N", help=ray)
    common.add_dry_run(parser)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    if arguments.ray is not None:
        checks.positive_int("--ray", arguments.ray)
        if arguments.dry_run:
            raise InputError("--ray does not go with --dry-run: give one of them")
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.sweep import directory as folders
    from jaxpfl.experiments.sweep.config import load_sweep

    path = arguments.config
    begun = folders.is_sweep(path)
    if begun:
        options = [f"--{name}" for name in ("out", "seeds") if getattr(arguments, name) is not None]
        for name in (*overrides, *options):
            raise InputError(
                f"{name} is for a config, found it with the directory of a sweep that was begun, "
                f"{path}"
            )
        sweep, out = folders.load_begun(path), path
    else:
        path = shipped.find(path)
        sweep = load_sweep(path, overrides, seeds=arguments.seeds)
        out = arguments.out or Path("runs", path.stem)
    if len({point.config.run.devices for point in sweep.points}) > 1:
        raise InputError(f"{path}: run.devices must be the same at all points")
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run_sweep

        return dry_run_sweep(sweep)
    from jaxpfl.experiments.sweep import ray_workers
    from jaxpfl.experiments.sweep.points import run_sweep

    print(f"sweep directory: {out}", file=sys.stderr)
    devices = common.use_devices(sweep.points[0].config).run.devices
    if arguments.ray is not None:
        found = ray_workers.run_on_ray(sweep, out, workers=arguments.ray, devices=devices)
        return _result(sweep, found)
    with nullcontext() if begun else shipped.form_without_data_named(path):
        return _result(sweep, run_sweep(sweep, out))


def _result(sweep: Any, outcome: Any) -> dict[str, Any]:
    """What a sweep came to, as plain data and as text; exit code 4 where points failed."""
    from jaxpfl.experiments.sweep.page import baseline_lines, measured_on, table_lines

    record = {name: outcome.record[name] for name in ("rows", "baselines", "cautions", "note")}
    report = str(outcome.out / "report.html")
    table = table_lines(sweep, outcome.rows, outcome.durations)
    lines = [f"report: {report}", "", f"{measured_on(sweep.metric, outcome.scored_on)}:", *table]
    compared = baseline_lines(sweep, record["baselines"])
    lines += ["", *compared, ""] if compared else [""]
    lines += [f"caution: {each}" for each in record["cautions"]]
    lines += _missing(outcome.failed, outcome.unfinished)
    return {
        **record,
        "out": str(outcome.out),
        "report": report,
        "failed": outcome.failed,
        "unfinished": outcome.unfinished,
        "text": "\n".join([*lines, record["note"]]),
        "exit_code": _FAILED if outcome.failed else 0,
    }


def _missing(failed: dict[str, str], unfinished: list[str]) -> list[str]:
    """Which points failed and why, those with one reason together, and which are not finished."""
    reasons: dict[str, list[str]] = {}
    for name, error in failed.items():
        reasons.setdefault(error, []).append(name)
    lines = [f"failed: {_listed(names)}: {error}" for error, names in reasons.items()]
    if failed:
        lines.append("the same command tries the points that failed again")
    if unfinished:
        lines.append(f"not finished, by this process or another: {_listed(unfinished)}")
    return lines


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{' and '.join(names[:3])}{more}"
