"""Where to begin: `jaxpfl configs`; with a user's own table `init`, `synthesize` and `fred`."""

import argparse
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files, memory
from jaxpfl.cli import common
from jaxpfl.errors import InputError

_COLUMNS = {
    "client": "the column that says whose a row is (default: client); * makes each row a client",
    "text": "the column of texts; TITLE,BODY joins columns (default: text)",
    "label": "the column of a classifier's classes: whole numbers from 0, or words",
    "features": "the columns of numbers that the classifier reads, with commas between them",
}

_TABLE = (
    "a table: .csv, .tsv, .json, .jsonl, .parquet or .xlsx; or a folder, or a path with *; also "
    "with options, as in 'FILE?encoding=latin-1&missing=drop', see docs/own_data.md"
)
_PUBLIC = "public texts, each SOURCE or NAME=SOURCE, or a folder of such files"
_TASKS = ("training", "synthetic-text")


def _stem(file: str) -> str:
    """The name of a table without its endings; a path with * is named by its folder."""
    path = Path(file.partition("?")[0])
    name = path.parent.name or "table" if "*" in path.name else path.name
    return name.partition(".")[0]


def add_configs(parser: argparse.ArgumentParser) -> None:
    text = "print this config, for you to change: jaxpfl configs quickstart > mine.yaml"
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
        own = ", or the command in its first lines" if about.without_data else ""
        needs = f"  (needs {', '.join(about.needs)}{own})" if about.needs else ""
        lines.append(f"jaxpfl {about.command} {name}{needs}")
        lines.append(f"    {textwrap.shorten(about.sentence, 90, placeholder=' ...')}")
    lines.append("\n`jaxpfl configs NAME` prints one, for you to change.")
    return {
        "configs": {name: about._asdict() for name, about in abouts.items()},
        "text": "\n".join(lines),
    }


def add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_TABLE)
    common.add_path(parser, "--out", "CONFIG", "what to write (default: NAME-OF-FILE.yaml)")
    task = "training (default); synthetic-text: only shows the command that chooses public texts"
    parser.add_argument(
        "--task", type=lambda t: t.replace("_", "-"), choices=_TASKS, default=_TASKS[0], help=task
    )
    for name, text in _COLUMNS.items():
        parser.add_argument(f"--{name}", metavar="COLUMN", help=text)


def init(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.task == _TASKS[1]:
        given = [f"--{n} {shlex.quote(getattr(arguments, n) or n)}" for n in ("client", "text")]
        table = shlex.quote(arguments.file)
        line = f"jaxpfl synthesize {table} {' '.join(given)} --public FOLDER --epsilon 4"
        return {"command": line, "text": line}
    out = arguments.out or Path(_stem(arguments.file) + ".yaml")
    if out.exists():
        raise InputError(f"{out} exists already; choose another file with --out")
    import yaml

    from jaxpfl.experiments.own_table import init as written

    config = written(arguments.file, **{name: getattr(arguments, name) for name in _COLUMNS})
    files.write_atomically(out, config)
    data = yaml.safe_load(config)["data"]
    public = round((1 - data["split"]["train"]) * data["clients"])
    text = (
        f"{out} has a comment for each setting. Its `split` declares some {public} of the "
        f"{data['clients']} clients public: they are NOT protected, only those of `train` are.\n\n"
        f"jaxpfl run {shlex.quote(str(out))}"
    )
    return {"config": str(out), "text": text}


def add_synthesize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=_TABLE)
    for name in ("client", "text"):
        parser.add_argument(f"--{name}", metavar="COLUMN", help=_COLUMNS[name])
    parser.add_argument("--public", metavar="SOURCE", nargs="+", required=True, help=_PUBLIC)
    parser.add_argument("--epsilon", type=float, required=True, help="smaller is more private")
    delta = "default: a power of ten, at most 0.1 / the number of clients, which is public"
    parser.add_argument("--delta", type=float, help=delta)
    texts = "how many texts to choose (default: 1000)"
    parser.add_argument("--texts", type=int, metavar="N", default=1_000, help=texts)
    embedder = "hashed, minilm, ... or several (default: minilm if its weights are here, or hashed)"
    parser.add_argument("--embedder", metavar="NAME", nargs="+", help=embedder)
    judge = "an embedder that only reports how near the texts are; takes a tenth of the release"
    parser.add_argument("--judge", metavar="NAME", help=judge)
    cut = "cut all texts alike: messages (default), sentences, words:N or documents:N"
    parser.add_argument("--cut", metavar="RULE", default="messages", help=cut)
    writer = "let a model continue chosen texts, and choose anew, at no further cost: smollm2, "
    writer += "another published model or ADDRESS#MODEL (default: none)"
    parser.add_argument("--writer", metavar="MODEL", help=writer)
    label = "a column of labels: texts are chosen for each of --labels, by one release"
    parser.add_argument("--label", metavar="COLUMN", help=label)
    labels = "the PUBLIC list of labels, with commas; texts with other labels are left out"
    parser.add_argument("--labels", metavar="A,B,...", help=labels)
    common.add_path(parser, "--ledger", "FILE", "default: OUT/ledger.jsonl")
    common.add_path(parser, "--out", "DIR", "default: runs/NAME-OF-FILE")


