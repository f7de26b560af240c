"""`report.html`: one self-contained page made of a run directory's public files alone."""

import base64
import io
import math
from collections.abc import Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from jaxpfl.errors import InputError
from jaxpfl.experiments import files
from jaxpfl.experiments.ranking import ranking
from jaxpfl.experiments.ranking_plots import ranking_figures
from jaxpfl.experiments.tracking import read_lines

_INK, _ACCENT, _RED, _GREY = "#1f2937", "#2563eb", "#c81e1e", "#9ca3af"

# (file name, title, axis, path in a metrics record, baselines' column, logarithmic)
_PLOTS = (
    ("perplexity", "Perplexity on held-out clients", "perplexity", "evaluation/perplexity", True),
    ("loss", "Loss on held-out clients", "nats per target", "evaluation/loss", False),
    ("accuracy", "Accuracy on held-out clients", "top-1 accuracy", "evaluation/accuracy", False),
    ("epsilon", "Privacy spent by this run", "epsilon", "epsilon", False),
    ("clip_norm", "Clip norm as released", "L2 norm", "clip_norm", False),
    ("update_norm", "Norm of the noisy mean update", "L2 norm", "update_norm", True),
)


def write_report(directory: str | Path) -> Path:
    """Writes `report.html` and `plots/*.png` into a run directory and returns the page's path.

    Raises:
      InputError: the directory holds no run.
    """
    directory = Path(directory)
    if not (directory / "run.json").exists():
        raise InputError(f"{directory}: holds no run: there is no run.json")
    run = files.read_json(directory / "run.json")
    records = read_lines(directory / "metrics.jsonl")
    result = _optional_json(directory / "result.json")
    other = read_lines(directory / "non_private" / "metrics.jsonl")
    fred = result.get("fred")
    scores = _optional_json(directory / "fred" / "scores.json")
    if fred is None and scores:
        # The run is not finished: there are distances, and no models yet.
        fred = {**scores, **ranking(scores["scores"], {}, {})}
    config = directory / "config.yaml"
    page = render(
        "report.html.jinja",
        run=run,
        result=result,
        done=max((record["round"] for record in records), default=0),
        privacy=result.get("privacy", f"{run['statement']}; the run is not finished"),
        spent=_last(records, "epsilon"),
        table=result.get("table", []),
        fred=fred,
        fred_plots=[] if fred is None else _fred_plots(directory / "plots", run, fred),
        plots=_plots(directory / "plots", run, records, other, result.get("table", [])),
        sentences=[
            (record["round"], record["sentences"]) for record in records if "sentences" in record
        ],
        config=config.read_text("utf-8") if config.exists() else None,
    )
    path = directory / "report.html"
    files.write_atomically(path, page)
    return path


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


def _plots(
    directory: Path,
    run: dict[str, Any],
    records: Sequence[dict[str, Any]],
    other: Sequence[dict[str, Any]],
    table: Sequence[dict[str, Any]],
) -> list[dict[str, str]]:
    """Draws every plot that has data, writes it as PNG and returns it as a data URI."""
    plots = []
    language = "tokens" if any("sentences" in record for record in records) else "image"
    for name, title, axis, path, logarithmic in _PLOTS:
        if name == "perplexity" and language == "image":
            continue
        lines = [("this run", not run["stamp"], *_series(records, path))]
        if path.startswith("evaluation/"):
            lines.append(("the same run without privacy", False, *_series(other, path)))
        lines = [line for line in lines if line[2]]
        if not lines:
            continue
        levels = [
            (row["model"], row[name])
            for row in table
            if row["model"] == "unigram" and isinstance(row.get(name), float)
        ]
        figure = _draw(title, axis, lines, levels, logarithmic, bool(run["stamp"]))
        plots.append(saved_figure(directory, name, title, figure))
    return plots


def _fred_plots(directory: Path, run: dict[str, Any], fred: dict[str, Any]) -> list[dict[str, str]]:
    metric = "perplexity" if _is_language(run) else "loss"
    return [
        saved_figure(directory, name, title, figure)
        for name, title, figure in ranking_figures(fred, metric)
    ]


def _is_language(run: dict[str, Any]) -> bool:
    return "vocab_size" in run["config"].get("model", {})


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
    axis: str,
    lines: Sequence[tuple[str, bool, list[int], list[float]]],
    levels: Sequence[tuple[str, float]],
    logarithmic: bool,
    stamped: bool,
) -> Any:
    # The object API: pyplot would keep every figure and choose a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.3), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    for label, private, rounds, values in lines:
        axes.plot(
            rounds,
            values,
            label=label if private else f"{label} (NOT PRIVATE)",
            color=_ACCENT if private else _RED,
            linestyle="-" if private else "--",
            linewidth=2,
            marker="o" if len(rounds) < 25 else None,
            markersize=3.5,
        )
    for label, value in levels:
        axes.axhline(value, color=_GREY, linewidth=1.2, linestyle=":", label=label)
    if logarithmic and all(value > 0 for _, _, _, values in lines for value in values):
        axes.set_yscale("log")
        # Numbers as people write them: these ranges span one or two powers of ten.
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:g}")
    else:
        axes.set_ylim(bottom=min(0.0, *axes.get_ylim()) if axis != "nats per target" else None)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel("round", color=_INK)
    axes.set_ylabel(axis, color=_INK)
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    if len(lines) + len(levels) > 1 or stamped:
        axes.legend(frameon=False, fontsize=8.5)
    if stamped:
        axes.text(
            0.5, 0.5, "NOT PRIVATE", transform=axes.transAxes, ha="center", va="center",
            rotation=18, fontsize=30, fontweight="bold", color=_RED, alpha=0.14,
        )  # fmt: skip
    return figure
