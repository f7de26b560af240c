"""The page and the card of a chosen public corpus."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.experiments.config.sections import WRITTEN
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.systems.base import last_part
from jaxpfl.printable import template


def page(directory: Path, record: Mapping[str, Any]) -> Page:
    choice, number = record["choice"], record["number"]
    rows = [
        (row["corpus"], *(f"{row[name]:,}" for name in ("texts", "chosen")), row["terms"])
        for row in record["corpora"]
    ]
    corpora = Table(("public corpus", "texts", "chosen", "terms of use"), rows, (1, 2))
    texts = "public and written texts" if _wrote(record) else "public texts"
    sentences = *chosen.lines(choice), _made(record), chosen.of_repeats(record["repeated"])
    examples = Table(("text",), [(text,) for text in choice["examples"]], style="sentences")
    return Page(
        title=title(record),
        lead=f"{choice['texts']:,} {texts}, chosen for what {number:,} clients hold.",
        stamp=record["stamp"],
        privacy=record["privacy"],
        facts=[
            (f"{choice['texts']:,}", f"texts of {choice['pool']:,} in corpus.jsonl"),
            (f"{choice['distances']['chosen']:.3g}", "squared distance from the clients, chosen"),
            (f"{choice['distances']['mixture']:.3g}", "the same of the best mixture of corpora"),
        ],
        sections=[
            Section("How the texts were chosen", " ".join(sentences), table=corpora),
            *_by_label(record["labels"]),
            *_judged(record),
            *_rounds(record["writer"]),
            Section("Some of them", table=examples),
        ],
        cautions=record["cautions"],
        runs=["moments"],
    )


def card(record: Mapping[str, Any], stamp: str) -> str:
    """What the corpus is, for whoever gets it, in the hub's format."""
    sources = {row["corpus"]: last_part(row["source"]) for row in record["corpora"]}
    about = {"record": record, "stamp": stamp, "sources": sources, "made": _made(record)}
    about |= {"title": title(record), "wrote": _wrote(record)}
    further = *_by_label(record["labels"]), *_judged(record)
    lines = [*chosen.lines(record["choice"]), *(part.text for part in _rounds(record["writer"]))]
    about["lines"] = [*lines, *record["cautions"], *(section.text for section in further)]
    return template(__package__ or "", "card.md.jinja").render(about)


def title(record: Mapping[str, Any]) -> str:
    """What the corpus is called: where no model writes, it is a public one."""
    written = _wrote(record)
    return "A chosen corpus of public and written texts" if written else "A chosen public corpus"


def _wrote(record: Mapping[str, Any]) -> bool:
    """Whether there is a text that a model wrote."""
    return record["writer"] is not None and record["writer"]["rounds"][-1]["written"] > 0


def _rounds(writer: Mapping[str, Any] | None) -> list[Section]:
    """What was written, by which model, and how near each choice is; none without a writer."""
    if writer is None:
        return []
    first, last = writer["rounds"][0], writer["rounds"][-1]
    refused = sum(row["refused"] for row in writer["rounds"])
    forms = {"written": ",", "chosen": ",", "distance": ".4g", "drawn": ".4g"}
    rows = [
        (str(number), *(format(row[name], form) for name, form in forms.items()))
        for number, row in enumerate(writer["rounds"])
    ]
    columns = ("round", "written texts", "of them taken", "distance, weighted", "of the taken")
    text = (
        f"Written texts are by {writer['model']}. It was asked for {writer['asked']:,} texts that "
        "continue chosen public ones, and for a few on trial before the release. It read no "
        "client's text, and nothing else that follows from the release. It refused "
        f"{refused:,} prompts. {last['written']:,} of its texts were new and not empty, and "
        f"{last['chosen']:,} of these were taken (source: {WRITTEN}). Squared distance to the "
        f"clients, estimated: {first['distance']:.4g} before it wrote, {last['distance']:.4g} at "
        "the end. The second is too optimistic: prompts follow from the release that estimates "
        "both."
    )
    return [Section("Pick, write, pick again", text, table=Table(columns, rows, (0, 1, 2, 3, 4)))]


def _judged(record: Mapping[str, Any]) -> list[Section]:
    """How near the texts are by the judge, with a writer in each round; none without a judge."""
    if record["judge"] is None:
        return []
    near = ", ".join(chosen.distances(record["choice"]["judged"]))
    about = record["writer"]["rounds"] if record["writer"] else []
    by_round = [distance for row in about for distance in row["judged"]]
    rounds = f" Of the texts taken, round by round: {', '.join(f'{d:.4g}' for d in by_round)}."
    text = (
        f"{record['judge']} decided nothing. By its part of the same release, the squared distance "
    )
    text += f"to the clients is, estimated: {near}.{rounds if by_round else ''}"
    return [Section("By an embedder that chose nothing", text)]


def _by_label(labels: Mapping[str, Any]) -> list[Section]:
    """What was chosen for each label; none without labels."""
    rows = []
    for label, about in labels.items():
        near = (f"{about['distances'][name]:.3g}" for name in ("mixture", "chosen"))
        rows.append((label, f"{about['clients']:,.0f}", f"{about['texts']:,}", *near))
    columns = ("label", "clients, released", "texts", "distance of the mixture", "of chosen texts")
    text = (
        "The labels are a public list. What a client has of all of them was one contribution; it "
        "is counted for each label by the share of its texts. The texts are divided by the "
        "released numbers, and distances are means over them. A public text may be chosen for "
        "several labels."
    )
    return [Section("By label", text, table=Table(columns, rows, (1, 2, 3, 4)))] if rows else []


def _made(record: Mapping[str, Any]) -> str:
    """Who is public and who is not, in two sentences."""
    embedders = filter(None, [record["embedder"], record["judge"]])
    which = "All texts but those that a model wrote" if _wrote(record) else "All texts"
    return (
        f"{which} are of sources that were declared public; none was copied from the clients' "
        f"table. {record['number']:,} clients, whose number is public, released mean and "
        f"covariance of their texts' embeddings ({', '.join(embedders)}) "
        f"{'and number, for each label, ' if record['labels'] else ''}once, with noise, and "
        f"nothing else. All texts were cut by one rule: {record['cut']}."
    )
