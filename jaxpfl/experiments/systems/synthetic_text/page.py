"""The page of one study of synthetic text."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import of_table
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import Page, Section, Table, compared_models
from jaxpfl.experiments.report.plots import COLOURS, axes, curve, labelled

# The variations of texts that no paper has, for generators that can do no other.
_SUBSTITUTES = ("redraw", "continue")
# What is drawn of the entries of a round, by title; POPri's Figures 4 and 8.
_BY_ROUND = {
    "Frechet distance to validation texts": {"fid": "all texts"},
    "Frechet distance of pairs": {"fid_chosen": "chosen", "fid_rejected": "rejected"},
    "Median distance to the medoid": {"spread": "all texts"},
}


def page(directory: Path, record: dict[str, Any]) -> Page:
    metrics, stamp, tested_on = record["metrics"], record["stamp"], record["tested_on"]
    look = ", one look" if record["one_look"] else ""
    gain = 100 * (metrics["accuracy"] - metrics["public_accuracy"])
    sections = [compared_models(record["table"], tested_on, True)]
    history, figures = record.get("history") or [], []
    for title, curves in _BY_ROUND.items():
        if any(curves.keys() <= entry.keys() for entry in history):
            panel = axes(title, stamp=mark_of(stamp))
            for index, (name, label) in enumerate(curves.items()):
                points = [(entry["round"], entry[name]) for entry in history if name in entry]
                curve(panel, points, index, label=label)
            panel.locator_params(axis="x", integer=True)
            picture = labelled(panel, "round", "distance", legend=len(curves) > 1)
            figures.append((next(iter(curves)), f"{title}, by round", picture))
    if "plane" in record:
        panel = axes("First two principal components", stamp=mark_of(stamp))
        for colour, name in zip(COLOURS, ("validation", "synthetic"), strict=False):
            xs, ys = zip(*record["plane"][name], strict=True)
            panel.scatter(xs, ys, s=7, alpha=0.55, color=colour, label=name, linewidths=0)
        panel.grid(False)
        figures.append(("plane", "embeddings", labelled(panel, "", "", legend=True)))
        nearest = record.get("checkpoint", {}).get("chosen") == "nearest"
        decides = "the round" if nearest else "nothing"
        text = (
            "Embeddings of synthetic texts, and of those of the "
            f"{record['validated_on']}: the Frechet distance between them by round, which decides "
            f"{decides}, and all of them on their two principal axes. Distances of fewer texts, as "
            "of pairs, are larger; texts that become alike are nearer to their medoid."
        )
        if record["method"] != "generator":
            text += " The method saw this measure: it tunes and selects by the same embedder."
        sections.append(Section("Synthetic and real texts", text, figures))
    if history:
        ends = history[0], history[-1]
        cells = list(zip(*(entry["texts"] for entry in ends), strict=False))
        columns = tuple(f"best of round {entry['round']}" for entry in ends)
        table = Table(columns, cells, style="sentences")
        sections.append(Section("The texts with the best scores", table=table))
    if record.get("texts"):
        table = Table(("text",), [(text,) for text in record["texts"]], style="sentences")
        sections.append(Section("From the synthetic corpus", table=table))
    sections += _choices(record)
    cautions = of_table(record["table"], "perplexity", tested_on) + record.get("cautions", [])
    for name in ("chosen_texts", "final_corpus"):
        cautions += chosen.cautions(choice) if (choice := record.get(name)) else []
    if "api" in (about := record["public_models"].get("generator", {})):
        where = f"{about['model']} behind {about['api']}, whose owner saw the prompts,"
        cautions.append(f"{where} wrote the texts: no run, nor a resumed one, can write the same.")
    if (varied := record.get("variation")) in _SUBSTITUTES:
        did = "rephrase (Aug-PE) or to fill masks (PrE-Text)"
        cautions.append(f"Texts were varied by “{varied}”; the method's authors did {did}.")
    once = look or record["method"] == "steered"
    cost, when = record["cost"], "in its only round" if once else "in a round"
    # Central training has none: clients' own texts are read.
    ways = () if cost is None else (("to", cost["down"]), ("from", cost["up"]))
    sent = [(f"{floats:,}", f"floats {way} a client {when}") for way, floats in ways]
    return Page(
        title=f"Synthetic text: {record['method']}{look}",
        lead="How much a downstream language model improved by private clients' text.",
        stamp=stamp,
        privacy=record["privacy"],
        facts=[
            (f"{100 * metrics['accuracy']:.2f} %", f"next-token accuracy on {tested_on}"),
            (f"{gain:+.2f}", f"points over the public model on {tested_on}"),
            *sent,
        ],
        sections=sections,
        cautions=cautions,
        runs=["fed_avg"] if record["method"] == "fed_avg" else [],
    )


def _choices(record: Mapping[str, Any]) -> Iterator[Section]:
    """What was chosen by a distance, and from what, with the chosen row as `ours`."""
    released = f"the {record['trained_on']}"
    if scores := record.get("corpora"):
        columns = map(scores.get, ("names", "corrected", "low", "high"))
        values = zip(*columns, strict=True)
        rows = [(name, f"{d:.4f}", f"{low:.4f} to {high:.4f}") for name, d, low, high in values]
        choice = "Prompts are made of the first one, a choice that cost nothing more."
        text = f"{choice} Frechet distances from {released}, by the moments that were released:"
        table = Table(("corpus", "distance", "interval"), rows, (1, 2), 0)
        yield Section("The nearest public corpus", text, table=table)
    if choice := record.get("chosen_texts"):
        yield chosen.section(choice)
    if choice := record.get("final_corpus"):
        title = "The corpus: written and public texts, chosen by the same release"
        yield replace(chosen.section(choice), title=title)
    if tried := record.get("tried"):
        names = list(tried["choices"][0])
        rows = [
            (*(str(x[0] if isinstance(x, list) else x) for x in choice.values()), f"{distance:.4f}")
            for choice, distance in zip(tried["choices"], tried["distances"], strict=True)
        ]
        text = (
            "How the generator writes was chosen before the first round, at no further cost, by "
            f"the Frechet distance of its texts from the released moments of {released}:"
        )
        table = Table((*names, "distance"), rows, (len(names),), tried["chosen"])
        yield Section("What was tried", text, table=table)
    if steering := record.get("steering"):
        rows = [(str(layer), *(f"{x:.2f}" for x in more)) for layer, *more in steering["layers"]]
        text = (
            f"{steering['strength']:g} times the mean difference of hidden states of {released} "
            "from public texts was added to these layers while the generator wrote. Its length, "
            "that of its noise, and the largest that it can have, which is the median distance of "
            "a public text from their mean:"
        )
        columns = ("layer", "distance", "distance by noise alone", "largest distance")
        table = Table(columns, rows, (0, 1, 2, 3))
        yield Section("What steered the generator", text, table=table)
    stop = record.get("checkpoint", {})
    if "distances" in stop:
        source = f"the {record['validated_on']}"
        if stop["chosen"] == "judged":
            source = f"{released}, by moments that no reward saw"
        rows = [(str(round), f"{distance:.4f}") for round, distance in enumerate(stop["distances"])]
        nearest = "The adapters whose texts are nearest wrote the corpus."
        text = f"{nearest} Frechet distances of their texts from {source}:"
        table = Table(("after round", "distance"), rows, (0, 1), stop["round"])
        yield Section("When to stop", text, table=table)
