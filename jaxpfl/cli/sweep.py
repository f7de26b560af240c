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
    parser.add_argument(
        "--launcher",
        choices=("local", "ray", "slurm"),
        default="local",
        help="where points are carried out: one after the other in this process (local), in "
        "processes of Ray (ray), or as array jobs of Slurm (slurm)",
    )
    workers = "points at a time (ray: 1; slurm: no limit)"
    parser.add_argument("--workers", type=int, metavar="N", help=workers)
    point = "carry out point number I, from 1, alone, and make no table"
    parser.add_argument("--point", type=int, metavar="I", help=point)
    parser.add_argument(
        "--collect",
        action="store_true",
        help="carry out nothing; make table and page of the points that CONFIG, the directory of a "
        "sweep, holds",
    )
    common.add_track(parser)
    common.add_dry_run(parser)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    _check(arguments)
    from jaxpfl.experiments.config import shipped
    from jaxpfl.experiments.sweep import directory as folders
    from jaxpfl.experiments.sweep.config import load_sweep

    path = arguments.config
    begun = folders.is_sweep(path) or arguments.collect or arguments.point is not None
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
    if arguments.point is not None:
        return _one_point(sweep, out, arguments.point)
    from jaxpfl.experiments.sweep import launchers
    from jaxpfl.experiments.sweep.points import run_sweep
    from jaxpfl.experiments.sweep.results import collect

    if arguments.collect:
        return _result(sweep, collect(sweep, out))
    print(f"sweep directory: {out}", file=sys.stderr)
    if arguments.launcher == "slurm":
        options = [f"--track={each}" for each in arguments.track]
        lines = launchers.submit_to_slurm(sweep, out, workers=arguments.workers, options=options)
        return {"out": str(out), "text": "\n".join(lines)}
    devices = common.use_devices(sweep.points[0].config).run.devices
    if arguments.launcher == "ray":
        workers = arguments.workers or 1
        return _result(sweep, launchers.run_on_ray(sweep, out, workers=workers, devices=devices))
    with nullcontext() if begun else shipped.form_without_data_named(path):
        return _result(sweep, run_sweep(sweep, out))


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
    given = {
        "--point": arguments.point is not None,
        "--collect": arguments.collect,
        "--dry-run": arguments.dry_run,
        f"--launcher {arguments.launcher}": arguments.launcher != "local",
    }
    alone = [name for name in given if given[name]]
    if len(alone) > 1:
        raise InputError(f"{' and '.join(alone)} do not go together: give one of them")


def _one_point(sweep: Any, directory: Path, number: int) -> dict[str, Any]:
    """Carries out one point of a sweep that was begun."""
    from jaxpfl.experiments.sweep import directory as folders
    from jaxpfl.experiments.sweep.points import carry_out_point
    from jaxpfl.experiments.sweep.results import value_of

    if not 1 <= number <= len(sweep.points):
        raise InputError(
            f"--point must be from 1 to {len(sweep.points)}, the number of points of {directory}, "
            f"found {number}"
        )
    point = sweep.points[number - 1]
    common.use_devices(point.config)
    folder = folders.of_point(directory, point)
    ended = carry_out_point(point, directory, sweep.title, known=folders.failure(folder))
    state = folders.state_of(folder)
    if state.result is not None:
        value_of(state.result, sweep.metric)
    said = {"busy": "another process is carrying it out", "finished": "finished"}
    text = f"{point.name}: {said.get(ended, f'failed: {state.error}')}"
    code = _FAILED if ended == "failed" else 0
    return {"point": point.name, "state": ended, "text": text, "exit_code": code}


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
