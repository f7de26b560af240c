"""`jaxpfl sweep`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl import checks
from jaxpfl.cli.common import add_dry_run, add_track, use_devices
from jaxpfl.errors import InputError

_FAILED = 4
_LAUNCHERS = ("local", "ray", "slurm")


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxpfl sweep CONFIG [--section.key VALUE ...] [--out DIR] [option ...]"
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        help="a YAML file, the name of a config that comes with jaxpfl, or the directory of a "
        "sweep that was begun",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory (default: runs/NAME-OF-CONFIG); points finished there are kept, failed "
        "ones tried again; several processes may work on it at once",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="repeat every point with N seeds, from the config's run.seed on",
    )
    parser.add_argument(
        "--launcher",
        choices=_LAUNCHERS,
        default="local",
        help="where points are carried out: one after the other in this process (local), in "
        "processes of Ray (ray), or as array jobs of Slurm (slurm)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="points at a time (ray: 1; slurm: no limit)",
    )
    parser.add_argument(
        "--point",
        type=int,
        metavar="I",
        help="carry out point number I, from 1, alone, and make no table",
    )
    parser.add_argument(
        "--collect",
        action="store_true",
        help="carry out nothing; make table and page of the points that CONFIG, the directory of a "
        "sweep, holds",
    )
    add_track(parser)
    add_dry_run(parser)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    _check(arguments)
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.sweep import directory as folders
    from jaxpfl.experiments.sweep.config import load_sweep

    begun = folders.is_sweep(arguments.config) or arguments.collect or arguments.point is not None
    if begun:
        options = [f"--{name}" for name in ("out", "seeds") if getattr(arguments, name) is not None]
        for name in (*overrides, *options):
            raise InputError(
                f"{name} is for a config, found it with the directory of a sweep that was begun, "
                f"{arguments.config}"
            )
    if arguments.point is not None:
        return _one_point(arguments.config, arguments.point)
    path = arguments.config if begun else shipped.find(arguments.config)
    sweep = (
        folders.load_begun(path) if begun else load_sweep(path, overrides, seeds=arguments.seeds)
    )
    if len({point.config.run.devices for point in sweep.points}) > 1:
        raise InputError(f"{path}: run.devices must be the same at all points")
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run_sweep

        return dry_run_sweep(sweep)
    from jaxpfl.experiments.sweep import launchers
    from jaxpfl.experiments.sweep.collect import collect
    from jaxpfl.experiments.sweep.points import run_sweep

    out = path if begun else arguments.out or Path("runs", path.stem)
    if arguments.collect:
        return _told(sweep, collect(sweep, out))
    print(f"sweep directory: {out}", file=sys.stderr)
    if arguments.launcher == "slurm":
        options = [f"--track={each}" for each in arguments.track]
        lines = launchers.submit_to_slurm(sweep, out, workers=arguments.workers, options=options)
        return {"out": str(out), "text": "\n".join(lines)}
    devices = use_devices(sweep.points[0].config).run.devices
    if arguments.launcher == "ray":
        workers = arguments.workers or 1
        return _told(sweep, launchers.run_on_ray(sweep, out, workers=workers, devices=devices))
    if begun:
        return _told(sweep, run_sweep(sweep, out))
    with shipped.form_without_data_named(path):
        return _told(sweep, run_sweep(sweep, out))


def _check(arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    if arguments.workers is not None:
        checks.positive_int("--workers", arguments.workers)
        if arguments.launcher == "local":
            raise InputError(
                "--workers needs --launcher ray or slurm; without either, give the same command "
                "in another terminal: several processes may work on one sweep"
            )
    if arguments.launcher == "ray" and arguments.track:
        raise InputError("--track needs --launcher local or slurm, found --launcher ray")
    alone = [
        name
        for name, given in (
            ("--point", arguments.point is not None),
            ("--collect", arguments.collect),
            ("--dry-run", arguments.dry_run),
            (f"--launcher {arguments.launcher}", arguments.launcher != "local"),
        )
        if given
    ]
    if len(alone) > 1:
        raise InputError(f"{' and '.join(alone)} do not go together: give one of them")


def _one_point(directory: Path, number: int) -> dict[str, Any]:
    """Carries out one point of a sweep that was begun."""
    from jaxpfl.experiments.sweep import directory as folders
    from jaxpfl.experiments.sweep.points import carry_out_point
    from jaxpfl.experiments.sweep.summary import value_of

    point, title, metric = folders.load_point(directory, number)
    use_devices(point.config)
    known = folders.failure(directory / folders.POINTS / point.name)
    ended = carry_out_point(point, directory, title, known=known)
    state = folders.state_of(directory / folders.POINTS / point.name)
    if state.result is not None:
        value_of(state.result, metric)
    said = {"busy": "another process is carrying it out", "finished": "finished"}
    text = f"{point.name}: {said.get(ended, f'failed: {state.error}')}"
    code = _FAILED if ended == "failed" else 0
    return {"point": point.name, "state": ended, "text": text, "exit_code": code}


def _told(sweep: Any, outcome: Any) -> dict[str, Any]:
    """What a sweep came to, as plain data and as text; exit code 4 where points failed."""
    from jaxpfl.experiments.sweep.page import baseline_lines, measured_on, table_lines

    report = outcome.out / "report.html"
    measured = measured_on(sweep.metric, outcome.scored_on)
    table = table_lines(sweep, outcome.rows, outcome.durations)
    lines = [f"report: {report}", "", f"{measured}:", *table, ""]
    compared = baseline_lines(sweep, outcome.baselines)
    lines += [*compared, ""] if compared else []
    lines += [f"caution: {each}" for each in outcome.cautions]
    lines += _missing(outcome.failed, outcome.unfinished)
    return {
        "out": str(outcome.out),
        "report": str(report),
        "rows": outcome.rows,
        "baselines": outcome.baselines,
        "failed": outcome.failed,
        "unfinished": outcome.unfinished,
        "cautions": outcome.cautions,
        "note": outcome.note,
        "text": "\n".join([*lines, outcome.note]),
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
