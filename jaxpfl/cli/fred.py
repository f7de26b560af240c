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
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, required=True)
    unit = "what is protected: a client with all it holds (default), or one example"
    parser.add_argument("--unit", choices=("client", "example"), default="client", help=unit)
    population = (
        "how many clients (or examples) there are, if that is public: more exact if they are few"
    )
    parser.add_argument("--population", type=int, metavar="N", help=population)
    embedder = "hashed (default), minilm, encoder:FOLDER, sentence-transformers:NAME, ..."
    parser.add_argument("--embedder", metavar="NAME", default="hashed", help=embedder)
    parser.add_argument("--clip-norm", type=float, default=1.0, help="of embeddings (default: 1)")
    parser.add_argument(
        "--max-examples",
        type=int,
        metavar="K",
        default=64,
        help="examples of a client that are used at most, drawn at random before they are embedded "
        "(default: 64); where the unit is the example, all are used",
    )
    common.add(parser, "--distributed")
    common.add_path(parser, "--ledger", "FILE", "default: OUT/ledger.jsonl")
    common.add_path(parser, "--out", "DIR", "default: runs/fred")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    common.join(arguments.distributed)
    memory.give_back_after_compiling()
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.experiments.choose_corpus import choose_corpus, table

    plan = FredPlan.calibrated(
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        unit=arguments.unit,
        population=arguments.population,
        clip_norm=arguments.clip_norm,
        max_examples=arguments.max_examples,
    )
    record = choose_corpus(
        arguments.private,
        arguments.candidates,
        plan=plan,
        embedder_name=arguments.embedder,
        out=arguments.out or common.unused_directory("fred"),
        ledger=arguments.ledger,
    )
    return {**record, "text": table(record)}
