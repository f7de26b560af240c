"""`report.html`: one self-contained page made of a run directory's public files alone.

It holds what the run's statement covers. Simulations of it have a page of their own.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jaxpfl import files
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.tracking import read_lines
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.systems.federated_training.ranking import ranking
from jaxpfl.experiments.systems.federated_training.ranking_plots import ranking_figures
from jaxpfl.text.tokenisers.vocabulary import Vocabulary

# (file name, title, axis, path in a metrics record, logarithmic)
_EVALUATED = (
    ("perplexity", "Perplexity", "perplexity", "evaluation/perplexity", True),
    ("loss", "Loss", "nats per target", "evaluation/loss", False),
    ("accuracy", "Accuracy", "top-1 accuracy", "evaluation/accuracy", False),
)
_RELEASED = (
    ("epsilon", "Privacy spent by this run", "epsilon", "epsilon", False),
    ("clip_norm", "Clip norm as released", "L2 norm", "clip_norm", False),
    ("update_norm", "Norm of the noisy mean update", "L2 norm", "update_norm", True),
)


@dataclass(frozen=True)
class Curve:
    """A run's rounds, to be drawn.

    Attributes:
      label: of its line.
      private: whether the run says that it is.
      records: its metrics by round.
    """

    label: str
    private: bool
    records: Sequence[dict[str, Any]]


def write_report(directory: str | Path) -> Path:
    """Writes `report.html` and `plots/*.png` into a run directory and returns the page's path.

    Where the directory holds simulations of the run, `simulation.html` is written too.

    Raises:
      InputError: the directory holds no run.
    """
    from jaxpfl.experiments.systems.federated_training.simulation import write_simulation

    directory = Path(directory)
    if not (directory / "run.json").exists():
        raise InputError(f"{directory}: holds no run: there is no run.json")
    run = files.read_json(directory / "run.json")
    records = read_lines(directory / "metrics.jsonl")
    result = _optional_json(directory / "result.json")
    fred = result.get("fred")
    scores = _optional_json(directory / "fred" / "scores.json")
    if fred is None and scores:
        # The run is not finished: there are distances, and no models yet.
        fred = {**scores, **ranking(scores["scores"], {"before": {}})}
    config, vocabulary = directory / "config.yaml", directory / "vocabulary.json"
    of = evaluated_on(run)
    # A simulation's own page is marked as one, as a run without privacy is.
    mark = mark_of(run)
    curves = [Curve("this run", run["private"], records)]
    drawn = evaluation_plots(directory / "plots", curves, of, mark, language(run, records))
    page = render(
        "report.html.jinja",
        run=run,
        mark=mark,
        done=max((record["round"] for record in records), default=0),
        privacy=result.get("privacy", f"{run['statement']}; the run is not finished"),
        spent=_last(records, "epsilon"),
        evaluation=of if drawn else None,
        vocabulary=Vocabulary.load(vocabulary).source if vocabulary.exists() else None,
        table=result.get("table", []),
        tested_on=result.get("tested_on") or "clients that were declared public",
        language=language(run, records),
        fred=fred,
        fred_plots=[] if fred is None else _fred_plots(directory / "plots", run, fred, result),
        plots=drawn + _plots(directory / "plots", _RELEASED, curves, "", mark),
        sentences=[
            (record["round"], record["sentences"]) for record in records if "sentences" in record
        ],
        simulated=write_simulation(directory, run, records) is not None,
        config=config.read_text("utf-8") if config.exists() else None,
    )
    path = directory / "report.html"
    files.write_atomically(path, page)
    return path


def evaluated_on(run: Mapping[str, Any]) -> str:
    """What the metrics of a run's rounds were evaluated on, as its `run.json` says."""
    return run.get("evaluation") or "data that was declared public"


def mark_of(run: Mapping[str, Any]) -> str:
    """What stands across everything made of a run, as its `run.json` says; "" for most."""
    if run["stamp"]:
        return "NOT PRIVATE"
    return "SIMULATION" if run.get("note") else ""


