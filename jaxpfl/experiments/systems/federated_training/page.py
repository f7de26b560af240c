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
from jaxpfl.experiments.records.cautions import in_words, number
from jaxpfl.experiments.report import chosen
from jaxpfl.experiments.report.page import Cell, Page, Section, Table, compared_models
from jaxpfl.experiments.report.plots import bars
from jaxpfl.experiments.report.run_page import RunFiles, run_page
from jaxpfl.experiments.systems import ARTIFACTS, SIMULATION

SCORES = "fred_scores"
"""The artifact of the distances of all candidates."""

Scores = Mapping[str, float]

_NOT_PRIVATE, _MARK = "NOT PRIVATE", "SIMULATION"
_STAGES = {"before": "after prefinetuning, before the rounds", "after": "after the rounds"}


def page(directory: Path, record: Mapping[str, Any]) -> Page:
    """`report.html`, and `simulation.html` if the directory contains simulations of the run."""
    run = dataclasses.replace(RunFiles.read(directory), result=record)
    fred, scores = record.get("fred"), directory / ARTIFACTS / SCORES / RECORD
    if fred is None and scores.exists():
        # The run is not finished: there are distances, but no models yet.
        stored = files.read_record(scores, {"scores": list})
        fred = {**stored, **ranking(stored["scores"], {"before": {}})}
    ranked, about, further = [], [], []
    if fred is not None:
        stamp = "" if fred["private"] else _NOT_PRIVATE
        ranked = _ranked(fred, record.get("tested_on") or "", run.metric, stamp)
        if fred["choice"] is not None:
            ranked.append(chosen.section(fred["choice"], stamp))
    simulated = directory / SIMULATION
    if simulated.exists():
        note = "Further runs on the same clients, which the privacy stated above does not cover."
        about = [("simulations", Cell("a page of their own", link="simulation.html", note=note))]
        further = [_simulation(run, files.read_record(simulated))]
    report = run_page(run, about=about, more=ranked)
    cautions = [*report.cautions, *(fred["cautions"] if fred else ())]
    return dataclasses.replace(report, further=further, cautions=cautions)


def _ranked(fred: Mapping[str, Any], tested_on: str, metric: str, stamp: str) -> list[Section]:
    """How FreD chose the public corpus: a table, an explanation and a picture."""
    candidates, figures = fred["candidates"], []
    stages = [stage for stage in _STAGES if any(row.get(stage) for row in candidates)]
    rows = []
    for row in candidates:
        distance, corrected = f"{row['distance']:.5g}", f"{row['corrected']:.5g}"
        interval = f"{row['low']:.4g} to {row['high']:.4g}"
        measures = (number(row[stage][metric]) if row[stage] else "" for stage in stages)
        ours = "this run" if row["rank"] == 1 and fred["choice"] is None else ""
        rows.append((row["rank"], row["candidate"], distance, corrected, interval, *measures, ours))
    columns = ("rank", "candidate", "FreD", "without the noise's bias", "interval")
    columns += (*(f"{metric} {_STAGES[stage]}" for stage in stages), "")
    measured = "FreD: from each candidate to what the private clients hold, as released with noise."
    if stages:
        measured += f" {metric.capitalize()}: on {in_words(tested_on)}."
    ranks = [(rank, stage) for stage, rank in fred["spearman"].items() if rank is not None]
    texts = []
    if ranks:
        by_stage = ", ".join(f"{rank:.2f} {stage} the private rounds" for rank, stage in ranks)
        of = f"({len(candidates)} candidates; 1 = the same order)"
        texts.append(f"Spearman's rank correlation of FreD with {metric}: {by_stage} {of}.")
    if tied := [pair for pair in itertools.pairwise(candidates) if pair[0]["tied"]]:
        pairs = "; ".join(f"{near['candidate']} and {far['candidate']}" for near, far in tied)
        texts.append(f"The noise does not tell which is nearer: {pairs}.")
    by = "The public corpus, chosen" if fred["choice"] is None else "Public corpora"
    title = f"{by} by Frechet distance (FreD)"
    if "statement" in fred:
        figures.append(("fred", title, bars(candidates, stamp)))
        apart = fred["plan"]["unit"] == "example"
        part = "On a ledger of its own, it is no part of" if apart else "It is part of"
        texts.append(
            f"FreD alone: {fred['statement']}. {part} the privacy stated above. Scoring "
            "candidates and prefinetuning read public text only. The texts of clients and of "
            f"candidates are cut by one rule: {fred['cut']}."
        )
    table = Table(columns, rows, (0, *range(2, len(columns) - 1)), 0)
    nearest = Section(title, measured, table=table, stamps=[stamp] if stamp else [])
    return [nearest, Section("", " ".join(texts), figures)]


def _simulation(run: RunFiles, record: Mapping[str, Any]) -> Page:
    stamp = _NOT_PRIVATE if run.start["stamp"] else ""
    tested_on = record["tested_on"] or ""
    sections, runs = [], []
    for row in record["table"]:
        link = row["folder"] and f"{row['folder']}/report.html"
        stamps = [*([_MARK] if link else []), *([] if row["private"] else [_NOT_PRIVATE])]
        runs.append((Cell(row["model"], link=link, stamps=stamps), row["privacy"]))
    if tested_on:
        sections.append(compared_models(record["table"], tested_on, run.language))
    sections.append(Section("The runs", table=Table(("run", "what this run alone costs"), runs)))
    if "fred" in record:
        sections += _ranked(record["fred"], tested_on, run.metric, stamp or _MARK)
    return Page(
        title=f"Simulations of {run.start['label']}",
        lead=run.lead,
        stamp=stamp,
        privacy_notes=[
            "This page shows further runs on the same clients, for comparison. Each has its own "
            "ledger, as if no other run had taken place. In fact, whoever sees this page learns "
            "what all of these runs reveal about the clients together. Do not publish any of it."
        ],
        sections=sections,
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
    from scipy.stats import spearmanr

    rows = []
    for rank, score in enumerate(scores, start=1):
        metrics = {stage: models.get(score["candidate"]) for stage, models in stages.items()}
        rows.append({"rank": rank, **score, **metrics})
    correlations = dict.fromkeys(stages)
    for stage in stages:
        pairs = [(row["corrected"], row[stage]["loss"]) for row in rows if row[stage] is not None]
        columns = list(zip(*(pair for pair in pairs if all(map(math.isfinite, pair))), strict=True))
        # A constant has no ranks to correlate.
        if columns and len(columns[0]) > 2 and all(len(set(column)) > 1 for column in columns):
            correlations[stage] = float(spearmanr(*columns)[0])  # pyright: ignore
    return {"candidates": rows, "spearman": correlations}
