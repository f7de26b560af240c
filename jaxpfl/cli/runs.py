"""Carry out a config, and what is done with run directories afterwards."""

import argparse
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from jaxpfl import checks, files
from jaxpfl.cli import common
from jaxpfl.errors import InputError


def add_run(parser: argparse.ArgumentParser) -> None:
    common.add(parser, "config", "--dry-run", "--distributed", "--launcher", "--hosts")
    live = "show the page of the run while it is under way, at an address of this machine"
    parser.add_argument("--live", action="store_true", help=live)
    common.add_path(parser, "--out", "DIR", "run directory (default: runs/NAME-OF-CONFIG)")
    ledger = "a ledger that several runs on these clients share (default: the run's own)"
    common.add_path(parser, "--ledger", "FILE", ledger)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped

    path = shipped.find(arguments.config)
    if arguments.ledger is not None:
        overrides = [*overrides, "--privacy.ledger", str(arguments.ledger)]
    config = common.load(path, overrides)
    if arguments.dry_run:
        from jaxpfl.experiments.dry_run import dry_run

        return dry_run(config)
    out = arguments.out or common.unused_directory(path.stem)
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


def add_resume(parser: argparse.ArgumentParser) -> None:
    common.add(parser, "directory", "--distributed", "--launcher", "--hosts")


def resume(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if (launched := common.launched(arguments)) is not None:
        return launched
    common.use_run(arguments.directory)
    common.join(arguments.distributed)
    from jaxpfl.experiments import carry_out

    return carry_out.resume(arguments.directory, command=arguments.command_line).to_dict()


def add_report(parser: argparse.ArgumentParser) -> None:
    common.add(parser, "directory")


def report(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments import carry_out

    path = carry_out.report(arguments.directory)
    return {"report": str(path), "text": str(path)}


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", type=common.path, nargs="+", help="directories of runs"
    )
    common.add_path(parser, "--out", "DIR", "a new directory (default: runs/compare)")


def compare(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.compare import NOTE, compared
    from jaxpfl.experiments.report.page import page_lines, write_page

    out = arguments.out or common.unused_directory("compare")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty: choose another directory with --out")
    page = compared(arguments.runs, out)
    files.make_directory(out)
    path = str(write_page(out, page))
    lines = [f"report: {path}", "", *page_lines(page)[:-1], NOTE]
    return {"report": path, "text": "\n".join(lines)}


def add_export(parser: argparse.ArgumentParser) -> None:
    common.add(parser, "directory")
    text = "a new folder"
    parser.add_argument("folder", metavar="FOLDER", type=common.path, nargs="?", help=text)
    more = "number of synthetic texts (default: as in the run); more cost no privacy"
    parser.add_argument("--texts", type=int, metavar="N", help=more)
    text = "instead, print the run's entry for the registry of differential privacy deployments"
    parser.add_argument("--registry", action="store_true", help=text)


def export(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.registry != (arguments.folder is None) or (arguments.registry and arguments.texts):
        raise InputError(
            "jaxpfl export: expected RUN FOLDER, or RUN --registry and no other option"
        )
    if arguments.registry:
        return _registry(arguments.directory)
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


def _registry(directory: Path) -> dict[str, Any]:
    import yaml

    from jaxpfl.experiments.deployment import FILL_IN, entry, left

    content = entry(directory)
    number = len(list(left(content)))
    print(f"{number} fields begin with {FILL_IN.strip()!r}: a person must", file=sys.stderr)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    return {"entry": content, "text": text.rstrip()}


_ENDINGS = (".csv", ".parquet", ".jsonl")


def add_predict(parser: argparse.ArgumentParser) -> None:
    text = "a folder that `jaxpfl export` wrote, or the directory of a finished run"
    parser.add_argument("model", metavar="MODEL", type=common.path, help=text)
    text = "a table with the fields that the model was trained on, or with options that name "
    text += "others, as in 'FILE?text=title,body', see docs/own_data.md"
    parser.add_argument("table", metavar="TABLE", help=text)
    text = f"a new file, {', '.join(_ENDINGS)} (default: CSV on stdout)"
    common.add_path(parser, "--out", "FILE", text)
    text = "clients' own examples: make each client's own model of them (MODEL is a run of Ditto, "
    text += "APFL or IFCA), and write what it predicts for the client's rows to MODEL/private/"
    parser.add_argument("--own", metavar="SOURCE", help=text)


def predict(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    out, folder = arguments.out, arguments.model
    if out is not None and (out.exists() or out.suffix not in _ENDINGS):
        raise InputError(f"--out must be a new file with the ending {', '.join(_ENDINGS)}: {out}")
    with warnings.catch_warnings(record=True) as caught:
        predicted, out = _predicted(folder, arguments.table, arguments.own, out)
    # Of many clients' rows, the first speaks for all.
    for warning in caught[:1] if arguments.own else caught:
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


def _predicted(
    folder: Path, table: str, own: str | None, out: Path | None
) -> tuple[Any, Path | None]:
    """The predictions, and the file where they go."""
    if own is not None:
        if out is not None:
            raise InputError("--own writes to MODEL/private/: leave out --out")
        from jaxpfl.experiments.own_models import predict as by_client

        if (folder / "config.yaml").exists():
            common.use_run(folder)
        predicted, absent = by_client(folder, table, own)
        if absent:
            shared = "the shared model, or IFCA's first, predicts for them"
            print(f"{absent} clients have no rows in {own}: {shared}", file=sys.stderr)
        private = files.private_directory(folder / "private")
        return predicted, common.unused(private, "predictions", ".csv")
    with tempfile.TemporaryDirectory(prefix="jaxpfl-") as temporary:
        if (folder / "run.json").exists() or (folder / "config.yaml").exists():
            # Only a run needs what trained it.
            from jaxpfl.experiments.export import export as written

            written(folder, folder := Path(temporary, "model"), progress=False)
        from jaxpfl.trained import load

        model = load(folder)
    return model.predict(table), out
