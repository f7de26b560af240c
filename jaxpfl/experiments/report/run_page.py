"""The page of one run, from its `run.json`, `metrics.jsonl` and `result.json`.

It shows only what the run's statement covers. Simulations of the run have a page of their own.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jaxpfl import files
from jaxpfl.errors import BudgetExhausted, InputError
from jaxpfl.experiments.engine.cost import OWN, SHARED
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.engine.signals import Interrupted
from jaxpfl.experiments.records.cautions import OURS, of_rounds, of_table
from jaxpfl.experiments.records.lines import flat, read_lines
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, compared_models, write_page

# (file name, title, axis, path in a metrics record, logarithmic)
_EVALUATED = (
    ("perplexity", "Perplexity", "perplexity", "evaluation/perplexity", True),
    ("loss", "Loss", "loss", "evaluation/loss", False),
    ("accuracy", "Accuracy", "accuracy", "evaluation/accuracy", False),
    ("average_precision", "Macro average precision", "", "evaluation/average_precision", False),
)
RELEASED = (
    ("epsilon", "Privacy spent by this run", "epsilon", "epsilon", False),
    ("clip_norm", "Clip norm as released", "L2 norm", "clip_norm", False),
    ("update_norm", "Norm of the noisy mean update", "L2 norm", "update_norm", True),
)
_COVERED = (
    "Whatever else is known, this run's public files distinguish two neighbouring data sets only "
    "as far as these numbers allow. They hold for this run; the ledger composes all releases from "
    "the same clients."
)

_RUN = {"stamp": str, "config": dict, "seed": int, "private": bool, "statement": str, "label": str}
Figure = tuple[str, str, Any]


@dataclass(frozen=True)
class RunFiles:
    """The public files of a run: `run.json`, `metrics.jsonl`, `result.json` (empty if absent)."""

    directory: Path
    run: Mapping[str, Any] = field(repr=False)
    records: Sequence[Mapping[str, Any]] = field(repr=False)
    result: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the files; raises `InputError` if the directory holds no run."""
        if not (directory / "run.json").exists():
            raise InputError(f"{directory}: holds no run: there is no run.json")
        result = directory / "result.json"
        return cls(
            directory,
            files.read_record(directory / "run.json", _RUN),
            read_lines(directory / "metrics.jsonl"),
            files.read_record(result) if result.exists() else {},
        )

    @property
    def evaluated_on(self) -> str:
        """The data on which the metrics of the rounds were evaluated."""
        return self.run.get("evaluation") or "data that was declared public"

    @property
    def mark(self) -> str:
        """The warning across every picture of the run; "" for a private run."""
        if self.run["stamp"]:
            return mark_of(self.run["stamp"])
        return "SIMULATION" if self.run.get("note") else ""

    @property
    def privacy(self) -> str:
        """The statement of the run, also while it is not finished."""
        return self.result.get("privacy", f"{self.run['statement']}; the run is not finished")

    @cached_property
    def language(self) -> bool:
        """Whether the model's metric is perplexity."""
        known = "sequence_length" in self.run["config"].get("model", {})
        return known or any("sentences" in record for record in self.records)

    @property
    def metric(self) -> str:
        return "perplexity" if self.language else "loss"

    @property
    def kinds(self) -> list[tuple[str, str, str, str, bool]]:
        """The kinds of plots of what was evaluated, metrics of models of one's own included."""
        known = {path.removeprefix("evaluation/") for *_, path, _ in _EVALUATED} | {"count"}
        names = {name: None for record in self.records for name in record.get("evaluation") or ()}
        own = [
            (re.sub(r"\W+", "_", name), name, "mean per example", f"evaluation/{name}", False)
            for name in names
            if name not in known
        ]
        return [*(_EVALUATED if self.language else _EVALUATED[1:]), *own]

    def curve(self, path: str) -> list[tuple[int, float]]:
        """The values at this path of the rounds' records that have it, with their rounds."""
        seen = [(record["round"], flat(record)) for record in self.records]
        return [(round, values[path]) for round, values in seen if path in values]


@contextmanager
def page_of_run(directory: Path) -> Iterator[None]:
    """Writes the page of the run that is carried out in the context, even if it stops early."""
    try:
        yield
    except (BudgetExhausted, Interrupted):
        write_run_page(directory)
        raise
    write_run_page(directory)


def write_run_page(directory: Path) -> Path:
    """Writes `report.html` and `plots/*.png` to a run's directory and returns the page's path."""
    found = RunFiles.read(directory)
    table, tested_on = found.result.get("table"), found.result.get("tested_on") or ""
    if not table:
        return write_page(directory, run_page(found))
    language = any("perplexity" in row for row in table)
    warned = of_table(table, "perplexity" if language else "loss", tested_on)
    compared = [compared_models(table, tested_on, language)]
    return write_page(directory, run_page(found, compared=compared, cautions=warned))


