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


def _stem(file: str) -> str:
    """The name of a table without its endings; a path with * is named by its folder."""
    path = Path(file.partition("?")[0])
    name = path.parent.name or "table" if "*" in path.name else path.name
    return name.partition(".")[0]


CONFIGS = {"name NAME?": "print this one, to change it: jaxpfl configs quickstart > mine.yaml"}


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
        sentence = textwrap.shorten(about.sentence, 90, placeholder=" ...")
        lines += [f"jaxpfl {about.command} {name}{needs}", f"    {sentence}"]
    lines.append("\n`jaxpfl configs NAME` prints one, for you to change.")
    records = {name: about._asdict() for name, about in abouts.items()}
    return {"configs": records, "text": "\n".join(lines)}


INIT = {
    "file TABLE": _TABLE,
    "--out CONFIG": "what to write (default: NAME-OF-TABLE.yaml)",
    "--task {training,synthetic-text}=training": "training (default); synthetic-text: only shows "
    "the command that chooses public texts",
    **{f"--{name} COLUMN": text for name, text in _COLUMNS.items()},
}


def init(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if arguments.task == "synthetic-text":
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


SYNTHESIZE = {
    "file TABLE": _TABLE,
    **{f"--{name} COLUMN": _COLUMNS[name] for name in ("client", "text")},
    "--public SOURCE+!": "public texts, each SOURCE or NAME=SOURCE, or a folder of such files",
    "--epsilon EPSILON!": "smaller is more private",
    "--delta DELTA": "default: a power of ten, at most 0.1 / the public number of clients",
    "--texts N=1000": "how many texts to choose (default: 1000)",
    "--embedder NAME+": "hashed, minilm, ... or several (default: minilm if its weights are here, "
    "or hashed)",
    "--judge NAME": "an embedder that only reports how near the texts are; takes a tenth of the "
    "release",
    "--cut RULE=messages": "",
    "--writer NAME": "let a model continue chosen texts, and choose anew, at no further cost: "
    "smollm2, another published model or ADDRESS#MODEL (default: none)",
    "--label COLUMN": "a column of labels: texts are chosen for each of --labels, by one release",
    "--labels A,B,...": "the PUBLIC list of labels; texts with other labels are left out",
    "--ledger FILE": "",
    "--out DIR": "default: runs/NAME-OF-TABLE",
}


def synthesize(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    import yaml

    from jaxpfl.experiments import carry_out, registry
    from jaxpfl.experiments.own_table import config_of, source_of

    if (arguments.label is None) != (arguments.labels is None):
        why = "which labels the table has is private, so that they must be a public list"
        raise InputError(f"--label COLUMN and --labels A,B,... must come together: {why}")
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


FRED = {
    "--private SOURCE!": "the clients",
    "--candidates SOURCE+!": "public corpora, each SOURCE or NAME=SOURCE, such as "
    "'wiki.csv?text=article'",
    "--epsilon EPSILON!": "smaller is more private",
    "--delta DELTA!": "below 1 / clients",
    "--unit {client,example}=client": "what is protected: a client with all it holds (default), or "
    "one example",
    "--mode {exact,paper}=exact": "paper: Algorithm 1 as printed, by example; charges what it "
    "really costs; N is public",
    "--population N": "the number of clients (or examples), if it is public: spares its noise",
    "--embedder NAME=hashed": "hashed (default), minilm, encoder:FOLDER, "
    "sentence-transformers:NAME, ...",
    "--clip-norm NORM=1.0": "of embeddings (default: 1)",
    "--max-examples K=64": "embed at most K random examples of a client (default: 64); with --unit "
    "example, all",
    "--cut RULE=messages": "",
    "--choose N": "also choose N single texts of all corpora by the same release, at no further "
    "cost",
    "--texts FILE": "the chosen texts, .jsonl or .parquet (default: OUT/chosen.jsonl)",
    "--distributed HOW": "",
    "--ledger FILE": "",
    "--out DIR": "default: runs/fred",
}


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
        given |= {"examples": clients.num_examples, "clients": len(clients)}
        plan = FredPlan.as_printed(**given)
    else:
        given |= {"unit": arguments.unit, "population": arguments.population}
        plan = FredPlan.calibrated(**given, max_examples=arguments.max_examples)
    how = {name: getattr(arguments, name) for name in ("cut", "choose", "texts", "ledger")}
    how |= {"embedder_name": arguments.embedder, "out": arguments.out or common.unused("fred")}
    record = choose_corpus(private, arguments.candidates, plan=plan, **how)
    return {**record, "text": table(record)}
