"""The page and the card of a chosen public corpus."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems.base import last_part
from jaxpfl.printable import template


def page(directory: Path, record: Mapping[str, Any]) -> Page:
    """The page of a finished run, from its record alone."""
    choices, number = record["choices"], record["number"]
    rows = [
        (row["corpus"], *(f"{row[name]:,}" for name in ("texts", "chosen")), row["terms"])
        for row in record["corpora"]
    ]
    columns = ("public corpus", "texts", "chosen", "terms of use")
    texts = sum(choice["texts"] for choice in choices.values())
    pool = next(iter(choices.values()))["pool"]
    repeated = chosen.of_repeats(record["repeated"])
    what = [] if record["labels"] else chosen.lines(choices[""])
    made = " ".join([*what, _made(record), repeated])
    metrics = record["metrics"]
    return Page(
        title="A chosen public corpus",
        lead=f"{texts:,} public texts, chosen for what {number:,} clients hold.",
        stamp=record["stamp"],
        privacy=record["privacy"],
        facts=[
            (f"{texts:,}", f"texts of {pool:,} in corpus.jsonl"),
            (f"{metrics['distance']:.3g}", "squared distance from the clients, chosen"),
            (f"{metrics['mixture_distance']:.3g}", "the same of the best mixture of corpora"),
        ],
        sections=[
            Section("Chosen one by one", made, table=Table(columns, rows, (1, 2))),
            *(
                Section(
                    f"Some of the label {label}" if label else "Some of them",
                    " ".join(chosen.lines(choice)) if label else "",
                    table=Table(
                        ("text",), [(text,) for text in choice["examples"]], style="sentences"
                    ),
                )
                for label, choice in choices.items()
            ),
        ],
        cautions=record["cautions"],
        runs=["moments"],
    )


def card(record: Mapping[str, Any], stamp: str) -> str:
    """What the corpus is, for whoever gets it, in the hub's format."""
    sources = {row["corpus"]: last_part(row["source"]) for row in record["corpora"]}
    given = {"record": record, "stamp": stamp, "sources": sources, "made": _made(record)}
    given["lines"] = [
        f"{label}: {line}" if label else line
        for label, choice in record["choices"].items()
        for line in chosen.lines(choice)
    ]
    given["lines"] += record["cautions"]
    given["texts"] = sum(choice["texts"] for choice in record["choices"].values())
    return template(__package__ or "", "card.md.jinja").render(given)


def _made(record: Mapping[str, Any]) -> str:
    """Who is public and who is not, in some sentences."""
    counts = (f"{label} {count:,.0f}" for label, count in record["labels"].items())
    labels = (
        "How many clients each label has was released with them, a client counting by the share of "
        f"its texts: {', '.join(counts)}. The labels are a public list; what a client has of all "
        "of them was one contribution. The number of texts follows from these counts. A public "
        "text may be chosen for several labels. "
    )
    return (
        "All texts are of sources that were declared public; none was copied from the clients' "
        f"table. {record['number']:,} clients, whose number is public, released mean and "
        f"covariance of their texts' embeddings ({record['embedder']}) "
        f"{'for each label ' if record['labels'] else ''}once, with noise, and "
        f"nothing else. {labels if record['labels'] else ''}"
        f"All texts were cut by one rule: {record['cut']}."
    )