def synthesize(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    import yaml

    from jaxpfl.experiments import carry_out, registry
    from jaxpfl.experiments.own_table import config_of, source_of

    if (arguments.label is None) != (arguments.labels is None):
        raise InputError(
            "--label COLUMN and --labels A,B,... must come together: which labels the table has is "
            "private, so that they must be a public list"
        )
    columns = {"client": arguments.client, "text": arguments.text, "columns": arguments.label}
    names = ("epsilon", "delta", "texts", "embedder", "judge", "cut", "writer", "ledger")
    given = {name: getattr(arguments, name) for name in names}
    if arguments.embedder is not None and len(arguments.embedder) == 1:
        (given["embedder"],) = arguments.embedder
    if arguments.label is not None:
        labels = [label.strip() for label in arguments.labels.split(",")]
        given["labels"] = (arguments.label, labels)
    text = config_of(source_of(arguments.file, columns), arguments.public, **given)
    config = common.use_devices(registry.from_mapping(yaml.safe_load(text), "jaxpfl synthesize"))
    out = arguments.out or common.unused(_stem(arguments.file))
    return carry_out.run(config, out, command=arguments.command_line).to_dict()


def add_fred(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--private", metavar="SOURCE", required=True, help="the clients")
    corpora = "public corpora, each SOURCE or NAME=SOURCE, such as 'wiki.csv?text=article'"
    parser.add_argument("--candidates", metavar="SOURCE", nargs="+", required=True, help=corpora)
    parser.add_argument("--epsilon", type=float, required=True, help="smaller is more private")
    parser.add_argument("--delta", type=float, required=True, help="below 1 / clients")
    unit = "what is protected: a client with all it holds (default), or one example"
    parser.add_argument("--unit", choices=("client", "example"), default="client", help=unit)
    mode = "paper: Algorithm 1 as printed, by example; charges what it really costs; N is public"
    parser.add_argument("--mode", choices=("exact", "paper"), default="exact", help=mode)
    population = "the number of clients (or examples), if it is public: spares its noise"
    parser.add_argument("--population", type=int, metavar="N", help=population)
    embedder = "hashed (default), minilm, encoder:FOLDER, sentence-transformers:NAME, ..."
    parser.add_argument("--embedder", metavar="NAME", default="hashed", help=embedder)
    parser.add_argument("--clip-norm", type=float, default=1.0, help="of embeddings (default: 1)")
    most = "embed at most K random examples of a client (default: 64); with --unit example, all"
    parser.add_argument("--max-examples", type=int, metavar="K", default=64, help=most)
    cut = "cut all texts alike: messages (default), sentences, words:N or documents:N"
    parser.add_argument("--cut", metavar="RULE", default="messages", help=cut)
    choose = "also choose N single texts of all corpora by the same release, at no further cost"
    parser.add_argument("--choose", type=int, metavar="N", help=choose)
    file = "the file for the chosen texts, .jsonl or .parquet (default: OUT/chosen.jsonl)"
    common.add_path(parser, "--texts", "FILE", file)
    common.add(parser, "--distributed")
    common.add_path(parser, "--ledger", "FILE", "default: OUT/ledger.jsonl")
    common.add_path(parser, "--out", "DIR", "default: runs/fred")


def fred(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    common.join(arguments.distributed)
    memory.give_back_after_compiling()
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.data import open as open_population
    from jaxpfl.experiments.choose_corpus import choose_corpus, table
    from jaxpfl.text.cut import Cut

    if arguments.texts is not None and arguments.choose is None:
        raise InputError("--texts needs --choose N, which says how many texts are chosen")
    private, names = arguments.private, ("epsilon", "delta", "clip_norm")
    given = {name: getattr(arguments, name) for name in names}
    if arguments.mode == "paper":
        if arguments.unit != "example":
            raise InputError("--mode paper protects an example, as the paper: give --unit example")
        if arguments.population is not None:
            raise InputError("--mode paper publishes their number: leave out --population")
        clients = Cut.without_model(arguments.cut).population(open_population(private))
        examples = clients.num_examples
        plan = FredPlan.as_printed(**given, examples=examples, clients=len(clients))
    else:
        given |= {"unit": arguments.unit, "population": arguments.population}
        plan = FredPlan.calibrated(**given, max_examples=arguments.max_examples)
    record = choose_corpus(
        private,
        arguments.candidates,
        plan=plan,
        embedder_name=arguments.embedder,
        cut=arguments.cut,
        choose=arguments.choose,
        texts=arguments.texts,
        out=arguments.out or common.unused("fred"),
        ledger=arguments.ledger,
    )
    return {**record, "text": table(record)}
