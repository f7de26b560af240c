"""The page of federated training: its rounds, its models compared, and how FreD chose a corpus.

Runs from the corpora that FreD did not choose reveal more about the clients than the run's
statement says. Therefore they have a page of their own, which is marked as a simulation.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records.artifacts import RECORD
from jaxpfl.experiments.records.cautions import number, of_table
from jaxpfl.experiments.report.page import REPORT, Cell, Page, Section, Table, compared_models
from jaxpfl.experiments.report.plots import bars
from jaxpfl.experiments.report.run_page import RunFiles, run_page
from jaxpfl.experiments.systems import ARTIFACTS, SIMULATION
from jaxpfl.experiments.systems.federated_training.stages import SCORES

Scores = Mapping[str, float]

_NOT_PRIVATE, _MARK = "NOT PRIVATE", "SIMULATION"


def page(directory: Path, record: Mapping[str, Any]) -> Page:
    """`report.html`, and `simulation.html` if the directory contains simulations of the run."""
    found = RunFiles.read(directory)
    tested_on = record.get("tested_on") or "clients that were declared public"
    fred = record.get("fred")
    scores, simulated = directory / ARTIFACTS / SCORES / RECORD, directory / SIMULATION
    if fred is None and scores.exists():
        # The run is not finished: there are distances, but no models yet.
        stored = files.read_record(scores, {"scores": list})
        fred = {**stored, **ranking(stored["scores"], {"before": {}})}
    about: list[tuple[Any, ...]] = []
    compared: list[Section] = []
    if record.get("table"):
        about.append(("scored at the end", f"on {tested_on}"))
        compared.append(compared_models(record["table"], tested_on, found.language))
    if simulated.exists():
        note = "Further runs on the same clients, which the privacy stated above does not cover."
        link = Cell("a page of their own", link="simulation.html", note=note)
        about.append(("simulations", link))
    if fred is not None:
        stamp = "" if fred["private"] else _NOT_PRIVATE
        compared += _ranked(fred, tested_on, found, stamp)
    warned = of_table(record.get("table") or (), found.metric, tested_on)
    made = run_page(found, about=about, compared=compared, cautions=warned)
    if not simulated.exists():
        return made
    return dataclasses.replace(made, further=[_simulation(found, files.read_record(simulated))])


def _ranked(fred: Mapping[str, Any], tested_on: str, found: RunFiles, stamp: str) -> list[Section]:
    """How FreD chose the public corpus: a table, an explanation and pictures."""
    metric, candidates = found.metric, fred["candidates"]
    titles = {"before": "after prefinetuning, before the rounds", "after": "after the rounds"}
    stages = [each for each in titles if any(row.get(each) for row in candidates)]
    columns = ["rank", "candidate", "FreD", "without the noise's bias", "interval"]
    columns += [f"{metric} {titles[stage]}" for stage in stages]
    rows = [
        (
            row["rank"],
            row["candidate"],
            f"{row['distance']:.5g}",
            f"{row['corrected']:.5g}",
            f"{row['low']:.4g} to {row['high']:.4g}",
            *(number(row[stage][metric]) if row[stage] else "" for stage in stages),
            "this run" if row["rank"] == 1 else "",
        )
        for row in candidates
    ]
    measured = "FreD: from each candidate to what the private clients hold, as released with noise."
    if stages:
        measured += f" {metric.capitalize()}: on {tested_on}."
    tied = [
        f"{near['candidate']} and {far['candidate']}"
        for near, far in itertools.pairwise(candidates)
        if near["tied"]
    ]
    title = "The public corpus, chosen by Frechet distance (FreD)"
    said, figures = [_correlations(fred, metric)], []
    if tied:
        said.append(f"The noise does not tell which is nearer: {'; '.join(tied)}.")
    if "statement" in fred:
        figures.append(("fred", title, bars(candidates, stamp)))
        said.append(
            f"FreD alone: {fred['statement']}. It is part of the privacy stated above. Scoring "
            "candidates and prefinetuning read public text only."
        )
    table = Table((*columns, ""), rows, (0, *range(2, len(columns))), 0)
    return [
        Section(title, measured, table=table, stamps=[stamp] if stamp else []),
        Section("", " ".join(filter(None, said)), figures),
    ]


def _simulation(found: RunFiles, record: Mapping[str, Any]) -> Page:
    stamp = _NOT_PRIVATE if found.run["stamp"] else ""
    tested_on = record["tested_on"] or "clients declared public"
    sections, runs = [], []
    for row in record["table"]:
        folder = row["folder"]
        stamps = [*([_MARK] if folder else []), *([] if row["private"] else [_NOT_PRIVATE])]
        cell = Cell(row["model"], link=f"{folder}/{REPORT}" if folder else "", stamps=stamps)
        runs.append((cell, row["privacy"]))
    if record["tested_on"]:
        sections.append(compared_models(record["table"], tested_on, found.language))
    sections.append(Section("The runs", table=Table(("run", "what this run alone costs"), runs)))
    if "fred" in record:
        sections += _ranked(record["fred"], tested_on, found, stamp or _MARK)
    return Page(
        title=f"Simulations of {found.run['label']}",
        lead=found.run["population"],
        stamp=stamp,
        privacy="",
        privacy_notes=[
            "This page shows further runs on the same clients, for comparison. Each has its own "
            "ledger, as if no other run had taken place. In fact, whoever sees this page learns "
            "what all of these runs reveal about the clients together. Do not publish any of it."
        ],
        facts=[],
        sections=sections,
        simulation=True,
        warning="Nothing on this page is covered by the statement of report.html.",
        name="simulation.html",
    )


def ranking(
    scores: Sequence[Mapping[str, Any]], stages: Mapping[str, Mapping[str, Scores]]
) -> dict[str, Any]:
    """The candidates by FreD, with their models' metrics on declared-public test clients.

    Args:
      scores: the `Score.row` of each candidate, nearest first.
      stages: "before" and "after" the private rounds, or one of them: the metrics of each
        candidate's model. Those after the rounds are a simulation, but for the chosen one's.

    Returns:
      "candidates": the rank, the score's entries, and the metrics or None for each stage.
      "spearman": for each stage, the rank correlation of the corrected FreD with the loss; None
        with fewer than three models, or if one of the two is constant.
    """
    rows = []
    for rank, score in enumerate(scores, start=1):
        metrics = {stage: models.get(score["candidate"]) for stage, models in stages.items()}
        rows.append({"rank": rank, **score, **metrics})
    return {"candidates": rows, "spearman": {stage: _spearman(rows, stage) for stage in stages}}


def _spearman(rows: Sequence[Mapping[str, Any]], stage: str) -> float | None:
    from scipy.stats import spearmanr

    pairs = [(row["corrected"], row[stage]["loss"]) for row in rows if row[stage] is not None]
    columns = list(zip(*(pair for pair in pairs if all(map(math.isfinite, pair))), strict=True))
    # A constant has no ranks to correlate.
    if not columns or len(columns[0]) < 3 or any(len(set(column)) < 2 for column in columns):
        return None
    return float(spearmanr(*columns)[0])  # pyright: ignore[reportArgumentType]


def _correlations(fred: Mapping[str, Any], metric: str) -> str:
    """Whether FreD's order is that of the models, in a sentence; "" where nothing is known."""
    found = [
        f"{value:.2f} {stage} the private rounds"
        for stage, value in fred["spearman"].items()
        if value is not None
    ]
    how_many = f"{len(fred['candidates'])} candidates; 1 = the same order"
    start = f"Spearman's rank correlation of FreD with {metric}: "
    return f"{start}{', '.join(found)} ({how_many})." if found else ""
