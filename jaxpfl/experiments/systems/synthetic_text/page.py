"""The page of one study of synthetic text, and its lines for a terminal."""

from pathlib import Path
from typing import Any

from jaxpfl.experiments.records.numbers import number
from jaxpfl.experiments.report.page import Page, Section, Table
from jaxpfl.experiments.report.plots import COLOURS, axes


def lines(record: dict[str, Any]) -> list[str]:
    """The record of a finished run for a terminal."""
    metrics = record["metrics"]
    return [
        f"method {record['method']}, downstream model on {record['tested_on']}:",
        f"{'':24}{'accuracy':>10}{'perplexity':>12}",
        f"{'public checkpoint':24}{100 * metrics['public_accuracy']:>8.2f} %"
        f"{number(metrics['public_perplexity']):>12}",
        f"{'after ' + record['method']:24}{100 * metrics['accuracy']:>8.2f} %"
        f"{number(metrics['perplexity']):>12}",
        "",
        f"privacy of this run: {record['privacy']}",
    ]


def page(directory: Path, record: dict[str, Any]) -> Page:
    """The page of a finished run, from its record alone."""
    del directory
    metrics, stamp = record["metrics"], record["stamp"]
    gain = 100 * (metrics["accuracy"] - metrics["public_accuracy"])
    rows = [
        ("public checkpoint", "public_accuracy", "public_perplexity"),
        (f"after {record['method']}", "accuracy", "perplexity"),
    ]
    table = Table(
        ("downstream model", "next-token accuracy", "perplexity"),
        [(name, f"{100 * metrics[a]:.2f} %", number(metrics[p])) for name, a, p in rows],
        (1, 2),
    )
    sections = [Section("Test clients", f"On {record['tested_on']}.", table=table)]
    history = record.get("history") or []
    if any("fid" in entry for entry in history):
        sections.append(
            Section(
                "Round by round",
                "Frechet distance from the embeddings of the round's texts to those of the "
                f"{record['validated_on']}. It decides nothing.",
                figures=[("fid", "", _fid(history, bool(stamp)))],
            )
        )
    if "plane" in record:
        sections.append(
            Section(
                "Synthetic and real texts",
                "Embeddings of synthetic texts, and of those of the "
                f"{record['validated_on']}, on their two principal axes.",
                figures=[("plane", "", _plane(record["plane"], bool(stamp)))],
            )
        )
    if history and "texts" in history[0]:
        last = [entry for entry in history if "texts" in entry][-1]
        first = history[0]["texts"]
        cells = list(zip(first, last["texts"], strict=False))
        columns = (f"best of round {history[0]['round']}", f"best of round {last['round']}")
        sections.append(Section("The texts with the best scores", table=Table(columns, cells)))
    if record.get("texts"):
        texts = [(text,) for text in record["texts"]]
        sections.append(Section("From the synthetic corpus", table=Table(("text",), texts)))
    cost, when = record["cost"], "in its only round" if record["one_look"] else "in a round"
    facts = [
        (f"{100 * metrics['accuracy']:.2f} %", f"next-token accuracy on {record['tested_on']}"),
        (f"{gain:+.2f}", f"points over the public checkpoint on {record['tested_on']}"),
        (f"{cost['down']:,}", f"floats to a client {when}"),
        (f"{cost['up']:,}", f"floats from a client {when}"),
    ]
    return Page(
        title=f"Synthetic text: {record['method']}{', one look' if record['one_look'] else ''}",
        lead="How much a downstream language model improved by private clients' text.",
        stamp=stamp,
        privacy=record["privacy"],
        privacy_notes=[],
        facts=facts,
        sections=sections,
        runs=["fed_avg"] if record["method"] == "fed_avg" else [],
    )


def _fid(history: list[dict[str, Any]], stamped: bool) -> Any:
    panel = axes("Frechet distance to validation texts", stamped=stamped)
    rounds = [entry["round"] for entry in history]
    panel.plot(rounds, [entry["fid"] for entry in history], color=COLOURS[0], marker="o")
    panel.locator_params(axis="x", integer=True)
    panel.set_xlabel("round")
    panel.set_ylabel("Frechet distance")
    return panel.figure


def _plane(plane: dict[str, list[list[float]]], stamped: bool) -> Any:
    panel = axes("First two principal components", stamped=stamped)
    for colour, name in zip(COLOURS, ("validation", "synthetic"), strict=False):
        xs, ys = zip(*plane[name], strict=True)
        panel.scatter(xs, ys, s=7, alpha=0.55, color=colour, label=name, linewidths=0)
    panel.legend(fontsize=8, frameon=False)
    panel.grid(False)
    return panel.figure
