"""The page of the study of joined words: where words are out of vocabulary, and which ones."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection

_BOTH = "both models of a world, everything on its ledger"


def lines(record: dict[str, Any]) -> list[str]:
    """Returns the result for a terminal."""
    found = [
        f"{_measured(record)}:",
        f"{'bug':>8}{'OOV at position 1':>20}{'OOV overall':>14}{'top words with a space':>25}",
    ]
    for world in record["worlds"].values():
        top = world["top_words"]
        found.append(
            f"{_share(world):>8}{_percent(world['oov_by_position'][0]):>20}"
            f"{_percent(world['oov_overall']):>14}{f'{_spaces(top)} of {len(top)}':>25}"
        )
    return [*found, "", *_privacy(record)]


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
    found = [
        f"{_BOTH}: {world['composed_guarantee']['statement']}",
        f"all {len(record['worlds'])} worlds, as shown here, everything on their ledgers: "
        f"{record['all_worlds']['statement']}",
        f"the word model: {world['privacy']['words']}",
        f"the character model: {world['privacy']['characters']}",
    ]
    scale = record["at_scale"]
    if scale:
        found += [
            f"the model of {name} in a deployment of {scale['population']:,} clients, "
            f"{run['clients_per_round']:,} a round, with the same noise of the mean: "
            f"{run['statement']}"
            for name, run in scale["runs"].items()
        ]
        found.append(f"both models in that deployment: {scale['composed_guarantee']['statement']}")
    return found


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
    plans = record["plans"]
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
            (str(plan[name]), f"{what}, {kind} model")
            for kind, plan in plans.items()
            for name, what in (("rounds", "rounds"), ("clients_per_round", "clients a round"))
        ]
        + [
            (f"{plan['noise_multiplier']:.3g}", f"noise multiplier, {kind} model")
            for kind, plan in plans.items()
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
    worlds = list(record["worlds"].values())
    columns = ["rank"]
    for world in worlds:
        columns += [f"bug in {_share(world)}", "probability by the model"]
    rows = []
    for rank in range(record["drawn"]["top"]):
        row = [str(rank + 1)]
        for world in worlds:
            top = world["top_words"]
            if rank < len(top):
                word, log_p = top[rank]["word"], top[rank]["log_probability"]
                row += [word.replace(" ", " ␣ "), f"{100 * math.exp(log_p):.2f} %"]
            else:
                row += ["", ""]
        rows.append(tuple(row))
    counts = [""]
    for world in worlds:
        counts += [f"{_spaces(world['top_words'])} with a space", ""]
    numbers = (0, *range(2, len(columns), 2))
    return Table(tuple(columns), [*rows, tuple(counts)], numbers)