def run_page(
    found: RunFiles,
    *,
    about: Sequence[tuple[Any, ...]] = (),
    compared: Sequence[Section] = (),
    cautions: Sequence[str] = (),
) -> Page:
    """Builds the page of one run.

    `about` has further rows for the table that describes the figures, and `compared` the sections
    before those of the rounds.
    """
    run, records = found.run, found.records
    stamps = [found.mark] if found.mark else []
    scored = figures_of(found.kinds, {OURS: found}, found.evaluated_on)
    figures = scored + figures_of(RELEASED, {OURS: found})
    rows: list[tuple[Any, ...]] = []
    if scored:
        rows.append(("scored during the rounds", f"on {found.evaluated_on}"))
    kept = found.result.get("kept")
    until = None if kept is None else kept + 1
    if kept is not None:
        rows.append(("the model", f"that of round {kept}, which was kept (ringed below)"))
    if found.result.get("stopped"):
        rows.append(("ended early", "by what was known after each round"))
    vocabulary = found.directory / "vocabulary.json"
    if vocabulary.exists():
        from jaxpfl.text.tokenisers.vocabulary import Vocabulary

        source = Vocabulary.load(vocabulary).source
        rows.append(("vocabulary", f"the words of {source} (declared public)"))
    sections = list(compared)
    if rows or about:
        table = Table((), [*rows, *about], style="about")
        sections.insert(0, Section("What the figures are about", table=table))
    if figures:
        sections.append(Section("Round by round", figures=figures))
    sentences = [
        (
            f"{record['round']}" + " (kept)" * (record["round"] == kept),
            Cell(paragraphs=record["sentences"]),
        )
        for record in records
        if "sentences" in record
    ]
    if sentences:
        table = Table(("after round", "drawn from the model"), sentences, style="sentences")
        sections.append(Section("Generated sentences", table=table, stamps=stamps))
    return Page(
        title=run["label"],
        lead=run["population"],
        stamp=run["stamp"],
        privacy=found.privacy,
        privacy_notes=[
            found.privacy if run["stamp"] else f"A client here: {run['unit']}. {_COVERED}"
        ],
        facts=_facts(found),
        sections=sections,
        cautions=[*cautions, *of_rounds(records[:until], found.evaluated_on)],
        simulation=bool(run.get("note")) and not run["stamp"],
        warning=run.get("note") or "",
        details=_details(
            {**run, "captured": {**run["captured"], **found.result.get("captured", {})}}
        ),
        pictures="plots",
    )


def _facts(found: RunFiles) -> list[tuple[str, str]]:
    run, records, plan = found.run, found.records, found.run["plan"]
    done = max((record["round"] for record in records), default=0)
    facts = [
        (f"{done} / {plan['rounds']}", "rounds"),
        (
            f"{plan['clients_per_round']:,} of {plan['population']:,}",
            f"{plan['unit']}s per round (planned)",
        ),
    ]
    spent = [record["epsilon"] for record in records if record.get("epsilon") is not None]
    whole = found.result.get("epsilons", {}).get(SHARED)
    if spent and not run["stamp"]:
        facts.append((f"{spent[-1]:.3g}", f"epsilon of {OWN}"))
        if whole is not None and whole > spent[-1]:
            facts.append((f"{whole:.4g}", f"epsilon of {SHARED}"))
    for query in run["queries"]:
        plan = query["plan"]
        which = f" of the {query['label']}" if len(run["queries"]) > 1 else ""
        if not run["stamp"]:
            facts.append((f"{plan['noise_multiplier']:.3g}", f"noise multiplier{which}"))
        start = " (start)" if plan["adaptive_clip"] else ""
        facts.append((f"{plan['clip_norm']:.3g}", f"clip norm{which}{start}"))
    return facts


def _details(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    versions = [f"{name} {number}" for name, number in run["versions"].items()]
    head = f"run {run['run']}, seed {run['seed']}, {run['devices']} device(s), {run['backend']}"
    plans = [
        (f"plan of the {query['label']}", json.dumps(query["plan"], indent=2))
        for query in run["queries"]
    ]
    held = [
        (
            f"what the client function of the {label} captures, and the lines where numbers enter "
            "its program, public by declaration",
            "\n".join(captured),
        )
        for label, captured in run["captured"].items()
        if captured
    ]
    return [*plans, *held, ("versions", "\n".join([head, *versions]))]


def figures_of(
    kinds: Sequence[tuple[str, str, str, str, bool]], runs: Mapping[str, RunFiles], of: str = ""
) -> list[Figure]:
    """Pictures of values, which were measured on `of`, with a curve for each run by its name."""
    figures = []
    for name, title, axis, path, logarithmic in kinds:
        curves = {label: points for label, run in runs.items() if (points := run.curve(path))}
        values = [value for points in curves.values() for _, value in points]
        # A fixed clip norm is one of the facts, and no curve.
        if not values or (name == "clip_norm" and len(set(values)) == 1):
            continue
        axes = plots.axes("" if of else title)
        if of:
            plots.subtitle(axes, title, f"on {of}")
        for place, (label, points) in enumerate(curves.items()):
            private, colour = runs[label].run["private"], plots.COLOURS[place % len(plots.COLOURS)]
            axes.plot(
                *zip(*points, strict=True),
                label=label if private else f"{label} (NOT PRIVATE)",
                color=colour if private or len(runs) > 1 else plots.RED,
                linestyle="-" if private else "--",
                linewidth=2,
                marker="o" if len(points) < 25 else None,
                markersize=3.5,
            )
            for point in points:
                if of and point[0] == runs[label].result.get("kept"):
                    axes.plot(*point, "o", color=plots.INK, fillstyle="none", ms=10, label="_kept")
                    above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
                    axes.annotate("kept", point, fontsize=8.5, color=plots.INK, **above)
        if logarithmic and all(value > 0 for value in values):
            plots.logarithmic(axes)
        elif axis != "loss":
            low, high = axes.get_ylim()
            # The margin above is of the whole axis, also where the values hardly differ.
            axes.set_ylim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
        axes.locator_params(axis="x", integer=True)
        plots.labelled(axes, "round", axis)
        if len(runs) > 1 or not all(run.run["private"] for run in runs.values()):
            axes.legend(frameon=False, fontsize=8.5)
        # Of curves with different marks, the legend says which.
        if len(marks := {run.mark for run in runs.values()}) == 1:
            plots.watermark(axes, *marks)
        figures.append((name, f"{title} on {of}" if of else title, axes.figure))
    return figures
