"""The page of one run, from its `run.json`, `metrics.jsonl` and `result.json`.

It shows only what the run's statement covers. Simulations of the run have a page of their own.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jaxpfl import files
from jaxpfl.errors import BudgetExhausted, InputError, Interrupted
from jaxpfl.experiments.engine.cost import OWN, SHARED
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import OURS, in_words, of_rounds, of_table
from jaxpfl.experiments.records.lines import flat, read_lines
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, compared_models, write_page
from jaxpfl.privacy import participation

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
    """The public files of a run: `run.json`, `metrics.jsonl`, and `result.json` or an empty one."""

    directory: Path
    start: Mapping[str, Any] = field(repr=False)
    records: Sequence[Mapping[str, Any]] = field(repr=False)
    result: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the files; raises `InputError` if the directory holds no run."""
        start, result = directory / "run.json", directory / "result.json"
        if not start.exists():
            absent = f"there is no run.json{files.where(directory)}"
            raise InputError(f"{directory}: holds no run: {absent}")
        record = files.read_record(result) if result.exists() else {}
        rounds = read_lines(directory / "metrics.jsonl")
        return cls(directory, files.read_record(start, _RUN), rounds, record)

    @property
    def evaluated_on(self) -> str:
        """The data on which the metrics of the rounds were evaluated."""
        return self.start.get("evaluation") or "data that was declared public"

    @property
    def lead(self) -> str:
        """What the clients are, under the title of a page."""
        population = self.start["population"]
        short = in_words(population)
        if short == population:
            return population
        number = self.start["plan"]["population"] if self.start["plan"]["unit"] == "client" else 0
        kind = "documented functions and classes"
        return short.replace("docstrings", f"{number:,} {kind}" if number else kind)

    @property
    def mark(self) -> str:
        """The warning across every picture of the run; "" for a private run."""
        if self.start["stamp"]:
            return mark_of(self.start["stamp"])
        return "SIMULATION" if self.start.get("note") else ""

    @property
    def privacy(self) -> str:
        """The statement of the run, also while it is not finished."""
        return self.result.get("privacy", f"{self.start['statement']}; the run is not finished")

    @property
    def language(self) -> bool:
        """Whether the model's metric is perplexity."""
        reads_text = "sequence_length" in self.start["config"].get("model", {})
        writes_text = any("sentences" in record for record in self.records)
        return self.result.get("language") or reads_text or writes_text

    @property
    def metric(self) -> str:
        return "perplexity" if self.language else "loss"

    @property
    def kinds(self) -> list[tuple[str, str, str, str, bool]]:
        """The kinds of plots of evaluated metrics, those of a user's own model included."""
        kinds = list(_EVALUATED if self.language else _EVALUATED[1:])
        ours = {path for *_, path, _ in _EVALUATED} | {"evaluation/count"}
        for name in {name: None for r in self.records for name in r.get("evaluation") or ()}:
            if (path := f"evaluation/{name}") not in ours:
                kinds.append((re.sub(r"\W+", "_", name), name, "mean per example", path, False))
        return kinds

    def curve(self, path: str) -> list[tuple[int, float]]:
        """The values at this path of the rounds' records that have it, with their rounds."""
        records = [(record["round"], flat(record)) for record in self.records]
        return [(round, values[path]) for round, values in records if path in values]


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
    return write_page(directory, run_page(RunFiles.read(directory)))


