"""The page of the study of joined words: where words are out of vocabulary, and which ones."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import percent
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection
from jaxpfl.experiments.systems.oov_concatenation.study import RATE, WORLD


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Draws the picture from the record."""
    worlds, drawn = list(record["worlds"].values()), record["drawn"]
    source, size = record["vocabulary"]["source"], record["vocabulary"]["size"]
    costliest = max(worlds, key=lambda world: world["composed_guarantee"]["epsilon"] or 0.0)
    guarantee, rows = costliest["composed_guarantee"], []
    for world in worlds:
        first, generated = percent(world["oov_by_position"][0]), percent(world["oov_generated"])
        spaces = [" " in word["word"] for word in world["top_words"]]
        clients = f"{percent(world['oov_overall'])} ± {percent(world['oov_noise'])}"
        rows.append((_bug(world), clients, first, generated, f"{sum(spaces)} of {len(spaces)}"))
    columns = ("", "OOV of the clients", "generated: OOV at position 1", "OOV overall")
    columns += ("top words with a space",)
    picture = _by_position(worlds, mark_of(record["stamp"]))
    return Page(
        title="Which words does the vocabulary lack? Federated language models",
        lead=f"{record['population']} · a client: {record['unit']} · vocabulary of {size:,} words "
        f"from {source}",
        stamp=record["stamp"],
        privacy=f"{guarantee['statement']}, {WORLD}, everything on its ledger",
        privacy_notes=[
            *no_protection(guarantee["epsilon"]),
            "This is the composed guarantee of the word model, the character model and the count "
            "of one world, which is what a deployment would spend. This page shows several worlds "
            "of the same clients, which costs more:",
            f"all {len(worlds)} worlds, as shown here, everything on their ledgers: "
            f"{record['privacy']}",
            *(
                f"the {'count' if kind == RATE else f'model of {kind}'}: {text}"
                for kind, text in costliest["privacy"].items()
            ),
            *(f"{name}: {statement}" for name, statement in record["at_scale"].items()),
        ],
        facts=[
            (f"{plan[name]:g}", f"{name.replace('_', ' ')}, {kind} model")
            for name in ("rounds", "clients_per_round", "noise_multiplier")
            for kind, plan in record["plans"].items()
            if kind != RATE
        ],
        sections=[
            Section(
                "Where: words out of vocabulary (OOV) by their position in generated sentences",
                f"{drawn['sentences']:,} sentences drawn from each word model, against the "
                f"vocabulary of {source}. The bug joins the first two words of a share of the "
                "sentences. The rate of the clients is of their own sentences, as a private count "
                "with the standard deviation of its noise.",
                [("oov_by_position", "OOV rate by position", picture)],
                Table(columns, rows, (1, 2, 3, 4)),
            ),
            Section(
                f"Which: the {drawn['top']} most probable words of the character models",
                f"The character models are trained only on words out of the vocabulary of {source}."
                " The probability is that of the whole word and its end. The bug makes words that "
                "contain a space (marked ␣).",
                table=_top(worlds),
            ),
        ],
        runs=[f"{kind}_{name}" for name in record["worlds"] for kind in record["plans"]],
    )


def _bug(world: Mapping[str, Any]) -> str:
    return f"bug in {100 * world['probability']:g} %"


def _by_position(worlds: Sequence[Mapping[str, Any]], mark: str) -> Any:
    axes = plots.axes("Out-of-vocabulary rate by position", stamp=mark)
    for index, world in enumerate(worlds):
        # There is no rate where no sentence has a word.
        rates = 100 * np.array(world["oov_by_position"], float)
        label = f"{_bug(world)} of sentences; {percent(world['oov_generated'])} overall"
        plots.curve(axes, list(enumerate(rates, 1)), index, label=label)
    # Rates of 1 % and of 90 % must both be visible.
    plots.logarithmic(axes)
    return plots.labelled(axes, "position in the sentence", "% of words", legend=True)


def _shown(word: Mapping[str, Any]) -> tuple[str, str]:
    return word["word"].replace(" ", " ␣ "), percent(math.exp(word["log_probability"]))


def _top(worlds: Sequence[Mapping[str, Any]]) -> Table:
    columns = [text for world in worlds for text in (_bug(world), "probability by the model")]
    words = [map(_shown, world["top_words"]) for world in worlds]
    # A model may generate fewer words than another one.
    ranked = enumerate(itertools.zip_longest(*words, fillvalue=("", "")), 1)
    rows = [(str(rank), *itertools.chain(*row)) for rank, row in ranked]
    return Table(("rank", *columns), rows, (0, *range(2, len(columns) + 1, 2)))
