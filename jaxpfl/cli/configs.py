"""`jaxpfl configs`: the experiments that come with jaxpfl."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="print this config, to be changed: jaxpfl configs quickstart > mine.yaml",
    )


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
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
