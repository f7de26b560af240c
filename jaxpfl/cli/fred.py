"""`jaxpfl fred`."""

import argparse
from collections.abc import Sequence
from typing import Any

from jaxpfl.cli.common import add_path, unused_directory
from jaxpfl.errors import InputError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--private", metavar="SOURCE", required=True, help="the clients")
    corpora = "public corpora, each SOURCE or NAME=SOURCE"
    parser.add_argument("--candidates", metavar="SOURCE", nargs="+", required=True, help=corpora)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--delta", type=float)
    unit = "what is protected: a client with all it holds (default), or one example"
    parser.add_argument("--unit", choices=("client", "example"), default="client", help=unit)
    embedder = "hashed (default), minilm, encoder:FOLDER, ..."
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
    parser.add_argument(
        "--non-private",
        action="store_true",
        help="also (without --epsilon: only) the distances without noise; they are NOT private",
    )
    add_path(parser, "--ledger", "FILE", "default: OUT/ledger.jsonl")
    add_path(parser, "--out", "DIR", "default: runs/fred")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> dict[str, Any]:
    if (arguments.epsilon is None) != (arguments.delta is None):
        raise InputError("--epsilon and --delta belong together, found only one of them")
    if arguments.epsilon is None and not arguments.non_private:
        raise InputError("fred needs --epsilon and --delta, or --non-private")
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.experiments.choose_corpus import choose_corpus, table

    names = ("unit", "clip_norm", "max_examples")
    shared: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    plan = None
    if arguments.epsilon is not None:
        plan = FredPlan.calibrated(epsilon=arguments.epsilon, delta=arguments.delta, **shared)
    record = choose_corpus(
        arguments.private,
        arguments.candidates,
        plan=plan,
        without_privacy=FredPlan.without_privacy(**shared) if arguments.non_private else None,
        embedder_name=arguments.embedder,
        out=arguments.out or unused_directory("fred"),
        ledger=arguments.ledger,
    )
    return {**record, "text": table(record)}
