"""Carry out a config or a sweep, and what is done with run directories afterwards."""

import argparse
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from jaxpfl import checks, files
from jaxpfl.cli import common
from jaxpfl.errors import InputError

_FAILED_POINTS = 4
_ENDINGS = (".csv", ".parquet", ".jsonl")


RUN = {
    "config CONFIG": "",
    "--dry-run": "",
    "--distributed HOW": "",
    **common.LAUNCHED,
    "--live": "show the page of the run while it is under way, at an address of this machine",
    "--out DIR": "run directory (default: runs/NAME-OF-CONFIG)",
    "--ledger FILE": "a ledger that several runs on these clients share (default: the run's own)",
}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped

    path = shipped.find(arguments.config)
    if arguments.ledger is not None:
        overrides = [*overrides, "--privacy.ledger", str(arguments.ledger)]
    config = common.load(path, overrides)
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run

        return dry_run(config)
    out = arguments.out or common.unused(path.stem)
    if (launched := common.launched(arguments)) is not None:
        return launched
    if keeps_files := common.join(arguments.distributed):
        print(f"run directory: {out}", file=sys.stderr)
    from jaxpfl.experiments import carry_out

    live = nullcontext()
    if arguments.live and keeps_files:
        from jaxpfl.experiments.report.live import served

        live = served(out)
    with shipped.form_without_data_named(path), live:
        return carry_out.run(config, out, command=arguments.command_line).to_dict()


SWEEP = {
    "config CONFIG": "",
    "--dry-run": "",
    **common.LAUNCHED,
    "--out DIR": "default: runs/NAME-OF-CONFIG; points finished there are kept, failed ones tried "
    "again",
    "--seeds N": "repeat every point with N seeds, from the config's run.seed on",
    "--ray N": "carry out N points at a time, each in a process of Ray (default: one, here)",
    "--private-selection": "release only the best of a random number of points, and charge for the "
    "choice",
}


