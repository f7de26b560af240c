"""The page of the study of inverted pixels: image grids side by side, and their scores."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection
from jaxpfl.experiments.systems import ARTIFACTS
from jaxpfl.experiments.systems.gan_inversion.run import IMAGES
from jaxpfl.experiments.systems.gan_inversion.study import PHASES, SIDES

_PUBLIC = {"public": "public images", "public_inverted": "the same, inverted"}
_PHASES = {"bug": "with the bug", "fixed": "after the fix"}
_SIDES = {
    "client": {"low": "low-accuracy clients", "high": "high-accuracy clients"},
    "example": {"low": "misclassified images", "high": "rightly classified images"},
}


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Draws the pictures from the record and the public files of the study."""
    sides, runs, stamp = _SIDES[record["selection"]["by"]], record["runs"], record["stamp"]
    gans = {f"{p}_{s}": f"{sides[s]}, {_PHASES[p]}" for p in PHASES for s in SIDES}
    images = files.read_npz(directory / ARTIFACTS / IMAGES / "arrays.npz")
    grids = []
    for name, title in (gans | _PUBLIC).items():
        mark = mark_of(stamp) if name in gans else ""
        grids.append((name, title, plots.grid(title, images[name][:64], side=8, stamp=mark)))
    rows = [
        (gans[name], f"{100 * run['inverted_share']:.1f} %", f"{run['classifier_score']:.2f}")
        for name, run in runs.items()
    ]
    columns = ("the GAN trained on", "classified as inverted", "classifier score")
    accuracy, plan = record["classifier"]["accuracy"], runs["bug_low"]["plan"]
    return Page(
        title="What is wrong with the images? Two federated GANs",
        lead=f"{record['population']} · a client: {record['unit']}",
        stamp=stamp,
        privacy=f"{record['privacy']}, everything on its ledger",
        privacy_notes=[
            *no_protection(record["metrics"]["epsilon"]),
            "This is the composed guarantee of all releases on this page, which are from the same "
            "clients: both histograms of users' accuracy and all four GANs.",
            *(f"the GAN of {gans[name]}: {run['privacy']}" for name, run in runs.items()),
            *(f"{name}: {statement}" for name, statement in record["at_scale"].items()),
        ],
        facts=[
            (f"{plan['rounds']}", "rounds for each GAN"),
            (f"{record['selected_per_round']}", "matching clients in a round (expected)"),
            (f"{plan['noise_multiplier']:.3g}", "noise multiplier"),
            (f"{plan['clip_norm']:g}", "clip norm"),
            (f"{100 * accuracy:.1f} %", f"accuracy of the classifier on {record['judged_by']}"),
            (f"{100 * record['bug']['probability']:g} %", "of clients have the bug"),
        ],
        sections=[
            Section(
                "Images drawn by the GANs",
                "Nobody has seen a client's image: each grid is drawn by a generator that was "
                "trained only against a critic, which was trained under differential privacy. The "
                "scores are those of models that were trained on the images of "
                f"{record['judged_by']}: the classifier, and a model that tells inverted images "
                "from normal ones.",
                grids,
                Table(columns, rows, (1, 2)),
            ),
            Section("Who is selected", figures=[("accuracy", "of users", _histograms(record))]),
        ],
        runs=list(runs),
    )


def _histograms(record: dict[str, Any]) -> Any:
    """Both released histograms, as densities: the area is the number of users."""
    title = "Accuracy of users, as released with noise"
    axes = plots.axes(title, stamp=mark_of(record["stamp"]))
    for index, (name, label) in enumerate((("before", "before the bug"), ("bug", _PHASES["bug"]))):
        released = record["accuracy"][name]
        percents = 100 * np.asarray(released["plan"]["edges"])
        density = np.asarray(released["histogram"]) / np.diff(percents)
        axes.stairs(density, percents, label=label, color=plots.COLOURS[index], linewidth=2)
    for style, (side, value) in zip(
        ("-.", ":"), (record["thresholds"] or {}).items(), strict=False
    ):
        label = f"{side}: {100 * value:.1f} %"
        axes.axvline(100 * value, color=plots.GREY, linestyle=style, label=label)
    return plots.labelled(axes, "accuracy of a user, %", "users per 1 %", legend=True)
