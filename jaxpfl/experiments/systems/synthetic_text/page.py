"""The page of one study of synthetic text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import of_table
from jaxpfl.experiments.report.page import Page, Section, Table, compared_models
from jaxpfl.experiments.report.plots import COLOURS, axes, labelled

REPEATS = "private/repeats.json"
"""What the corpus repeats of clients' own texts: exact, so that no statement covers it."""
# The shares of texts that the page of repeats shows.
_LEAST_WORDS = (5, 10, 20)


def page(directory: Path, record: dict[str, Any]) -> Page:
    """The page of a finished run, and what its corpus repeats of clients, where that is known."""
    metrics, stamp, tested_on = record["metrics"], record["stamp"], record["tested_on"]
    look = ", one look" if record["one_look"] else ""
    gain = 100 * (metrics["accuracy"] - metrics["public_accuracy"])
    sections = [compared_models(record["table"], tested_on, True)]
    history, figures = record.get("history") or [], []
    if history:
        figures.append(("fid", "Frechet distance by round", _fid(history, mark_of(stamp))))
    if "plane" in record:
        figures.append(("plane", "embeddings", _plane(record["plane"], mark_of(stamp))))
        nearest = record.get("checkpoint", {}).get("chosen") == "nearest"
        decides = "the round" if nearest else "nothing"
        text = (
            "Embeddings of synthetic texts, and of those of the "
            f"{record['validated_on']}: the Frechet distance between them by round, which decides "
            f"{decides}, and all of them on their two principal axes."
        )
        if record["method"] != "generator":
            text += " The method saw this measure: it tunes and selects by the same embedder."
        sections.append(Section("Synthetic and real texts", text, figures))
    if history:
        first, last = history[0], history[-1]
        cells = list(zip(first["texts"], last["texts"], strict=False))
        columns = (f"best of round {first['round']}", f"best of round {last['round']}")
        table = Table(columns, cells, style="sentences")
        sections.append(Section("The texts with the best scores", table=table))
    if record.get("texts"):
        table = Table(("text",), [(text,) for text in record["texts"]], style="sentences")
        sections.append(Section("From the synthetic corpus", table=table))
    if "corpora" in record:
        sections.append(_corpora(record["corpora"], record["trained_on"]))
    if "tried" in record:
        sections.append(_tried(record["tried"], record["trained_on"]))
    if "distances" in record.get("checkpoint", {}):
        sections.append(_checkpoints(record))
    cautions = of_table(record["table"], "perplexity", tested_on)
    if "api" in (about := record["public_models"].get("generator", {})):
        where = f"{about['model']} behind {about['api']}, whose owner saw the prompts,"
        cautions.append(f"{where} wrote the texts: no run, nor a resumed one, can write the same.")
    cost, when = record["cost"], "in its only round" if look else "in a round"
    repeats = directory / REPEATS
    return Page(
        title=f"Synthetic text: {record['method']}{look}",
        lead="How much a downstream language model improved by private clients' text.",
        stamp=stamp,
        privacy=record["privacy"],
        privacy_notes=[],
        facts=[
            (f"{100 * metrics['accuracy']:.2f} %", f"next-token accuracy on {tested_on}"),
            (f"{gain:+.2f}", f"points over the public model on {tested_on}"),
            (f"{cost['down']:,}", f"floats to a client {when}"),
            (f"{cost['up']:,}", f"floats from a client {when}"),
        ],
        sections=sections,
        cautions=cautions,
        runs=["fed_avg"] if record["method"] == "fed_avg" else [],
        further=[_repeated(files.read_record(repeats), record)] if repeats.exists() else [],
    )


def _repeated(found: Mapping[str, Any], record: Mapping[str, Any]) -> Page:
    rows = [
        (model, f"{len(words):,}", str(max(words)), f"{np.mean(words):.2f}", *_shares(words))
        for model, words in found["words"].items()
    ]
    shares = tuple(f"{least} words or more" for least in _LEAST_WORDS)
    columns = ("texts of", "texts", "longest, in words", "mean, in words", *shares)
    text = (
        "The most words in a row that a written text has in common with one of "
        f"{found['clients_texts']:,} texts of the {record['trained_on']}, and the share of texts "
        "that have so many. Common phrases repeat, too: what the untuned generator repeats, it has "
        "from no client. One run."
    )
    table = Table(columns, rows, tuple(range(1, len(columns))), 0)
    return Page(
        title=f"What the corpus repeats of clients: {record['method']}",
        lead="Exact counts of clients' own texts.",
        stamp=record["stamp"],
        privacy="",
        privacy_notes=["Whoever sees this page learns of the clients what no noise hides."],
        facts=[],
        sections=[Section("Words in a row", text, table=table)],
        simulation=True,
        warning="Nothing on this page is covered by the statement of report.html.",
        name=str(Path(REPEATS).with_suffix(".html")),
    )


def _shares(words: list[int]) -> list[str]:
    return [f"{100 * np.mean(np.array(words) >= least):.1f} %" for least in _LEAST_WORDS]


def _corpora(scores: dict[str, list[Any]], source: str) -> Section:
    values = zip(*(scores[kind] for kind in ("names", "corrected", "low", "high")), strict=True)
    rows = [(name, f"{near:.4f}", f"{low:.4f} to {high:.4f}") for name, near, low, high in values]
    text = (
        "Prompts are made of the first one, a choice that cost nothing more. Frechet distances "
        f"from the {source}, by the moments that were released:"
    )
    table = Table(("corpus", "distance", "interval"), rows, numbers=(1, 2), ours=0)
    return Section("The nearest public corpus", text, table=table)


def _tried(found: dict[str, Any], source: str) -> Section:
    names = list(found["choices"][0])
    rows = [
        (*(str(x[0] if isinstance(x, list) else x) for x in each.values()), f"{distance:.4f}")
        for each, distance in zip(found["choices"], found["distances"], strict=True)
    ]
    text = (
        "How the generator writes was chosen before the first round, at no further cost, by the "
        f"Frechet distance of its texts from the released moments of the {source}:"
    )
    table = Table((*names, "distance"), rows, numbers=(len(names),), ours=found["chosen"])
    return Section("What was tried", text, table=table)


def _checkpoints(record: dict[str, Any]) -> Section:
    found, source = record["checkpoint"], f"the {record['validated_on']}"
    if found["chosen"] == "judged":
        source = f"the {record['trained_on']}, by moments that no reward saw"
    rows = [(str(number), f"{each:.4f}") for number, each in enumerate(found["distances"])]
    text = (
        "The adapters whose texts are nearest wrote the corpus. Frechet distances of their texts "
        f"from {source}:"
    )
    table = Table(("after round", "distance"), rows, (0, 1), ours=found["round"])
    return Section("When to stop", text, table=table)


def _fid(history: list[dict[str, Any]], mark: str) -> Any:
    panel = axes("Frechet distance to validation texts", stamp=mark)
    rounds = [entry["round"] for entry in history]
    panel.plot(rounds, [entry["fid"] for entry in history], color=COLOURS[0], marker="o")
    panel.locator_params(axis="x", integer=True)
    return labelled(panel, "round", "Frechet distance")


def _plane(plane: dict[str, list[list[float]]], mark: str) -> Any:
    panel = axes("First two principal components", stamp=mark)
    for colour, name in zip(COLOURS, ("validation", "synthetic"), strict=False):
        xs, ys = zip(*plane[name], strict=True)
        panel.scatter(xs, ys, s=7, alpha=0.55, color=colour, label=name, linewidths=0)
    panel.legend(fontsize=8, frameon=False)
    panel.grid(False)
    return panel.figure
