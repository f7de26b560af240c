"""Carries out the study of inverted pixels: accuracies, GANs, images."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.federated_metrics import COLUMN, Rates, ReleasedMetrics, with_correct
from jaxpfl.data.corruptions import invert_pixels, inverted
from jaxpfl.data.population import Population
from jaxpfl.data.selection import (
    classified_examples,
    examples_of_slice,
    examples_of_users,
    random_examples,
)
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.gan_inversion.config import (
    SCORES,
    GanInversionConfig,
    SelectionConfig,
)
from jaxpfl.experiments.systems.gan_inversion.evaluator import ImageEvaluator, image_evaluator
from jaxpfl.experiments.systems.gan_inversion.study import LEAST_SHARE, SIDES, Study
from jaxpfl.experiments.systems.workspace import Workspace, ledger_path, params_digest, restate
from jaxpfl.federated.clients.evaluation import correct_examples
from jaxpfl.models.classifiers import CNN
from jaxpfl.models.gan import sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root

IMAGES = "images"
"""The artifact of what the finished GANs draw, and of public images beside it."""

_PAGE_IMAGES = 64

Limits = dict[str, Any] | None
"""The thresholds of users' accuracy, or the values of the slices, by side."""


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    config, public = study.config, study.public
    evaluator = image_evaluator(config, public, workspace.artifacts())
    ledger = ledger_path(config.privacy, workspace.directory)
    accuracy = partial(_accuracy, study, workspace, evaluator)
    released, limits = {}, None
    for name in study.counted:
        released[name] = accuracy(name)
        # Refuses what cannot be used before the next release is charged.
        limits = limits_of(released, config.selection)
    results, records, plans = {}, {}, []
    for name in study.gans:
        phase, side = name.split("_")
        # The releases that it depends on; of histograms the last one gives the matching share.
        used = study.counted
        if config.selection.by != "slice" and phase != "bug":
            used = used[:1]
        share = 1.0
        if config.selection.by == "client" and limits is not None:
            share = matching_share(released[used[-1]], side, limits)
        prior = () if limits is None else tuple(released[counted]["run"] for counted in used)
        clients = _clients(study, phase)
        what = "random examples" if side == "random" else f"{side} accuracy"
        results[name] = workspace.train(
            study.gan(share)._replace(name=f"GAN {phase}, {what}"),
            selected_examples(clients, side, evaluator.classifier, config, limits),
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
    for name in study.counted:
        restate(workspace.directory / "runs" / f"{name}_accuracy", ledger)
    for name, result in results.items():
        statement = restate(result.out, ledger, records[name].pop("prior"))
        records[name] |= {**scores[name], "privacy": statement}
    composed = workspace.composed_guarantee([ledger], config.privacy.delta)
    return {
        "private": not workspace.stamp,
        "privacy": composed["statement"],
        "metrics": {
            "epsilon": composed["epsilon"],
            **{score: {name: run[score] for name, run in records.items()} for score in SCORES},
        },
        "population": study.clients.name,
        "unit": study.clients.unit,
        "selection": dataclasses.asdict(config.selection),
        "bug": dataclasses.asdict(config.bug),
        "classifier": {"accuracy": evaluator.accuracy, **scores["public"]},
        "judged_by": f"{public.name} (declared public)",
        "accuracy": released,
        "limits": limits,
        "runs": records,
        "selected_per_round": config.training.clients_per_round,
        "at_scale": {name: cost.statement() for name, cost in study.at_scale(plans).items()},
    }


def _clients(study: Study, phase: str) -> Population:
    """The clients with the bug, or before it and after its fix."""
    bug, clients, column = study.config.bug, study.clients, study.config.selection.column
    if phase != "bug":
        return clients
    struck = None
    if bug.value is not None and column is not None:
        struck = examples_of_slice(clients, column, bug.value)
    return invert_pixels(clients, bug.probability, study.config.run.seed, struck)


def _accuracy(
    study: Study, workspace: Workspace, evaluator: ImageEvaluator, name: str
) -> dict[str, Any]:
    settings, clients = study.config.selection, _clients(study, name)

    def examples() -> Population:
        correct = correct_examples(*evaluator.classifier, clients)
        if settings.by != "slice" or settings.column is None:
            return with_correct(clients, correct)
        # Each example's row of pairs (right, wrong) of the slices, float32 [examples, 2 slices].
        slices = [examples_of_slice(clients, settings.column, value) for value in settings.slices]
        pairs = [inside & outcome for inside in slices for outcome in (correct, ~correct)]
        return clients.with_columns({COLUMN: np.stack(pairs, axis=1).astype(np.float32)})

    what = "slices" if settings.by == "slice" else "users"
    result = workspace.train(
        study.accuracy()._replace(name=f"accuracy of {what}, {name}"),
        clients,
        name=f"{name}_accuracy",
        privacy=study.config.privacy,
        start=evaluator.digest,
        ask=examples,
    )
    record = {"run": result.run, "stamp": workspace.stamp}
    if settings.by == "slice":
        rates_S, noise_S = Rates.of(study.release, result.state)
        slices = {
            value: {"accuracy": rate, "noise": deviation}
            for value, rate, deviation in zip(settings.slices, rates_S, noise_S, strict=True)
        }
        return files.jsonable({**record, "slices": slices})
    metrics = ReleasedMetrics.of(study.accuracy_plan, result.state)
    sides = {side: metrics.percentile(getattr(settings, side)) for side in SIDES}
    return files.jsonable({**record, **metrics.to_dict(), "accuracy": metrics.accuracy(), **sides})


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
        # What real images reach, of which none tests the classifiers.
        scores["public"] = evaluator.score(evaluator.learned[:number])
        for name, images in pictures.items():
            if images.dtype != np.uint8:
                pictures[name] = np.round(255 * images).astype(np.uint8)
        return Artifact(scores, pictures)

    made_from = {name: params_digest(result.params) for name, result in runs.items()}
    return dict(workspace.artifacts().load_or_compute(IMAGES, drawn, made_from).record)


def limits_of(released: dict[str, Any], settings: SelectionConfig) -> Limits:
    """What the GANs are selected by, from the releases so far; None if examples are selected.

    The thresholds come from the histogram before the bug; the slices are those of least and of
    greatest accuracy in the last count.
    """
    if settings.by == "example":
        return None
    if settings.by == "slice":
        slices = list(released.values())[-1]["slices"]
        rates = [(rate["accuracy"], value) for value, rate in slices.items()]
        visible = sorted(pair for pair in rates if pair[0] is not None)
        limits = {"low": visible[0][1], "high": visible[-1][1]} if len(visible) > 1 else {}
    else:
        limits = {side: released["before"][side] for side in SIDES}
    if None in limits.values() or not limits:
        problem = f"nothing to select {settings.by}s by, because noise hides them"
        advice = f"selection.epsilon = {settings.epsilon} is too small for so few clients"
        raise InputError(f"the private accuracies give {problem}: {advice}")
    return limits


def selected_examples(
    population: Population,
    side: str,
    classifier: tuple[CNN, Any],
    config: GanInversionConfig,
    limits: Limits,
) -> Population:
    """The clients with only the images that a GAN is trained on, as their devices would choose."""
    settings = config.selection
    limit: Any = None if limits is None else limits.get(side)
    if side == "random":
        chosen = random_examples(population, settings.fraction, config.run.seed)
    elif settings.column is not None:
        chosen = examples_of_slice(population, settings.column, limit)
    else:
        correct, low = correct_examples(*classifier, population), side == "low"
        if limits is None:
            outcome = "incorrect" if low else "correct"
            chosen = classified_examples(population, correct, outcome, settings.at_least)
        else:
            chosen = examples_of_users(population, correct, "below" if low else "above", limit)
    selected = population.keeping(chosen)
    return selected.with_columns({"image": selected.columns["image"]})


def matching_share(released: dict[str, Any], side: str, thresholds: dict[str, Any]) -> float:
    """The share of matching clients, computed from a private histogram and therefore public.

    It is at least 0.05, so that noise cannot make every round sample all clients.
    """
    cumulative = np.cumsum([0.0, *np.maximum(released["histogram"], 0.0)])
    if not cumulative[-1] > 0:
        return LEAST_SHARE
    below = np.interp(thresholds[side], released["plan"]["edges"], cumulative) / cumulative[-1]
    return float(np.clip(below if side == "low" else 1.0 - below, LEAST_SHARE, 1.0))
