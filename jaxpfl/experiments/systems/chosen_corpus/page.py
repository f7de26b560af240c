"""The page and the card of a chosen public corpus."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems.base import last_part
from jaxpfl.printable import template

_BY_LABEL = ("label", "clients, released", "texts", "distance of the mixture", "of chosen texts")
_OF_LABELS = (
    "The labels are a public list. What a client has of all of them was one contribution; it is "
    "counted for each label by the share of its texts. The texts are divided by the released "
    "numbers. A public text may be chosen for several labels."
)


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
    metrics, labels = record["metrics"], []
    for label, count in record["labels"].items():
        near = (f"{choices[label]['distances'][name]:.3g}" for name in ("mixture", "chosen"))
        labels.append((label, f"{count:,.0f}", f"{choices[label]['texts']:,}", *near))
    by_label = Table(_BY_LABEL, labels, (1, 2, 3, 4))
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
            *([Section("By label", _OF_LABELS, table=by_label)] if labels else []),
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
    given["lines"] += [*([_OF_LABELS] if record["labels"] else []), *record["cautions"]]
    given["texts"] = sum(choice["texts"] for choice in record["choices"].values())
    return template(__package__ or "", "card.md.jinja").render(given)


def _made(record: Mapping[str, Any]) -> str:
    """Who is public and who is not, in some sentences."""
    return (
        "All texts are of sources that were declared public; none was copied from the clients' "
        f"table. {record['number']:,} clients, whose number is public, released mean and "
        f"covariance of their texts' embeddings ({record['embedder']}) "
        f"{'and number, for each label, ' if record['labels'] else ''}once, with noise, and "
        f"nothing else. All texts were cut by one rule: {record['cut']}."
    )
