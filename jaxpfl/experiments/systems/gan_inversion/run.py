"""Carries out the study of inverted pixels: histograms, GANs, images."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.federated_metrics import ReleasedMetrics, federated_metrics, with_correct
from jaxpfl.data.corruptions import invert_pixels, inverted
from jaxpfl.data.population import Population
from jaxpfl.data.selection import classified_examples, examples_of_users
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.gan_inversion.config import SelectionConfig
from jaxpfl.experiments.systems.gan_inversion.evaluator import ImageEvaluator, image_evaluator
from jaxpfl.experiments.systems.gan_inversion.study import (
    GANS,
    HISTOGRAMS,
    LEAST_SHARE,
    SIDES,
    Study,
)
from jaxpfl.experiments.systems.workspace import Workspace, ledger_path, params_digest, restate
from jaxpfl.federated.clients.evaluation import correct_examples
from jaxpfl.models.cnn import CNN
from jaxpfl.models.gan import sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root

IMAGES = "images"
"""The artifact of what the finished GANs draw, and of public images beside it."""

_PAGE_IMAGES = 64

Thresholds = dict[str, float] | None


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    config, public = study.config, study.public
    evaluator = image_evaluator(config, public, workspace.artifacts())
    ledger = ledger_path(config.privacy, workspace.directory)
    accuracy = partial(_accuracy, study, workspace, evaluator)
    released = {"before": accuracy("before")}
    # Refuses unusable thresholds before the next release is charged.
    thresholds = thresholds_of(released["before"], config.selection)
    released["bug"] = accuracy("bug")
    results, records, plans = {}, {}, []
    for name in GANS:
        phase, side = name.split("_")
        # The histograms that it depends on; the last one gives the matching share.
        used = HISTOGRAMS if phase == "bug" else HISTOGRAMS[:1]
        share = matching_share(released[used[-1]], side, thresholds)
        prior = () if thresholds is None else tuple(released[each]["run"] for each in used)
        clients = _clients(study, phase)
        results[name] = workspace.train(
            study.gan(share)._replace(name=f"GAN {phase}, {side} accuracy"),
            selected_examples(clients, side, evaluator.classifier, config.selection, thresholds),
            name=name,
            privacy=config.privacy,
            start=evaluator.digest,
            prior=prior,
        )
        plans.append(study.gan_plan(share))
        records[name] = {
            "share": share,
            "epsilon": results[name].metrics["epsilon"],
            "plan": plans[-1].to_dict(),
            "prior": prior,
        }
    scores = _draw_images(study, workspace, evaluator, results)
    for name in HISTOGRAMS:
        restate(workspace.directory / "runs" / f"{name}_accuracy", ledger)
    for name, result in results.items():
        said = restate(result.out, ledger, records[name].pop("prior"))
        records[name] |= {**scores[name], "privacy": said}
    composed = workspace.composed_guarantee([ledger], config.privacy.delta)
    return {
        "private": not workspace.stamp,
        "privacy": composed["statement"],
        "metrics": {
            "epsilon": composed["epsilon"],
            "inverted_share": {name: each["inverted_share"] for name, each in records.items()},
            "classifier_score": {name: each["classifier_score"] for name, each in records.items()},
        },
        "population": study.clients.name,
        "unit": study.clients.unit,
        "selection": dataclasses.asdict(config.selection),
        "bug": dataclasses.asdict(config.bug),
        "classifier": {"accuracy": evaluator.accuracy},
        "judged_by": f"{public.name} (declared public)",
        "accuracy": released,
        "thresholds": thresholds,
        "runs": records,
        "selected_per_round": config.training.clients_per_round,
        "at_scale": {name: each.statement() for name, each in study.at_scale(plans).items()},
    }


def _clients(study: Study, phase: str) -> Population:
    """The clients with the bug, or before it and after its fix."""
    if phase != "bug":
        return study.clients
    return invert_pixels(study.clients, study.config.bug.probability, study.config.run.seed)


def _accuracy(
    study: Study, workspace: Workspace, evaluator: ImageEvaluator, name: str
) -> dict[str, Any]:
    plan, clients = study.accuracy_plan, _clients(study, name)
    result = workspace.train(
        federated_metrics(plan)._replace(name=f"accuracy of users, {name}"),
        clients,
        name=f"{name}_accuracy",
        privacy=study.config.privacy,
        start=evaluator.digest,
        ask=lambda: with_correct(clients, correct_examples(*evaluator.classifier, clients)),
    )
    metrics = ReleasedMetrics.of(plan, result.state)
    sides = {side: metrics.percentile(getattr(study.config.selection, side)) for side in SIDES}
    record = {"run": result.run, "stamp": workspace.stamp, **metrics.to_dict()}
    return files.jsonable({**record, "accuracy": metrics.accuracy(), **sides})


def _draw_images(
    study: Study, workspace: Workspace, evaluator: ImageEvaluator, runs: dict[str, Result]
) -> dict[str, dict[str, float]]:
    """Draws images from the finished GANs and scores them; this costs no privacy."""
    config, number = study.config, max(study.config.images, _PAGE_IMAGES)
    key = jax.random.fold_in(training_root(config.run.seed), SAMPLE_IMAGES)
    # Examples of normal images, and of inverted ones as the evaluator was trained on them.
    public = np.asarray(study.public.columns["image"][:_PAGE_IMAGES])

    def drawn() -> Artifact:
        scores, pictures = {}, {"public": public, "public_inverted": inverted(public)}
        for name, result in runs.items():
            images = sample_images(config.gan.model, result.params, key, number)
            scores[name], pictures[name] = evaluator.score(images), images[:_PAGE_IMAGES]
        return Artifact(scores, {name: _as_bytes(each) for name, each in pictures.items()})

    made_from = {name: params_digest(result.params) for name, result in runs.items()}
    return dict(workspace.artifacts().load_or_compute(IMAGES, drawn, made_from).record)


def thresholds_of(before: dict[str, Any], settings: SelectionConfig) -> Thresholds:
    """The two thresholds from the histogram before the bug; None if examples are selected."""
    if settings.by == "example":
        return None
    found = {side: before[side] for side in SIDES}
    if None in found.values():
        raise InputError(
            "the private histogram of users' accuracy gives no thresholds, because noise hides all "
            f"users: selection.epsilon = {settings.epsilon} is too small for so few clients"
        )
    return found


def selected_examples(
    population: Population,
    side: str,
    classifier: tuple[CNN, Any],
    settings: SelectionConfig,
    thresholds: Thresholds,
) -> Population:
    """The clients with only the images that a GAN is trained on, as their devices would choose."""
    correct, low = correct_examples(*classifier, population), side == "low"
    if thresholds is None:
        outcome = "incorrect" if low else "correct"
        chosen = classified_examples(population, correct, outcome, settings.at_least)
    else:
        bound = "below" if low else "above"
        chosen = examples_of_users(population, correct, bound, thresholds[side])
    selected = population.keeping(chosen)
    return selected.with_columns({"image": selected.columns["image"]})


def matching_share(released: dict[str, Any], side: str, thresholds: Thresholds) -> float:
    """The share of matching clients, computed from a private histogram and therefore public.

    It is at least 0.05, so that noise cannot make every round sample all clients. If examples are
    selected, nearly all clients match, and the share is 1.
    """
    if thresholds is None:
        return 1.0
    cumulative = np.cumsum([0.0, *np.maximum(released["histogram"], 0.0)])
    if not cumulative[-1] > 0:
        return LEAST_SHARE
    below = np.interp(thresholds[side], released["plan"]["edges"], cumulative) / cumulative[-1]
    return float(np.clip(below if side == "low" else 1.0 - below, LEAST_SHARE, 1.0))


def _as_bytes(images: np.ndarray) -> np.ndarray:
    return images if images.dtype == np.uint8 else np.round(255 * images).astype(np.uint8)
