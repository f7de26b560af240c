"""The page of the study of joined words: where words are out of vocabulary, and which ones."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection, text_lines
from jaxpfl.experiments.systems.workspace import scaled_lines

_BOTH = "both models of a world, everything on its ledger"


def lines(record: dict[str, Any]) -> list[str]:
    """Returns the result for a terminal."""
    columns = ("bug", "OOV at position 1", "OOV overall", "top words with a space")
    rows = [
        (
            _share(world),
            _percent(world["oov_by_position"][0]),
            _percent(world["oov_overall"]),
            f"{_spaces(world['top_words'])} of {len(world['top_words'])}",
        )
        for world in record["worlds"].values()
    ]
    shown = text_lines(Table(columns, rows, numbers=(0, 1, 2, 3)))
    return [f"{_measured(record)}:", *shown, "", *_privacy(record)]


def _measured(record: dict[str, Any]) -> str:
    """Of what the rates out of vocabulary (OOV) are, and of which vocabulary."""
    return (
        f"{record['drawn']['sentences']:,} sentences drawn from each word model, against the "
        f"vocabulary of {record['vocabulary']['source']}"
    )


def _privacy(record: dict[str, Any]) -> list[str]:
    if record["all_worlds"]["epsilon"] is None:
        return [record["stamp"]]
    world = _costliest(record)
    names = {f"the model of {kind}": kind for kind in ("words", "characters")}
    return [
        f"{_BOTH}: {world['composed_guarantee']['statement']}",
        f"all {len(record['worlds'])} worlds, as shown here, everything on their ledgers: "
        f"{record['all_worlds']['statement']}",
        f"the word model: {world['privacy']['words']}",
        f"the character model: {world['privacy']['characters']}",
        *scaled_lines(names, "both models", record["at_scale"]),
    ]


def _costliest(record: Mapping[str, Any]) -> dict[str, Any]:
    worlds = record["worlds"].values()
    return max(worlds, key=lambda world: world["composed_guarantee"]["epsilon"] or 0.0)


def _spaces(top: list[dict[str, Any]]) -> int:
    return sum(" " in each["word"] for each in top)


def _share(world: Mapping[str, Any]) -> str:
    return f"{100 * world['probability']:g} %"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Draws the pictures from the record."""
    stamped = bool(record["stamp"])
    privacy = _privacy(record)
    return Page(
        title="Which words does the vocabulary lack? Federated language models",
        lead=f"{record['population']} · a client: {record['unit']} · vocabulary of "
        f"{record['vocabulary']['size']:,} words from {record['vocabulary']['source']}",
        stamp=record["stamp"],
        privacy=f"{_costliest(record)['composed_guarantee']['statement']}, {_BOTH}",
        privacy_notes=[
            *no_protection(_costliest(record)["composed_guarantee"]["epsilon"]),
            "This is the composed guarantee of the word model and the character model of one "
            "world, which is what a deployment would spend. This page shows several worlds of the "
            "same clients, which costs more:",
            *privacy[1:],
        ],
        facts=[
            (text.format(plan[name]), f"{what}, {kind} model")
            for name, what, text in (
                ("rounds", "rounds", "{}"),
                ("clients_per_round", "clients a round", "{}"),
                ("noise_multiplier", "noise multiplier", "{:.3g}"),
            )
            for kind, plan in record["plans"].items()
        ],
        sections=[
            Section(
                "Where: words out of vocabulary by their position in generated sentences",
                f"{_measured(record)}. The bug joins the first two words of a share of the "
                "sentences.",
                [
                    ("oov_by_position", "OOV rate by position", _by_position(record, stamped)),
                    ("oov_overall", "OOV rate overall", _overall(record, stamped)),
                ],
            ),
            Section(
                f"Which: the {record['drawn']['top']} most probable words of the character models",
                "The character models are trained only on words out of vocabulary. The probability "
                "is that of the whole word and its end. The bug makes words that contain a space "
                "(marked ␣).",
                table=_top(record),
            ),
        ],
        runs=[f"{kind}_{name}" for name in record["worlds"] for kind in ("words", "characters")],
    )


def _by_position(record: dict[str, Any], stamped: bool) -> Any:
    axes = plots.axes("Out-of-vocabulary rate by position", stamped=stamped)
    for number, world in enumerate(record["worlds"].values()):
        rates = enumerate(world["oov_by_position"], 1)
        seen = [(place, 100 * rate) for place, rate in rates if rate is not None]
        axes.plot(
            [place for place, _ in seen],
            [rate for _, rate in seen],
            color=plots.COLOURS[number % len(plots.COLOURS)],
            linewidth=2,
            marker="o",
            markersize=3.5,
            label=f"bug in {_share(world)} of sentences",
        )
    # Rates of 1 % and of 90 % must both be visible.
    plots.logarithmic(axes)
    axes.legend(frameon=False, fontsize=8.5)
    return plots.labelled(axes, "position in the sentence", "% of words")


def _overall(record: dict[str, Any], stamped: bool) -> Any:
    axes = plots.axes("Out-of-vocabulary rate of all generated words", stamped=stamped)
    worlds = list(record["worlds"].values())
    rates = [100 * (world["oov_overall"] or 0.0) for world in worlds]
    axes.bar(range(len(worlds)), rates, color=plots.COLOURS[: len(worlds)], width=0.6)
    for place, rate in enumerate(rates):
        axes.annotate(f"{rate:.1f} %", (place, rate), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(worlds)), [_share(world) for world in worlds])
    axes.grid(False, axis="x")
    return plots.labelled(axes, "sentences with the bug", "% of words")


def _top(record: dict[str, Any]) -> Table:
    worlds = record["worlds"].values()
    columns = [part for w in worlds for part in (f"bug in {_share(w)}", "probability by the model")]
    rows = []
    for rank in range(record["drawn"]["top"]):
        row = [str(rank + 1)]
        for world in worlds:
            # A model may generate fewer words.
            for each in world["top_words"][rank : rank + 1] or [None]:
                row.append(each["word"].replace(" ", " ␣ ") if each else "")
                row.append(f"{100 * math.exp(each['log_probability']):.2f} %" if each else "")
        rows.append(tuple(row))
    counts = [part for w in worlds for part in (f"{_spaces(w['top_words'])} with a space", "")]
    numbers = (0, *range(2, len(columns) + 1, 2))
    return Table(("rank", *columns), [*rows, ("", *counts)], numbers)
