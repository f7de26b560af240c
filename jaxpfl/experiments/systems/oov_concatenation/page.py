"""The page of the study of joined words: where words are out of vocabulary, and which ones."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import percent
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection
from jaxpfl.experiments.systems.oov_concatenation.study import BOTH


def _share(world: Mapping[str, Any]) -> str:
    return f"{100 * world['probability']:g} %"


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Draws the picture from the record."""
    worlds, drawn = record["worlds"].values(), record["drawn"]
    costliest = max(worlds, key=lambda each: each["composed_guarantee"]["epsilon"] or 0.0)
    world, everything = costliest["composed_guarantee"], "everything on its ledger"
    source, spaced = record["vocabulary"]["source"], []
    for each in worlds:
        first, overall = percent(each["oov_by_position"][0]), percent(each["oov_overall"])
        top = [" " in word["word"] for word in each["top_words"]]
        spaced.append((f"bug in {_share(each)}", first, overall, f"{sum(top)} of {len(top)}"))
    return Page(
        title="Which words does the vocabulary lack? Federated language models",
        lead=f"{record['population']} · a client: {record['unit']} · vocabulary of "
        f"{record['vocabulary']['size']:,} words from {source}",
        stamp=record["stamp"],
        privacy=f"{world['statement']}, {BOTH}, {everything}",
        privacy_notes=[
            *no_protection(world["epsilon"]),
            "This is the composed guarantee of the word model and the character model of one "
            "world, which is what a deployment would spend. This page shows several worlds of the "
            "same clients, which costs more:",
            f"all {len(spaced)} worlds, as shown here, everything on their ledgers: "
            f"{record['all_worlds']['statement']}",
            *(f"the model of {kind}: {said}" for kind, said in costliest["privacy"].items()),
            *(f"{name}: {said}" for name, said in record["at_scale"].items()),
        ],
        facts=[
            (f"{plan[name]:g}", f"{name.replace('_', ' ')}, {kind} model")
            for name in ("rounds", "clients_per_round", "noise_multiplier")
            for kind, plan in record["plans"].items()
        ],
        sections=[
            Section(
                "Where: words out of vocabulary (OOV) by their position in generated sentences",
                f"{drawn['sentences']:,} sentences drawn from each word model, against the "
                f"vocabulary of {source}. The bug joins the first two words of a share of the "
                "sentences.",
                [("oov_by_position", "OOV rate by position", _by_position(record))],
                Table(
                    ("", "OOV at position 1", "OOV overall", "top words with a space"),
                    spaced,
                    (1, 2, 3),
                ),
            ),
            Section(
                f"Which: the {drawn['top']} most probable words of the character models",
                f"The character models are trained only on words out of the vocabulary of {source}."
                " The probability is that of the whole word and its end. The bug makes words that "
                "contain a space (marked ␣).",
                table=_top(record),
            ),
        ],
        runs=[f"{kind}_{name}" for name in record["worlds"] for kind in record["plans"]],
    )


def _by_position(record: dict[str, Any]) -> Any:
    axes = plots.axes("Out-of-vocabulary rate by position", stamp=mark_of(record["stamp"]))
    for number, world in enumerate(record["worlds"].values()):
        # There is no rate where no sentence has a word.
        rates = np.array(world["oov_by_position"], float)
        axes.plot(
            np.arange(1, 1 + len(rates)),
            100 * rates,
            color=plots.COLOURS[number % len(plots.COLOURS)],
            linewidth=2,
            marker="o",
            markersize=3.5,
            label=f"bug in {_share(world)} of sentences; {percent(world['oov_overall'])} overall",
        )
    # Rates of 1 % and of 90 % must both be visible.
    plots.logarithmic(axes)
    axes.legend(frameon=False, fontsize=8.5)
    return plots.labelled(axes, "position in the sentence", "% of words")


def _shown(word: Mapping[str, Any]) -> tuple[str, str]:
    return word["word"].replace(" ", " ␣ "), percent(math.exp(word["log_probability"]))


def _top(record: dict[str, Any]) -> Table:
    worlds = record["worlds"].values()
    columns = [part for w in worlds for part in (f"bug in {_share(w)}", "probability by the model")]
    words = [[_shown(word) for word in world["top_words"]] for world in worlds]
    # A model may generate fewer words than another one.
    ranked = enumerate(itertools.zip_longest(*words, fillvalue=("", "")), 1)
    rows = [(str(rank), *itertools.chain(*row)) for rank, row in ranked]
    numbers = (0, *range(2, len(columns) + 1, 2))
    return Table(("rank", *columns), rows, numbers)
