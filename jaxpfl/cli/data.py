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
    name = "of a data set, for get; the folder, for check"
    parser.add_argument("name", metavar="NAME", nargs="?", help=name)
    folder = "where to put it (default: the folder that its environment variable names)"
    add_path(parser, "--folder", "DIR", folder)
    commit = "of a data set on the Hugging Face hub, 40 hexadecimal digits (default: the newest)"
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
    return _get(arguments) if arguments.action == "get" else _checked(Path(arguments.name))


def _listed() -> dict[str, Any]:
    from jaxpfl.data.catalogue import data_sets
    from jaxpfl.experiments.config import shipped

    users = {
        name: [each for each in shipped.names() if any(map(data_set.holds, shipped.sources(each)))]
        for name, data_set in data_sets().items()
    }
    records = {
        name: {
            "state": each.state(),
            "clients": each.clients,
            "licence": each.licence,
            "folder": each.variable and f"${each.variable}",
            "files": list(each.files) if each.variable else [],
            "fetched_by_get": bool(each.downloads or each.hub),
            "used_by": users[name],
        }
        for name, each in data_sets().items()
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


def _checked(folder: Path) -> dict[str, Any]:
    from jaxpfl.data.folders import check_folder

    clients = check_folder(folder)
    text = f"{folder} is whole: {len(clients)} clients, {', '.join(clients.columns)}"
    return {"folder": str(folder), "clients": len(clients), "text": text}


def _get(arguments: argparse.Namespace) -> dict[str, Any]:
    from jaxpfl.data.catalogue import find

    found = find(arguments.name)
    if arguments.revision is not None and not found.hub:
        raise InputError(f"--revision is for data sets of the Hugging Face hub, not {found.name}")
    if not found.variable:
        raise InputError(f"{found.name} {found.origin}: there is nothing to fetch")
    if not found.downloads and not found.hub:
        folder = arguments.folder or Path(f"${found.variable}")
        paths = " and ".join(str(folder / file) for file in found.files)
        text = (
            f"{found.name} is at no public address in the form that jaxpfl reads. It is made of: "
            f"{found.origin}. Licence: {found.licence}. What is expected: {found.form}. Put it at "
            f"{paths}; docs/data_sets.md says more of its form."
        )
        return {"name": found.name, "fetched": [], "text": text.replace("`", "")}
    folder = found.folder(arguments.folder)
    missing = [file for file in found.files if not (folder / file).exists()]
    if not missing:
        raise InputError(
            f"{found.name} is here already: {', '.join(str(folder / file) for file in found.files)}"
        )
    fetched: dict[str, Any] = {}
    if found.hub:
        from jaxpfl.data.folders import convert
        from jaxpfl.data.readers.hugging_face import newest_commit

        commit = arguments.revision or newest_commit(found.hub)
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            source = found.sources[file].format(revision=commit)
            fetched[str(folder / file)] = {**convert(source, folder / file), "source": source}
        where = [f"{path}: {record['source']}" for path, record in fetched.items()]
    else:
        from jaxpfl.data.fetch import fetch

        for file in missing:
            fetched[str(folder / file)] = fetch(found.downloads[file], folder / file)
        where = [
            f"{path}: {record['bytes']} bytes of {record['url']}, SHA-256 {record['sha256']}"
            for path, record in fetched.items()
        ]
    lines = [*where, f"Licence: {found.licence}. Configs find it where {found.variable} = {folder}"]
    return {"name": found.name, "fetched": fetched, "text": "\n".join(lines)}


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what to read; see jaxpfl.data.open")
    out = "a new folder; it is private, and complete or absent"
    parser.add_argument("out", metavar="OUT", type=path, help=out)
    public = (
        "write token ids in place of the texts, for a word model of this vocabulary: a "
        "vocabulary.json, a folder with tokens, TensorFlow Federated's "
        "stackoverflow.word_count.tar.bz2, or any source of PUBLIC text, whose words are counted"
    )
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
    folder = "for config.json, the weights as safetensors, and the tokeniser's files"
    parser.add_argument("out", metavar="FOLDER", type=path, help=folder)
    dtype = "of the written weights (default: float32, which keeps the file's values exactly)"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=dtype)


def run_convert_model(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.models.checkpoints import gguf_files

    gguf_files.convert(arguments.file, arguments.out, dtype=arguments.dtype)
    text = f"the model of {arguments.file} is written to {arguments.out}"
    return {"file": str(arguments.file), "out": str(arguments.out), "text": text}
