"""`jaxpfl data`, `convert` and `convert-model`: data sets of configs, and folders for others."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.cli.common import add_path, path
from jaxpfl.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "jaxpfl data list\n       jaxpfl data get NAME [--folder DIR]\n"
        "       jaxpfl data check FOLDER"
    )
    action = (
        "list: all data sets, and whether they are here; get: fetch one, or say where it is; "
        "check: read all of a folder that `jaxpfl convert` wrote, and say whether it is whole"
    )
    choices = ("list", "get", "check")
    parser.add_argument("action", metavar="ACTION", choices=choices, help=action)
    name = "the data set to get, or the folder to check"
    parser.add_argument("name", metavar="NAME", nargs="?", help=name)
    folder = "where to put it (default: the folder that its environment variable names)"
    add_path(parser, "--folder", "DIR", folder)
    commit = "the commit of a data set on the Hugging Face hub: 40 hex digits (default: the newest)"
    parser.add_argument("--revision", metavar="COMMIT", help=commit)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.action == "list":
        if arguments.name is not None:
            raise InputError(f"jaxpfl data list: unexpected argument {arguments.name!r}")
        return _listed()
    if arguments.name is None:
        wanted = {
            "get": "a NAME; `jaxpfl data list` has them",
            "check": "a FOLDER that `jaxpfl convert` wrote",
        }
        raise InputError(f"jaxpfl data {arguments.action}: expected {wanted[arguments.action]}")
    if arguments.action == "get":
        return _get(arguments)
    from jaxpfl.data.folders import check_folder

    folder, clients = arguments.name, check_folder(arguments.name)
    text = f"{folder} is whole: {len(clients)} clients, {', '.join(clients.columns)}"
    return {"folder": folder, "clients": len(clients), "text": text}


def _listed() -> dict[str, Any]:
    from jaxpfl.data.catalogue import data_sets
    from jaxpfl.experiments.config import shipped

    records = {
        name: {
            "state": entry.state(),
            "clients": entry.clients,
            "licence": entry.licence,
            "folder": entry.variable and f"${entry.variable}",
            "files": list(entry.files) if entry.variable else [],
            "fetched_by_get": bool(entry.downloads or entry.hub),
            "used_by": [c for c in shipped.names() if any(map(entry.holds, shipped.sources(c)))],
        }
        for name, entry in data_sets().items()
    }
    width = max(map(len, records))
    lines = []
    for name, record in records.items():
        mark = "*" if record["fetched_by_get"] else " "
        lines.append(f"{mark} {name:{width}}  {record['state']}")
        used = ", ".join(record["used_by"]) or "no config"
        about = f"{record['clients']}; licence: {record['licence']}; used by {used}"
        lines += textwrap.wrap(about, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += [
        "",
        "* `jaxpfl data get NAME` fetches it. Of the others that are absent, the same command says "
        "what they are made of.",
    ]
    return {"data_sets": records, "text": "\n".join(lines)}


def _get(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxpfl.data.catalogue import find

    entry = find(arguments.name)
    if arguments.revision is not None and not entry.hub:
        raise InputError(f"--revision is for data sets of the Hugging Face hub, not {entry.name}")
    if not entry.variable:
        raise InputError(f"{entry.name} {entry.origin}: there is nothing to fetch")
    if not entry.downloads and not entry.hub:
        folder = arguments.folder or Path(f"${entry.variable}")
        paths = " and ".join(str(folder / file) for file in entry.files)
        text = (
            f"{entry.name} is at no public address in the form that jaxpfl reads. It is made of: "
            f"{entry.origin}. Licence: {entry.licence}. What is expected: {entry.form}. Put it at "
            f"{paths}; docs/data_sets.md says more of its form."
        )
        return {"name": entry.name, "fetched": [], "text": text.replace("`", "")}
    folder = entry.folder(arguments.folder)
    missing = [file for file in entry.files if not (folder / file).exists()]
    if not missing:
        places = ", ".join(str(folder / file) for file in entry.files)
        raise InputError(f"{entry.name} is here already: {places}")
    fetched: dict[str, Any] = {}
    if entry.hub:
        from jaxpfl.data.folders import convert
        from jaxpfl.data.readers.frames import newest_commit

        commit = arguments.revision or newest_commit(entry.hub)
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            source = entry.sources[file].format(revision=commit)
            fetched[str(folder / file)] = {**convert(source, folder / file), "source": source}
        where = [f"{path}: {record['source']}" for path, record in fetched.items()]
    else:
        from jaxpfl.data.fetch import fetch

        for file in missing:
            fetched[str(folder / file)] = fetch(entry.downloads[file], folder / file)
        where = [
            f"{path}: {record['bytes']} bytes of {record['url']}, SHA-256 {record['sha256']}"
            for path, record in fetched.items()
        ]
    lines = [*where, f"Licence: {entry.licence}. Configs find it where {entry.variable} = {folder}"]
    return {"name": entry.name, "fetched": fetched, "text": "\n".join(lines)}


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what to read; see docs/own_data.md")
    out = "a new folder for the clients' data; an interrupted command leaves none"
    parser.add_argument("out", metavar="OUT", type=path, help=out)
    public = "write token ids in place of texts, by the words of this file: a vocabulary.json, a "
    public += "folder with tokens, stackoverflow.word_count.tar.bz2, or any source of PUBLIC text"
    parser.add_argument("--vocabulary", metavar="PUBLIC", help=public)
    size = "the model's vocab_size: the most frequent words, and four special ids"
    parser.add_argument("--vocab-size", metavar="IDS", type=int, help=size)


def run_convert(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.data.folders import convert

    encoder = None
    if arguments.vocabulary is not None:
        from jaxpfl.text.tokenisers.public_words import public_words

        encoder = public_words(arguments.vocabulary, arguments.vocab_size)
    elif arguments.vocab_size is not None:
        raise InputError("--vocab-size must come with --vocabulary, which says whose words it is")
    record = convert(arguments.source, arguments.out, encoder)
    return {**record, "text": f"{record['clients']} clients written to {record['out']}"}


def add_convert_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=path, help="a model in a GGUF file")
    folder = "a new folder for config.json, safetensors and the tokeniser's files"
    parser.add_argument("out", metavar="FOLDER", type=path, help=folder)
    dtype = "type of the written weights (default: float32, which keeps the values exactly)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=dtype)


def run_convert_model(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.models.checkpoints import gguf_files

    gguf_files.convert(arguments.file, arguments.out, dtype=arguments.dtype)
    text = f"the model of {arguments.file} is written to {arguments.out}"
    return {"file": str(arguments.file), "out": str(arguments.out), "text": text}
