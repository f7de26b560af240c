"""Where to begin: `jaxpfl configs`, and `jaxpfl init` for a table of one's own."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli import common
from jaxpfl.errors import InputError


def add_configs(parser: argparse.ArgumentParser) -> None:
    text = "print this config, to be changed: jaxpfl configs quickstart > mine.yaml"
    parser.add_argument("name", metavar="NAME", nargs="?", help=text)


def configs(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped

    if arguments.name is not None:
        path = shipped.find(arguments.name)
        text = path.read_text("utf-8")
        return {"path": str(path), "config": text, "text": text.rstrip("\n")}
    found = {name: shipped.about(name) for name in shipped.names()}
    lines = []
    # First those that need nothing.
    for name, about in sorted(found.items(), key=lambda item: bool(item[1].needs)):
        own = ", or the command at its head" if about.without_data else ""
        needs = f"  (needs {', '.join(about.needs)}{own})" if about.needs else ""
        lines.append(f"jaxpfl {about.command} {name}{needs}")
        lines.append(f"    {textwrap.shorten(about.sentence, 90, placeholder=' ...')}")
    lines.append("\n`jaxpfl configs NAME` prints one, to be changed.")
    return {
        "configs": {name: about._asdict() for name, about in found.items()},
        "text": "\n".join(lines),
    }


def add_init(parser: argparse.ArgumentParser) -> None:
    table = "a table: .csv, .jsonl, .json, .parquet or .arrow"
    parser.add_argument("file", metavar="FILE", help=table)
    common.add_path(parser, "--out", "CONFIG", "what to write (default: NAME-OF-FILE.yaml)")
    parser.add_argument("--client", metavar="COLUMN", help="whose a row is; * makes each row one")
    parser.add_argument("--text", metavar="COLUMN", help="the texts")
    parser.add_argument("--label", metavar="COLUMN", help="the classes, whole numbers from 0")


def init(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    out = arguments.out or Path(Path(arguments.file).name.partition(".")[0] + ".yaml")
    if out.exists():
        raise InputError(f"{out} exists already; choose another file with --out")
    from jaxpfl.experiments.init import init as guessed

    columns = {name: getattr(arguments, name) for name in ("client", "text", "label")}
    config, guesses = guessed(arguments.file, **columns)
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
