"""`simulation.html`: what became of a run in worlds that its statement does not cover.

    non_private/            the same run without privacy
    other_candidates/NAME/  the same run from a corpus that FreD did not choose
    simulation.json         their models, scored beside the run's own

Each was trained on the run's clients and on a ledger of its own: whoever sees them learns more than
the run's statement says. So `report.html` shows nothing of them, and this page says what it is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.experiments.engine.tracking import read_lines
from jaxpfl.experiments.report.run_page import (
    Curve,
    evaluated_on,
    evaluation_plots,
    language,
    render,
    saved_figure,
)
from jaxpfl.experiments.systems.federated_training.ranking_plots import ranking_figures

WITHOUT_PRIVACY = "non_private"
"""Folder, in the run directory, of the same run without privacy."""

OTHER_CANDIDATES = "other_candidates"
"""Folder, in the run directory, of the runs from the candidates that FreD did not choose."""

RECORD, PAGE = "simulation.json", "simulation.html"
"""What the simulations came to, and their page, in the run directory."""

CANDIDATE_NOTE = (
    "SIMULATION: the run from candidate {!r}, which FreD did not choose, is outside the privacy "
    "cost of the pipeline's own output; publish nothing of it beside that"
)

NOTE = (
    "SIMULATION: trained on the same clients, each run on a ledger of its own, outside the privacy "
    "stated for this run; publish none of it"
)


def called(folder: str) -> str:
    """What tables and pictures call the run in a folder of the run directory; "" is the run."""
    if not folder:
        return "this run"
    if folder == WITHOUT_PRIVACY:
        return "the same run without privacy"
    return f"the same run from {folder.removeprefix(f'{OTHER_CANDIDATES}/')}"


def write_simulation(
    directory: Path, run: Mapping[str, Any], records: Sequence[dict[str, Any]]
) -> Path | None:
    """Writes the page of the simulations in a run directory; None where there are none.

    Args:
      run: the run's `run.json`.
      records: its metrics by round, the one private curve among the others.
    """
    paths = [*sorted((directory / OTHER_CANDIDATES).glob("*")), directory / WITHOUT_PRIVACY]
    folders = [
        path.relative_to(directory).as_posix() for path in paths if (path / "run.json").exists()
    ]
    if not folders:
        return None
    begun = {folder: files.read_json(directory / folder / "run.json") for folder in folders}
    stamped = any(each["stamp"] for each in (run, *begun.values()))
    mark = "NOT PRIVATE" if stamped else "SIMULATION"
    curves = [Curve(called(""), run["private"], records)]
    curves += [
        Curve(called(folder), each["private"], read_lines(directory / folder / "metrics.jsonl"))
        for folder, each in begun.items()
    ]
    path = directory / RECORD
    found = files.read_json(path) if path.exists() else {}
    words = language(run, records)
    of, plots = evaluated_on(run), directory / "simulation_plots"
    fred, tested_on = found.get("fred"), found.get("tested_on") or "clients declared public"
    figures = []
    if fred is not None:
        stamp = "NOT PRIVATE" if run["stamp"] else "SIMULATION"
        figures = ranking_figures(fred, "perplexity" if words else "loss", tested_on, stamp)
    page = render(
        "simulation.html.jinja",
        run=run,
        mark=mark,
        stamped=stamped,
        note=NOTE,
        begun=[(called(folder), folder, each) for folder, each in begun.items()],
        table=found.get("table", []),
        tested_on=tested_on,
        language=words,
        fred=fred,
        fred_plots=[
            saved_figure(plots, name, title, figure)
            for name, title, figure in figures
            # The distances are the run's own, and on its own page.
            if name != "fred"
        ],
        plots=evaluation_plots(plots, curves, of, mark, words),
        evaluation=of,
    )
    files.write_atomically(directory / PAGE, page)
    return directory / PAGE
