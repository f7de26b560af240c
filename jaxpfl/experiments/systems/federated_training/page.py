"""The page of federated training: its rounds, its models compared, and how FreD chose a corpus."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records.artifacts import RECORD
from jaxpfl.experiments.records.cautions import of_table
from jaxpfl.experiments.report.models_compared import compared_lines, compared_models
from jaxpfl.experiments.report.page import Cell, Page, Section, Table
from jaxpfl.experiments.report.ranking_plots import ranking_figures
from jaxpfl.experiments.report.run_page import RunFiles, run_page
from jaxpfl.experiments.systems import ARTIFACTS
from jaxpfl.experiments.systems.federated_training import simulation, stages
from jaxpfl.experiments.systems.federated_training.ranking import (
    correlations,
    ranking,
    score_text,
)

_NOT_PRIVATE = "NOT PRIVATE"


def page(directory: Path, record: Mapping[str, Any]) -> Page:
    """`report.html`, and `simulation.html` if the directory contains simulations of the run."""
    found = RunFiles.read(directory)
    tested_on = record.get("tested_on") or "clients that were declared public"
    fred = record.get("fred")
    scores = directory / ARTIFACTS / stages.SCORES / RECORD
    if fred is None and scores.exists():
        # The run is not finished: there are distances, but no models yet.
        stored = files.read_record(scores, {"scores": list})
        fred = {**stored, **ranking(stored["scores"], {"before": {}})}
    simulated = simulation.page(found)
    about: list[tuple[Any, ...]] = []
    compared: list[Section] = []
    if record.get("table"):
        about.append(("scored at the end", f"on {tested_on}"))
        compared.append(compared_models(record["table"], tested_on, found.language))
    if simulated is not None:
        note = "Further runs on the same clients, which the privacy stated above does not cover."
        about.append(("simulations", Cell("a page of their own", link=simulated.name, note=note)))
    if fred is not None:
        compared += _ranked(fred, tested_on, found)
    warned = of_table(record.get("table") or (), found.metric, tested_on)
    made = run_page(found, about=about, compared=compared, cautions=warned)
    return made if simulated is None else dataclasses.replace(made, further=[simulated])


def _ranked(fred: Mapping[str, Any], tested_on: str, found: RunFiles) -> list[Section]:
    """How FreD chose the public corpus: a table, an explanation and pictures."""
    metric, candidates = found.metric, fred["candidates"]
    scored = [row for row in candidates if row.get("before")]
    columns = ["rank", "candidate", "FreD", "without the noise's bias", "interval"]
    if scored:
        columns.append(f"{metric} after prefinetuning, before the rounds")
    rows = []
    for row in candidates:
        cells = [row["rank"], row["candidate"]]
        cells += [f"{row['distance']:.5g}", f"{row['corrected']:.5g}"]
        cells.append(f"{row['low']:.4g} to {row['high']:.4g}")
        if scored:
            cells.append(score_text(row.get("before"), metric))
        rows.append((*cells, "this run" if row["rank"] == 1 else ""))
    numbers = (0, *range(2, len(columns)))
    measured = "FreD: from each candidate to what the private clients hold, as released with noise."
    if scored:
        measured += f" {metric.capitalize()}: on {tested_on}, of models that read public text only."
    said = [correlations(fred, metric)]
    tied = [
        f"{near['candidate']} and {far['candidate']}"
        for near, far in itertools.pairwise(candidates)
        if near["tied"]
    ]
    if tied:
        said.append(f"The noise does not tell which is nearer: {'; '.join(tied)}.")
    said.append(
        f"FreD alone: {fred['statement']}. It is part of the privacy stated above. Scoring "
        "candidates and prefinetuning read public text only."
    )
    stamps, text = [] if fred["private"] else [_NOT_PRIVATE], " ".join(filter(None, said))
    return [
        Section(
            "The public corpus, chosen by Frechet distance (FreD)",
            measured,
            table=Table((*columns, ""), rows, numbers, 0),
            stamps=stamps,
        ),
        Section("", text, ranking_figures(fred, metric, tested_on, "".join(stamps))),
    ]


def lines(record: Mapping[str, Any]) -> list[str]:
    """The outcome for a terminal: models compared, candidates, the statement, simulations."""
    language, found = record["language"], []
    if record["table"]:
        found += [*compared_lines(record["table"], record["tested_on"], language), ""]
    if record.get("fred"):
        found += [*_candidate_lines(record["fred"], ("before",)), ""]
    metric = "perplexity" if language else "loss"
    warned = of_table(record["table"], metric, record["tested_on"] or "")
    found += [*(f"caution: {each}" for each in warned), *([""] if warned else [])]
    found.append(f"privacy of this run: {record['privacy']}")
    simulated = record.get("simulation")
    if simulated:
        # It follows the statement, which does not cover it, and its own note.
        found += ["", simulated["note"], str(Path(record["out"]) / simulation.PAGE), ""]
        if simulated["tested_on"]:
            found += compared_lines(simulated["table"], simulated["tested_on"], language)
        if "fred" in simulated:
            found += ["", *_candidate_lines(simulated["fred"], ("before", "after"))]
    return found


def _candidate_lines(fred: Mapping[str, Any], stages: Sequence[str]) -> list[str]:
    """The candidates by FreD, and the perplexity of their models if there are any."""
    stamp = "" if fred.get("private", True) else " (NOT PRIVATE)"
    titles = {"before": "perplexity before", "after": "after the rounds"}
    heading = f"{f'public corpus, by FreD{stamp}':38}{'FreD':>12}{'corrected':>12}"
    lines = [heading + "".join(f"{titles[stage]:>20}" for stage in stages)]
    for row in fred["candidates"]:
        name = f"{row['rank']}. {row['candidate']}"
        line = f"{name:38}{row['distance']:>12.5g}{row['corrected']:>12.5g}"
        for stage in stages:
            line += f"{score_text(row[stage], 'perplexity'):>20}"
        lines.append(line.rstrip())
    return [*lines, *filter(None, [correlations(fred, "perplexity")])]
