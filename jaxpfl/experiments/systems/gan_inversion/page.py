"""The page of the study of inverted pixels: image grids side by side, and their scores."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.experiments.engine.setting import mark_of
from jaxpfl.experiments.records.cautions import number, percent
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection
from jaxpfl.experiments.systems import ARTIFACTS
from jaxpfl.experiments.systems.gan_inversion.run import IMAGES
from jaxpfl.experiments.systems.gan_inversion.study import COUNTED

_PUBLIC = {"public": "public images", "public_inverted": "the same, inverted"}
_PHASES = {"bug": "with the bug", "fixed": "after the fix"}
_SIDES = {
    "client": {"low": "low-accuracy clients", "high": "high-accuracy clients"},
    "example": {"low": "misclassified images", "high": "rightly classified images"},
    "slice": {"low": "the slice of least accuracy", "high": "the slice of greatest accuracy"},
    "random": {"random": "random images"},
}
_BEFORE = {"before": "before the bug", "bug": _PHASES["bug"]}


def page(directory: Path, record: dict[str, Any]) -> Page:
    selection, runs, stamp = record["selection"], record["runs"], record["stamp"]
    sides = dict(_SIDES[selection["by"]])
    if selection["by"] == "slice":
        name = selection["column"]
        sides = {side: f"{name} {record['limits'][side]}, {sides[side]}" for side in sides}
    gans = {}
    for name in runs:
        phase, side = name.split("_")
        gans[name] = f"{sides[side]}, {_PHASES[phase]}"
    images = files.read_npz(directory / ARTIFACTS / IMAGES / "arrays.npz")
    grids = []
    for name, title in (gans | _PUBLIC).items():
        mark = mark_of(stamp) if name in gans else ""
        grids.append((name, title, plots.grid(title, images[name][:64], side=8, stamp=mark)))
    judged = {gans[name]: run for name, run in runs.items()}
    judged["none: public images"] = record["classifier"]
    forms = {"inverted_share": percent, "classifier_score": number, "frechet": number}
    forms["labelled_accuracy"] = percent
    rows = [
        (name, *(form(run[key]) for key, form in forms.items())) for name, run in judged.items()
    ]
    columns = ("the GAN trained on", "classified as inverted", "classifier score")
    columns += ("Frechet distance of logits", "accuracy by labelled images")
    accuracy, plan = record["classifier"]["accuracy"], next(iter(runs.values()))["plan"]
    struck = "of clients have the bug"
    if (value := record["bug"]["value"]) is not None:
        struck += f", where {selection['column']} is {value}"
    sections = []
    if record["accuracy"]:
        by = _slices if selection["by"] == "slice" else _histograms
        sections = [by(record)]
    return Page(
        title="What is wrong with the images? Federated GANs",
        lead=f"{record['population']} · a client: {record['unit']}",
        stamp=stamp,
        privacy=f"{record['privacy']}, everything on its ledger",
        privacy_notes=[
            *no_protection(record["metrics"]["epsilon"]),
            "This is the composed guarantee of all releases on this page, which are from the same "
            "clients: every release of accuracies, and all GANs.",
            *(f"the GAN of {gans[name]}: {run['privacy']}" for name, run in runs.items()),
            *(f"{name}: {statement}" for name, statement in record["at_scale"].items()),
        ],
        facts=[
            (f"{plan['rounds']}", "rounds for each GAN"),
            (f"{record['selected_per_round']}", "matching clients in a round (expected)"),
            (f"{plan['noise_multiplier']:.3g}", "noise multiplier"),
            (f"{plan['clip_norm']:g}", "clip norm"),
            (f"{100 * accuracy:.1f} %", f"accuracy of the classifier on {record['judged_by']}"),
            (f"{100 * record['bug']['probability']:g} %", struck),
        ],
        sections=[
            Section(
                "Images drawn by the GANs",
                "Nobody has seen a client's image: each grid is drawn by a generator that was "
                "trained only against a critic, which was trained under differential privacy. The "
                "scores are those of models that were trained on the images of "
                f"{record['judged_by']}: the classifier, and a model that tells inverted images "
                "from normal ones. The Frechet distance is to its images, by the classifier's "
                "logits. The last column is the accuracy, on its images, of a classifier that was "
                "trained on the drawn ones, as the first classifier labels them.",
                grids,
                Table(columns, rows, (1, 2, 3, 4)),
            ),
            *sections,
        ],
        runs=list(runs),
    )


def _slices(record: dict[str, Any]) -> Section:
    """The accuracy of each slice, as released."""
    released, column = record["accuracy"], record["selection"]["column"]

    def cell(name: str, value: str) -> str:
        rate = released[name]["slices"][value]
        if rate["accuracy"] is None:
            return "hidden by noise"
        return f"{percent(rate['accuracy'])} ± {percent(rate['noise'])}"

    rows = [(v, *(cell(n, v) for n in COUNTED)) for v in record["selection"]["values"]]
    columns = column, *(f"accuracy {_BEFORE[name]}" for name in COUNTED)
    text = f"Of the classifier, on the images of {record['population']}, with the standard "
    text += "deviation of the noise."
    return Section("Accuracy by slice, as private counts", text, table=Table(columns, rows, (1, 2)))


def _histograms(record: dict[str, Any]) -> Section:
    """Both released histograms, as densities: the area is the number of users."""
    title = "Accuracy of users, as released with noise"
    axes = plots.axes(title, stamp=mark_of(record["stamp"]))
    for index, (name, label) in enumerate(_BEFORE.items()):
        released = record["accuracy"][name]
        percents = 100 * np.asarray(released["plan"]["edges"])
        density = np.asarray(released["histogram"]) / np.diff(percents)
        axes.stairs(density, percents, label=label, color=plots.COLOURS[index], linewidth=2)
    for style, (side, value) in zip(("-.", ":"), (record["limits"] or {}).items(), strict=False):
        label = f"{side}: {100 * value:.1f} %"
        axes.axvline(100 * value, color=plots.GREY, linestyle=style, label=label)
    picture = plots.labelled(axes, "accuracy of a user, %", "users per 1 %", legend=True)
    return Section("Who is selected", figures=[("accuracy", "of users", picture)])
