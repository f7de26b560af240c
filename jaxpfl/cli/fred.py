"""`jaxpfl fred`."""

import argparse
from collections.abc import Sequence
from typing import Any

from jaxpfl import memory
from jaxpfl.cli import common


def add(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    common.join(arguments.distributed)
    memory.give_back_after_compiling()
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.data import open as open_population
    from jaxpfl.errors import InputError
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
            raise InputError(
                "--mode paper publishes the number of examples: leave out --population"
            )
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
        out=arguments.out or common.unused_directory("fred"),
        ledger=arguments.ledger,
    )
    return {**record, "text": table(record)}
