"""`jaxpfl data`, `convert` and `convert-model`: data sets of configs, and folders for others."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError

DATA = {
    "action ACTION": "list: all data sets, and whether they are here; get NAME: fetch one, or say "
    "where it is; check FOLDER: read all that `jaxpfl convert` wrote, and say if it is whole",
    "name NAME?": "the data set to get, or the folder to check",
    "--folder DIR": "where to put it (default: the folder in its environment variable)",
    "--revision COMMIT": "the commit of a data set on the Hugging Face hub: 40 hex digits "
    "(default: the newest)",
}


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.action not in ("list", "get", "check"):
        raise InputError(f"jaxpfl data: expected list, get or check, found {arguments.action!r}")
    if arguments.action == "list":
        if arguments.name is not None:
            raise InputError(f"jaxpfl data list: unexpected argument {arguments.name!r}")
        return _listed()
    if arguments.name is None:
        wanted = "a FOLDER that `jaxpfl convert` wrote"
        if arguments.action == "get":
            wanted = "a NAME; `jaxpfl data list` has them"
        raise InputError(f"jaxpfl data {arguments.action}: expected {wanted}")
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
    lines.append(
        "\n* `jaxpfl data get NAME` fetches it. For the others it says what they are made of."
    )
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
    folder, fetched = entry.folder(arguments.folder), dict[str, Any]()
    missing = [file for file in entry.files if not (folder / file).exists()]
    if not missing:
        places = ", ".join(str(folder / file) for file in entry.files)
        raise InputError(f"{entry.name} is here already: {places}")
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
        what = "{bytes} bytes of {url}, SHA-256 {sha256}"
        where = [f"{path}: {what.format_map(record)}" for path, record in fetched.items()]
    lines = [*where, f"Licence: {entry.licence}. Configs find it where {entry.variable} = {folder}"]
    return {"name": entry.name, "fetched": fetched, "text": "\n".join(lines)}


CONVERT = {
    "source SOURCE": "what to read; see docs/own_data.md",
    "out OUT": "a new folder for the clients' data; an interrupted command leaves none",
    "--vocabulary PUBLIC": "write token ids in place of texts, by the words of this file: a "
    "vocabulary.json, a folder with tokens, stackoverflow.word_count.tar.bz2, or any source of "
    "PUBLIC text",
    "--vocab-size IDS": "the model's vocab_size: the most frequent words, and four special ids",
}


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


CONVERT_MODEL = {
    "file FILE": "a model in a GGUF file",
    "out FOLDER": "a new folder for config.json, safetensors and the tokeniser's files",
    "--dtype {float32,bfloat16}=float32": "type of the written weights (default: float32, which "
    "keeps the values exactly)",
}


def run_convert_model(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    from jaxpfl.models.checkpoints import gguf_files

    gguf_files.convert(arguments.file, arguments.out, dtype=arguments.dtype)
    text = f"the model of {arguments.file} is written to {arguments.out}"
    return {"file": str(arguments.file), "out": str(arguments.out), "text": text}