def language(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model's metric is perplexity."""
    known = "vocab_size" in run["config"].get("model", {})
    return known or any("sentences" in record for record in records)


def render(template: str, **values: Any) -> str:
    """Fills one of our templates; all of them share a style."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = package_files("jaxpfl.experiments")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    style = Markup(folder.joinpath("report.css").read_text("utf-8"))
    text = folder.joinpath(template).read_text("utf-8")
    return environment.from_string(text).render(style=style, **values)


def _optional_json(path: Path) -> dict[str, Any]:
    return files.read_json(path) if path.exists() else {}


def _last(records: Sequence[dict[str, Any]], name: str) -> Any:
    return next((r[name] for r in reversed(records) if r.get(name) is not None), None)


def _series(records: Sequence[dict[str, Any]], path: str) -> tuple[list[int], list[float]]:
    rounds, values = [], []
    for record in records:
        value: Any = record
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            rounds.append(record["round"])
            values.append(float(value))
    return rounds, values


def evaluation_plots(
    directory: Path, curves: Sequence[Curve], of: str, mark: str, language: bool
) -> list[dict[str, str]]:
    """The metrics of the rounds; `of` says in words what they were evaluated on."""
    kinds = _EVALUATED if language else _EVALUATED[1:]
    return _plots(directory, kinds, curves, of, mark)


def _plots(
    directory: Path,
    kinds: Sequence[tuple[str, str, str, str, bool]],
    curves: Sequence[Curve],
    of: str,
    mark: str,
) -> list[dict[str, str]]:
    """Draws every plot that has data, writes it as PNG and returns it as a data URI."""
    found = []
    for name, title, axis, path, logarithmic in kinds:
        lines = [(each.label, each.private, *_series(each.records, path)) for each in curves]
        lines = [line for line in lines if line[2]]
        if lines:
            figure = _draw(title, of and f"on {of}", axis, lines, logarithmic, mark)
            full = f"{title} on {of}" if of else title
            found.append(saved_figure(directory, name, full, figure))
    return found


def _fred_plots(
    directory: Path, run: dict[str, Any], fred: dict[str, Any], result: dict[str, Any]
) -> list[dict[str, str]]:
    metric = "perplexity" if language(run, []) else "loss"
    stamp = "" if fred["private"] else "NOT PRIVATE"
    of = result.get("tested_on") or ""
    return [
        saved_figure(directory, name, title, figure)
        for name, title, figure in ranking_figures(fred, metric, of, stamp)
    ]


def saved_figure(directory: Path, name: str, title: str, figure: Any) -> dict[str, str]:
    """Writes a figure as `name`.png; returns it as a data URI with its name and title."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    directory.mkdir(exist_ok=True)
    files.write_atomically(directory / f"{name}.png", buffer.getvalue())
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"name": name, "title": title, "uri": uri}


def _draw(
    title: str,
    below: str,
    axis: str,
    lines: Sequence[tuple[str, bool, list[int], list[float]]],
    logarithmic: bool,
    mark: str,
) -> Any:
    axes = plots.axes("" if below else title)
    if below:
        plots.subtitle(axes, title, below)
    others = iter(plots.COLOURS[1:] * len(lines))
    for place, (label, private, rounds, values) in enumerate(lines):
        colour = plots.ACCENT if place == 0 else next(others)
        axes.plot(
            rounds,
            values,
            label=label if private else f"{label} (NOT PRIVATE)",
            color=colour if private else plots.RED,
            linestyle="-" if private else "--",
            linewidth=2,
            marker="o" if len(rounds) < 25 else None,
            markersize=3.5,
        )
    if logarithmic and all(value > 0 for _, _, _, values in lines for value in values):
        axes.set_yscale("log")
        # Numbers as people write them: these ranges span one or two powers of ten.
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:g}")
    else:
        axes.set_ylim(bottom=min(0.0, *axes.get_ylim()) if axis != "nats per target" else None)
    axes.set_xlabel("round", color=plots.INK)
    axes.set_ylabel(axis, color=plots.INK)
    if len(lines) > 1 or not lines[0][1]:
        axes.legend(frameon=False, fontsize=8.5)
    if mark:
        plots.watermark(axes, mark)
    return axes.figure