def sweep(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
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
        from jaxpfl.experiments.report.page import page_lines
        from jaxpfl.experiments.sweep.selection import page_of, select

        print("the points are carried out under private/; their number is secret", file=sys.stderr)
        with shipped.form_without_data_named(path):
            record = select(sweep, out)
        report = str(out / "report.html")
        text = "\n".join([f"report: {report}", "", *page_lines(page_of(record))])
        return {**record, "out": str(out), "report": report, "text": text}
    if arguments.ray is not None:
        return _result(sweep, run_on_ray(sweep, out, workers=arguments.ray, devices=devices))
    with shipped.form_without_data_named(path):
        return _result(sweep, run_sweep(sweep, out, carry=start and partial(launched, start)))


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
    made = {name: record[name] for name in ("rows", "cautions", "note")}
    made |= {"out": str(outcome.out), "report": report, "text": "\n".join([*text, made["note"]])}
    made |= {"failed": outcome.failed, "unfinished": outcome.unfinished}
    return {**made, "exit_code": _FAILED_POINTS if outcome.failed else 0}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{' and '.join(names[:3])}{more}"


RESUME = {"directory RUN": "", "--distributed HOW": "", **common.LAUNCHED}


def resume(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if (launched := common.launched(arguments)) is not None:
        return launched
    common.use_run(arguments.directory)
    common.join(arguments.distributed)
    from jaxpfl.experiments import carry_out

    return carry_out.resume(arguments.directory, command=arguments.command_line).to_dict()


REPORT = {"directory RUN": ""}


def report(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments import carry_out

    path = carry_out.report(arguments.directory)
    return {"report": str(path), "text": str(path)}


COMPARE = {
    "runs RUN+": "directories of runs",
    "--out DIR": "a new directory (default: runs/compare)",
}


def compare(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.compare import NOTE, compared
    from jaxpfl.experiments.report.page import page_lines, write_page

    out = arguments.out or common.unused("compare")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty: choose another directory with --out")
    page = compared(arguments.runs, out)
    files.make_directory(out)
    path = str(write_page(out, page))
    lines = [f"report: {path}", "", *page_lines(page)[:-1], NOTE]
    return {"report": path, "text": "\n".join(lines)}


EXPORT = {
    "directory RUN": "",
    "folder FOLDER?": "a new folder",
    "--texts N": "number of synthetic texts (default: as in the run); more cost no privacy",
    "--registry": "instead, print the run's entry for the registry of differential privacy "
    "deployments",
}


def export(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.registry != (arguments.folder is None) or (arguments.registry and arguments.texts):
        raise InputError("jaxpfl export: expected RUN FOLDER, or RUN --registry and nothing else")
    if arguments.registry:
        import yaml

        from jaxpfl.experiments.deployment import FILL_IN, entry, left

        content = entry(arguments.directory)
        fields = f"{len([*left(content)])} fields begin with {FILL_IN.strip()!r}"
        print(f"{fields}: a person must", file=sys.stderr)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
        return {"entry": content, "text": text.rstrip()}
    if arguments.texts is not None:
        checks.positive_int("--texts", arguments.texts)
    # A run from Python has no config.
    if (arguments.directory / "config.yaml").exists():
        common.use_run(arguments.directory)
    from jaxpfl.experiments.export import export as written

    record = written(arguments.directory, arguments.folder, texts=arguments.texts)
    lines = [f"{arguments.folder}/{name}" for name in record["files"]]
    lines += [*filter(None, [record["stamp"]]), record["privacy"]]
    return {**record, "text": "\n".join(lines)}


PREDICT = {
    "model MODEL": "a folder that `jaxpfl export` wrote, or the directory of a finished run",
    "table TABLE": "a table with the fields that the model was trained on, or with options that "
    "name others, as in 'FILE?text=title,body', see docs/own_data.md",
    "--out FILE": f"a new file, {', '.join(_ENDINGS)} (default: CSV on stdout)",
    "--own SOURCE": "clients' own examples: make each client's own model of them (MODEL is a run "
    "of Ditto, APFL or IFCA), and write what it predicts for the client's rows to MODEL/private/",
}


def predict(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    out, folder, own = arguments.out, arguments.model, arguments.own
    if out is not None and (out.exists() or out.suffix not in _ENDINGS):
        raise InputError(f"--out must be a new file with the ending {', '.join(_ENDINGS)}: {out}")
    if own is not None and out is not None:
        raise InputError("--own writes to MODEL/private/: leave out --out")
    with warnings.catch_warnings(record=True) as caught:
        if own is not None:
            from jaxpfl.experiments.own_models import predict as by_client

            if (folder / "config.yaml").exists():
                common.use_run(folder)
            predicted, absent = by_client(folder, arguments.table, own)
            if absent:
                shared = "the shared model, or IFCA's first, predicts for them"
                print(f"{absent} clients have no rows in {own}: {shared}", file=sys.stderr)
            out = common.unused("predictions", files.private_directory(folder / "private"), ".csv")
        else:
            from jaxpfl.trained import load

            with tempfile.TemporaryDirectory(prefix="jaxpfl-") as temporary:
                if (folder / "run.json").exists() or (folder / "config.yaml").exists():
                    # Only a run needs what trained it.
                    from jaxpfl.experiments.export import export as written

                    written(folder, folder := Path(temporary, "model"), progress=False)
                model = load(folder)
            predicted = model.predict(arguments.table)
    # Of many clients' rows, the first speaks for all.
    for warning in caught[:1] if own else caught:
        print(warning.message, file=sys.stderr)
    from pyarrow import csv, parquet

    buffer = io.BytesIO()
    if out is not None and out.suffix == ".parquet":
        parquet.write_table(predicted, buffer)
    elif out is not None and out.suffix == ".jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in predicted.to_pylist())
        buffer.write("".join(lines).encode())
    else:
        csv.write_csv(predicted, buffer)
    if out is None:
        return {"predictions": predicted.to_pylist(), "text": buffer.getvalue().decode().rstrip()}
    files.write_atomically(out, buffer.getvalue(), mode=0o600 if arguments.own else 0o644)
    return {"out": str(out), "rows": len(predicted), "text": str(out)}
