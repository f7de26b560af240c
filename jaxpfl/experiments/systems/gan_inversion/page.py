"""The page of the study of inverted pixels: image grids side by side, and their scores."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxpfl import files
from jaxpfl.experiments.records.lines import read_lines
from jaxpfl.experiments.report import plots
from jaxpfl.experiments.report.page import Page, Section, Table, no_protection
from jaxpfl.experiments.systems import ARTIFACTS
from jaxpfl.experiments.systems.gan_inversion.run import IMAGES
from jaxpfl.experiments.systems.gan_inversion.study import PHASES, SIDES
from jaxpfl.experiments.systems.workspace import scaled_lines

_PHASES = {"bug": "with the bug", "fixed": "after the fix"}
_SIDES = {
    "client": {"low": "low-accuracy clients", "high": "high-accuracy clients"},
    "example": {"low": "misclassified images", "high": "rightly classified images"},
}


_EVERYTHING = "everything on its ledger"


def _gans(record: dict[str, Any]) -> dict[str, str]:
    """Descriptions of the GANs, by their names in the record."""
    sides = _SIDES[record["selection"]["by"]]
    return {f"{p}_{s}": f"{sides[s]}, {_PHASES[p]}" for p in PHASES for s in SIDES}


def lines(record: dict[str, Any]) -> list[str]:
    """Returns the result for a terminal."""
    found = [
        f"{_judged(record)}:",
        f"{'images drawn by the GAN of':52}  inverted  classifier score",
    ]
    for name, described in _gans(record).items():
        run = record["runs"][name]
        share, score = f"{100 * run['inverted_share']:.1f} %", f"{run['classifier_score']:.2f}"
        found.append(f"{described:52}{share:>10}{score:>18}")
    return [*found, "", *_privacy(record)]


def _judged(record: dict[str, Any]) -> str:
    return f"drawn images, as judged by models that were trained on {record['judged_by']}"


def _privacy(record: dict[str, Any]) -> list[str]:
    if record["composed_guarantee"]["epsilon"] is None:
        return [record["stamp"]]
    costliest = max(record["runs"], key=lambda name: record["runs"][name]["epsilon"])
    scale = record["at_scale"]
    return [
        f"{_EVERYTHING}: {record['composed_guarantee']['statement']}",
        f"the GAN with the largest epsilon: {record['runs'][costliest]['privacy']}",
        *scaled_lines({"that GAN": costliest}, "everything", scale),
    ]


def page(directory: Path, record: dict[str, Any]) -> Page:
    """Draws the pictures from the record and the public files of the study."""
    stamped = bool(record["stamp"])
    stored = directory / ARTIFACTS / IMAGES / "arrays.npz"
    images = files.read_npz(stored)
    drawn = [(described, images[name]) for name, described in _gans(record).items()]
    public = [
        [("public images", images["public"]), ("the same, inverted", images["public_inverted"])]
    ]
    grids = plots.grids([drawn[:2], drawn[2:]], side=8, stamped=stamped)
    return Page(
        title="What is wrong with the images? Two federated GANs",
        lead=f"{record['population']} · a client: {record['unit']}",
        stamp=record["stamp"],
        privacy=f"{record['composed_guarantee']['statement']}, {_EVERYTHING}",
        privacy_notes=[
            *no_protection(record["composed_guarantee"]["epsilon"]),
            "This is the composed guarantee of all releases on this page, which are from the same "
            "clients: both histograms of users' accuracy and all four GANs.",
            *_privacy(record)[1:],
        ],
        facts=_facts(record),
        sections=[
            Section(
                "Drawn by the GANs",
                "Nobody has seen a client's image: each grid is drawn by a generator that was "
                "trained only against a critic, which was trained under differential privacy. The "
                f"scores are those of {_judged(record)}.",
                [("gans", "images drawn by the GANs", grids)],
                _scores(record),
                wide=True,
            ),
            Section(
                "The polarity of the drawn images by round, and the accuracy of users",
                figures=[
                    ("inverted", "share of inverted images", _curves(directory, record)),
                    ("accuracy", "accuracy of users", _histograms(record)),
                ],
            ),
            Section(
                "What the scoring models were trained on",
                "Images of clients that were declared public. They train the primary classifier "
                "and the model that tells inverted images from normal ones.",
                [("public", "public images", plots.grids(public, side=8))],
                wide=True,
            ),
        ],
        runs=list(record["runs"]),
    )


def _facts(record: dict[str, Any]) -> list[tuple[str, str]]:
    plan, accuracy = record["runs"]["bug_low"]["plan"], 100 * record["classifier"]["accuracy"]
    return [
        (f"{plan['rounds']}", "rounds for each GAN"),
        (f"{record['selected_per_round']}", "matching clients in a round (expected)"),
        (f"{plan['noise_multiplier']:.3g}", "noise multiplier"),
        (f"{plan['clip_norm']:g}", "clip norm"),
        (f"{accuracy:.1f} %", f"accuracy of the classifier on {record['judged_by']}"),
        (f"{100 * record['bug']['probability']:g} %", "of clients have the bug"),
    ]


def _scores(record: dict[str, Any]) -> Table:
    columns = {
        "classified as inverted": lambda run: f"{100 * run['inverted_share']:.1f} %",
        "classifier score": lambda run: f"{run['classifier_score']:.2f}",
        "Frechet distance of logits to public images": lambda run: f"{run['frechet_normal']:.1f}",
        "to the same, inverted": lambda run: f"{run['frechet_inverted']:.1f}",
    }
    rows = [
        (described, *(text(record["runs"][name]) for text in columns.values()))
        for name, described in _gans(record).items()
    ]
    return Table(("the GAN trained on", *columns), rows, numbers=(1, 2, 3, 4))


def _curves(directory: Path, record: dict[str, Any]) -> Any:
    title, stamped = "Share of drawn images classified as inverted", bool(record["stamp"])
    axes = plots.axes(title, stamped=stamped)
    for number, (name, described) in enumerate(_gans(record).items()):
        records = read_lines(directory / "runs" / name / "metrics.jsonl")
        seen = [each for each in records if "evaluation" in each]
        axes.plot(
            [each["round"] for each in seen],
            [100 * each["evaluation"]["inverted_share"] for each in seen],
            "--" if number % 2 else "-",
            color=plots.COLOURS[number // 2],
            linewidth=2,
            label=described,
        )
    axes.set_ylim(-3, 103)
    axes.figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=2)
    return plots.labelled(axes, "round", "%")


def _histograms(record: dict[str, Any]) -> Any:
    """Both released histograms, as densities: the area is the number of users."""
    stamped = bool(record["stamp"])
    axes = plots.axes("Accuracy of users, as released with noise", stamped=stamped)
    names = {"before": "before the bug", "bug": _PHASES["bug"]}
    for number, (name, label) in enumerate(names.items()):
        released = record["accuracy"][name]
        edges = np.asarray(released["plan"]["edges"])
        density = np.asarray(released["histogram"]) / (100 * np.diff(edges))
        axes.stairs(density, 100 * edges, label=label, color=plots.COLOURS[number], linewidth=2)
    thresholds = record["thresholds"]
    if thresholds:
        for side, style in zip(SIDES, ("-.", ":"), strict=True):
            axes.axvline(
                100 * thresholds[side], color=plots.GREY, linestyle=style,
                label=f"{side}: {100 * thresholds[side]:.1f} %",
            )  # fmt: skip
    axes.legend(frameon=False, fontsize=8.5)
    return plots.labelled(axes, "accuracy of a user, %", "users per 1 %")
