"""`simulation.html`: further runs on the same clients, which the run's statement does not cover.

    non_private/            the same run without privacy
    other_candidates/NAME/  the same run from a corpus that FreD did not choose
    simulation.json         the scores of their models, and of the run's own

Each of them has its own ledger and reveals more about the clients than the run's statement says.
Therefore `report.html` shows nothing of them, and this page is marked as a simulation.
"""

from collections.abc import Mapping
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.records import cautions
from jaxpfl.experiments.records.numbers import number, percent
from jaxpfl.experiments.report.models_compared import share_of
from jaxpfl.experiments.report.page import REPORT, Cell, Page, Section, Table
from jaxpfl.experiments.report.ranking_plots import ranking_figures
from jaxpfl.experiments.report.run_page import RunFiles, evaluation_figures
from jaxpfl.experiments.systems import SIMULATION
from jaxpfl.experiments.systems.federated_training.ranking import correlations, score_text

WITHOUT_PRIVACY = "non_private"
"""Folder, in the run directory, of the same run without privacy."""

_MARK = "SIMULATION"

OTHER_CANDIDATES = "other_candidates"
"""Folder, in the run directory, of the runs from the candidates that FreD did not choose."""

PAGE = "simulation.html"
"""The page of the simulations, in the run directory."""

CANDIDATE_NOTE = (
    "SIMULATION: the run from candidate {!r}, which FreD did not choose, is not covered by the "
    "privacy cost of the pipeline; do not publish it together with the pipeline's output"
)

NOTE = (
    "SIMULATION: trained on the same clients, each run with its own ledger and not covered by the "
    "privacy stated for this run; do not publish any of it"
)


def called(folder: str) -> str:
    """The name, in tables and pictures, of the run in a folder of the run directory."""
    if not folder:
        return cautions.OURS
    if folder == WITHOUT_PRIVACY:
        return cautions.WITHOUT_PRIVACY
    return f"the same run from {folder.removeprefix(f'{OTHER_CANDIDATES}/')}"


def page(found: RunFiles) -> Page | None:
    """The page of the simulations of the run `found`; None where there are none."""
    directory, run = found.directory, found.run
    paths = [*sorted((directory / OTHER_CANDIDATES).glob("*")), directory / WITHOUT_PRIVACY]
    folders = {
        path.relative_to(directory).as_posix(): RunFiles.read(path)
        for path in paths
        if (path / "run.json").exists()
    }
    if not folders:
        return None
    stamped = any(each.run["stamp"] for each in (found, *folders.values()))
    path = directory / SIMULATION
    record = files.read_record(path) if path.exists() else {}
    tested_on = record.get("tested_on") or "clients declared public"
    sections = []
    if record.get("table"):
        sections.append(_compared(record["table"], tested_on, found))
    if "fred" in record:
        sections += _predicted(record["fred"], tested_on, found)
    curves = {called(folder): each for folder, each in {"": found, **folders}.items()}
    figures = evaluation_figures(found, curves, "NOT PRIVATE" if stamped else _MARK)
    if figures:
        title = f"Round by round, on {found.evaluated_on}"
        sections.append(Section(title, figures=figures, stamps=[_MARK]))
    runs = [
        (_linked(folder, called(folder), not each.run["stamp"]),)
        for folder, each in folders.items()
    ]
    sections.append(Section("The runs", table=Table((), runs)))
    unbounded = ", which is unbounded for a run without privacy" if stamped else ""
    return Page(
        title=f"Simulations of {run['label']}",
        lead=run["population"],
        stamp="NOT PRIVATE" if stamped else "",
        privacy="",
        privacy_notes=[
            "This page shows further runs on the same clients, for comparison. Each has its own "
            "ledger, as if no other run had taken place. In fact, whoever sees this page learns "
            f"what all of these runs reveal about the clients together{unbounded}. Do not publish "
            "any of it."
        ],
        facts=[],
        sections=sections,
        simulation=True,
        warning="Nothing on this page is covered by the statement of report.html.",
        pictures="simulation_plots",
        name=PAGE,
    )


def _linked(folder: str, name: str, private: bool) -> Cell:
    stamps = [_MARK] if folder else []
    link = f"{folder}/{REPORT}" if folder else ""
    return Cell(name, link=link, stamps=stamps if private else [*stamps, "NOT PRIVATE"])


def _compared(table: list[dict[str, Any]], tested_on: str, found: RunFiles) -> Section:
    share, title = share_of(table[0], found.language)
    rows = []
    for row in table:
        rows.append(
            (
                _linked(row["folder"], row["model"], row["private"]),
                number(row[found.metric]) if found.metric in row else "",
                percent(row.get(share)),
                row["privacy"],
            )
        )
    columns = (
        "model",
        found.metric,
        title,
        "what this run alone costs",
    )
    return Section(f"Compared on {tested_on}", table=Table(columns, rows, (1, 2), 0))


def _predicted(fred: Mapping[str, Any], tested_on: str, found: RunFiles) -> list[Section]:
    """Whether FreD's order predicts that of the models: a table, the correlation and pictures."""
    metric, stages = found.metric, ("before", "after")
    rows = [
        (
            row["rank"],
            row["candidate"],
            f"{row['distance']:.5g}",
            *(score_text(row[stage], metric) for stage in stages),
            "this run" if row["rank"] == 1 else Cell(stamps=[_MARK]),
        )
        for row in fred["candidates"]
    ]
    columns = ("rank", "candidate", "FreD", f"{metric} before the rounds", "after", "")
    stamp = "NOT PRIVATE" if found.run["stamp"] else _MARK
    # The run's own page shows the distances.
    figures = ranking_figures(fred, metric, tested_on, stamp)
    figures = [figure for figure in figures if figure[0] != "fred"]
    return [
        Section(
            f"Does FreD's order predict the {metric}?",
            f"{metric.capitalize()} on {tested_on}, of the models from every candidate.",
            table=Table(columns, rows, (0, 2, 3, 4), 0),
            stamps=[_MARK],
        ),
        # The run's own page shows the distances.
        Section(
            "", correlations(fred, metric), [figure for figure in figures if figure[0] != "fred"]
        ),
    ]