def run_page(
    run: RunFiles, *, about: Sequence[tuple[Any, ...]] = (), more: Sequence[Section] = ()
) -> Page:
    """The page of one run, with further rows `about` its figures, and `more` sections."""
    start, records, result = run.start, run.records, run.result
    evaluated_on = in_words(run.evaluated_on)
    best, vocabulary = result.get("kept"), run.directory / "vocabulary.json"
    scored = figures_of(run.kinds, {OURS: run}, evaluated_on)
    figures = scored + figures_of(RELEASED, {OURS: run})
    rows: list[tuple[Any, ...]] = []
    sections, cautions = [], []
    if scored:
        rows.append(("scored during the rounds", f"on {evaluated_on}"))
    if best is not None:
        rows.append(("the model", f"that of round {best}, which was kept (ringed below)"))
    if result.get("stopped"):
        rows.append(("ended early", "by what was known after each round"))
    if vocabulary.exists():
        from jaxpfl.text.tokenisers.vocabulary import Vocabulary

        source = Vocabulary.load(vocabulary).source
        rows.append(("vocabulary", f"the words of {in_words(source)} (declared public)"))
    if table := result.get("table"):
        tested_on = in_words(result["tested_on"])
        rows.append(("scored at the end", f"on {tested_on}"))
        sections.append(compared_models(table, tested_on, run.language))
        cautions += of_table(table, run.metric, tested_on)
    if rows or about:
        table = Table((), [*rows, *about], style="about")
        sections.insert(0, Section("What the figures are about", table=table))
    sections += more
    if figures:
        sections.append(Section("Round by round", figures=figures))
    sentences = []
    for record in [record for record in records if "sentences" in record]:
        kept = " (kept)" * (record["round"] == best)
        sentences.append((f"{record['round']}{kept}", Cell(paragraphs=record["sentences"])))
    if sentences:
        table = Table(("after round", "drawn from the model"), sentences, style="sentences")
        stamps = [run.mark] if run.mark else []
        sections.append(Section("Generated sentences", table=table, stamps=stamps))
    cautions += of_rounds(records[: None if best is None else best + 1], evaluated_on)
    return Page(
        title=start["label"],
        lead=run.lead,
        stamp=start["stamp"],
        privacy=run.privacy,
        privacy_notes=[] if start["stamp"] else [f"A client here: {start['unit']}. {_COVERED}"],
        facts=_facts(run),
        sections=sections,
        cautions=cautions,
        warning=start.get("note") or "",
        details=_details(start, {**start["captured"], **result.get("captured", {})}),
    )


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    start, records, plan = run.start, run.records, run.start["plan"]
    done = max((record["round"] for record in records), default=0)
    population, own = plan["population"], {n: plan.get(n) for n in ("separation", "at_most")}
    sampled = participation.of(plan["sampling"], population, plan["clients_per_round"], **own)
    clients = f"{round(sampled.denominator):,} of {population:,}"
    facts = [(f"{done} / {plan['rounds']}", "rounds")]
    facts.append((clients, f"{plan['unit']}s per round (planned)"))
    spent = [record["epsilon"] for record in records if record.get("epsilon") is not None]
    if spent and not start["stamp"]:
        facts.append((f"{spent[-1]:.3g}", f"epsilon of {OWN}"))
        everything = run.result.get("epsilons", {}).get(SHARED)
        if everything is not None and everything > spent[-1]:
            facts.append((f"{everything:.4g}", f"epsilon of {SHARED}"))
    for query in start["queries"]:
        plan = query["plan"]
        which = f" of the {query['label']}" if len(start["queries"]) > 1 else ""
        if not start["stamp"]:
            facts.append((f"{plan['noise_multiplier']:.3g}", f"noise multiplier{which}"))
        adaptive = " (start)" if plan["adaptive_clip"] else ""
        facts.append((f"{plan['clip_norm']:.3g}", f"clip norm{which}{adaptive}"))
    return facts


def _details(start: Mapping[str, Any], captured: Mapping[str, Any]) -> list[tuple[str, str]]:
    queries = start["queries"]
    details = [(f"plan of the {q['label']}", json.dumps(q["plan"], indent=2)) for q in queries]
    for label, lines in captured.items():
        what = f"what the client function of the {label} captures, and the lines where numbers"
        what = f"{what} enter its program, public by declaration"
        details += [(what, "\n".join(lines))] if lines else []
    details.append(("the clients' source", start["population"]))
    head = "run {run}, seed {seed}, {devices} device(s), {backend}".format_map(start)
    versions = [f"{name} {number}" for name, number in start["versions"].items()]
    return [*details, ("versions", "\n".join([head, *versions]))]


def figures_of(
    kinds: Sequence[tuple[str, str, str, str, bool]], runs: Mapping[str, RunFiles], data: str = ""
) -> list[Figure]:
    """Pictures of values, which were measured on `data`, with a curve for each run by its name."""
    figures = []
    for name, title, axis, path, logarithmic in kinds:
        curves = {label: points for label, run in runs.items() if (points := run.curve(path))}
        values = [value for points in curves.values() for _, value in points]
        # A fixed clip norm is one of the facts, and no curve.
        if not values or (name == "clip_norm" and len(set(values)) == 1):
            continue
        # Of more curves than colours, those that end lowest and highest have colours and names.
        ends = sorted(curves, key=lambda label: curves[label][-1][1])
        named = list(curves) if len(ends) <= len(plots.COLOURS) else [*ends[:3], *ends[-3:]]
        others = [label for label in curves if label not in named]
        axes = plots.axes(title, data and f"on {data}", height=4.6 if others else 3.1)
        for label in others + named:
            points, style = curves[label], {"label": label}
            if not runs[label].start["private"]:
                style = {"label": f"{label} (NOT PRIVATE)", "linestyle": "--"}
                style |= {"color": plots.RED} if len(runs) == 1 else {}
            if label in others:
                style |= {"color": plots.GREY, "linewidth": 0.7, "marker": ""}
            plots.curve(axes, points, named.index(label) if label in named else 0, **style)
            for point in points:
                if data and point[0] == runs[label].result.get("kept"):
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
        legend = len(runs) > 1 or not all(run.start["private"] for run in runs.values())
        plots.labelled(axes, "round", axis, legend=legend and not others)
        if others:
            drawn = [line for line in axes.lines if line.get_label() != "_kept"][len(others) - 1 :]
            texts = [f"{len(others)} more", *(line.get_label() for line in drawn[1:])]
            axes.figure.legend(drawn, texts, frameon=False, fontsize=8.5, loc="outside lower left")
        # The legend says which curves have marks, where these differ.
        if len(marks := {run.mark for run in runs.values()}) == 1:
            plots.watermark(axes, *marks)
        figures.append((name, f"{title} on {data}" if data else title, axes.figure))
    return figures
