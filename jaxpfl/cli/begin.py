"""Where to begin: `jaxpfl configs`, and `jaxpfl init` for a user's own table."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli import common
from jaxpfl.errors import InputError

_COLUMNS = {
    "client": "whose a row is (default: client); * makes each row a client",
    "text": "the texts, for a word language model (default: text)",
    "label": "the classes, whole numbers from 0, for a classifier",
    "features": "what the classifier reads: columns of numbers, with commas between them",
}


def add_configs(parser: argparse.ArgumentParser) -> None:
    text = "print this config, to be changed: jaxpfl configs quickstart > mine.yaml"
    parser.add_argument("name", metavar="NAME", nargs="?", help=text)


def configs(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.experiments.config import shipped

    if arguments.name is not None:
        path = shipped.find(arguments.name)
        text = path.read_text("utf-8")
        return {"path": str(path), "config": text, "text": text.rstrip("\n")}
    abouts = {name: shipped.about(name) for name in shipped.names()}
    lines = []
    # Configs that need nothing stand first.
    for name, about in sorted(abouts.items(), key=lambda item: bool(item[1].needs)):
        own = ", or the command at its head" if about.without_data else ""
        needs = f"  (needs {', '.join(about.needs)}{own})" if about.needs else ""
        lines.append(f"jaxpfl {about.command} {name}{needs}")
        lines.append(f"    {textwrap.shorten(about.sentence, 90, placeholder=' ...')}")
    lines.append("\n`jaxpfl configs NAME` prints one, to be changed.")
    return {
        "configs": {name: about._asdict() for name, about in abouts.items()},
        "text": "\n".join(lines),
    }


def add_init(parser: argparse.ArgumentParser) -> None:
    table = "a table: .csv, .tsv, .jsonl, .parquet or .xlsx; or a folder, or a path with *; also "
    table += "with options, as in 'FILE?encoding=latin-1&missing=drop', see docs/own_data.md"
    parser.add_argument("file", metavar="FILE", help=table)
    common.add_path(parser, "--out", "CONFIG", "what to write (default: NAME-OF-FILE.yaml)")
    for name, text in _COLUMNS.items():
        parser.add_argument(f"--{name}", metavar="COLUMN", help=text)


def init(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    path = Path(arguments.file.partition("?")[0])
    # A path with * is named by its folder.
    name = path.parent.name or "table" if "*" in path.name else path.name
    out = arguments.out or Path(name.partition(".")[0] + ".yaml")
    if out.exists():
        raise InputError(f"{out} exists already; choose another file with --out")
    import yaml

    from jaxpfl.experiments.init import init as written

    config = written(arguments.file, **{name: getattr(arguments, name) for name in _COLUMNS})
    with out.open("x", encoding="utf-8") as file:
        file.write(config)
    data = yaml.safe_load(config)["data"]
    public = round((1 - data["split"]["train"]) * data["clients"])
    text = (
        f"{out} has a comment for each setting. Its `split` declares some {public} of the "
        f"{data['clients']} clients public: they are NOT protected, only those of `train` are.\n\n"
        f"jaxpfl run {out}"
    )
    return {"config": str(out), "text": text}
