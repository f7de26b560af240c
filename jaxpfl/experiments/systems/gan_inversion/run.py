"""Carries out the study of inverted pixels: accuracies, GANs, images."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.federated_metrics import ReleasedMetrics, with_correct
from jaxpfl.algorithms.federated_sums import COLUMN, Rates
from jaxpfl.data.corruptions import invert_pixels, inverted
from jaxpfl.data.population import Population
from jaxpfl.data.selection import (
    Outcome,
    Side,
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
from jaxpfl.models.cnn import CNN
from jaxpfl.models.gan import sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root

IMAGES = "images"
"""The artifact of what the finished GANs draw, and of public images beside it."""

_PAGE_IMAGES = 64

OUTCOMES: dict[str, Outcome] = {"low": "incorrect", "high": "correct"}
BOUNDS: dict[str, Side] = {"low": "below", "high": "above"}

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
        prior = () if limits is None else tuple(released[each]["run"] for each in used)
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
        said = restate(result.out, ledger, records[name].pop("prior"))
        records[name] |= {**scores[name], "privacy": said}
    composed = workspace.composed_guarantee([ledger], config.privacy.delta)
    return {
        "private": not workspace.stamp,
        "privacy": composed["statement"],
        "metrics": {
            "epsilon": composed["epsilon"],
            **{score: {name: each[score] for name, each in records.items()} for score in SCORES},
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
        "at_scale": {name: each.statement() for name, each in study.at_scale(plans).items()},
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
        if settings.by != "slice":
            return with_correct(clients, correct)
        return clients.with_columns({COLUMN: slice_counts(clients, correct, settings)})

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
        rates, noise = (each.tolist() for each in Rates.of(study.release, result.state))
        slices = {
            value: {"accuracy": rate, "noise": deviation}
            for value, rate, deviation in zip(settings.slices, rates, noise, strict=True)
        }
        return files.jsonable({**record, "slices": slices})
    metrics = ReleasedMetrics.of(study.accuracy_plan, result.state)
    sides = {side: metrics.percentile(getattr(settings, side)) for side in SIDES}
    return files.jsonable({**record, **metrics.to_dict(), "accuracy": metrics.accuracy(), **sides})


def slice_counts(
    population: Population, correct: np.ndarray, settings: SelectionConfig
) -> np.ndarray:
    """Each example's row of pairs (right, wrong) of the slices, float32 [examples, 2 slices]."""
    assert settings.column is not None
    held = [examples_of_slice(population, settings.column, value) for value in settings.slices]
    pairs = [each & outcome for each in held for outcome in (correct, ~correct)]
    return np.stack(pairs, axis=1).astype(np.float32)


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
        return Artifact(scores, {name: _as_bytes(each) for name, each in pictures.items()})

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
        rates = [(each["accuracy"], value) for value, each in slices.items()]
        known = sorted(pair for pair in rates if pair[0] is not None)
        found = {"low": known[0][1], "high": known[-1][1]} if len(known) > 1 else {}
    else:
        found = {side: released["before"][side] for side in SIDES}
    if None in found.values() or not found:
        raise InputError(
            f"the private accuracies give nothing to select {settings.by}s by, because noise hides "
            f"them: selection.epsilon = {settings.epsilon} is too small for so few clients"
        )
    return found


def selected_examples(
    population: Population,
    side: str,
    classifier: tuple[CNN, Any],
    config: GanInversionConfig,
    limits: Limits,
) -> Population:
    """The clients with only the images that a GAN is trained on, as their devices would choose."""
    settings = config.selection
    if side == "random":
        chosen = random_examples(population, settings.fraction, config.run.seed)
    elif settings.column is not None:
        assert limits is not None
        chosen = examples_of_slice(population, settings.column, limits[side])
    elif limits is None:
        correct = correct_examples(*classifier, population)
        chosen = classified_examples(population, correct, OUTCOMES[side], settings.at_least)
    else:
        correct = correct_examples(*classifier, population)
        chosen = examples_of_users(population, correct, BOUNDS[side], limits[side])
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


def _as_bytes(images: np.ndarray) -> np.ndarray:
    return images if images.dtype == np.uint8 else np.round(255 * images).astype(np.uint8)
