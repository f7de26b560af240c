"""Carries out the study of inverted pixels: accuracies, GANs, images."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.special import rel_entr, softmax

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.federated_metrics import COLUMN, Rates, ReleasedMetrics, with_correct
from jaxpfl.algorithms.frechet import Reference, moments
from jaxpfl.data import selection
from jaxpfl.data.corruptions import inverted
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine.description import made_up
from jaxpfl.experiments.engine.setting import Result
from jaxpfl.experiments.records.artifacts import Artifact, Artifacts
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.gan_inversion.config import SCORES, Config, SelectionConfig
from jaxpfl.experiments.systems.gan_inversion.study import LEAST_SHARE, SIDES, Study
from jaxpfl.experiments.systems.workspace import (
    Workspace,
    ledger_path,
    params_digest,
    restate,
    stored_params,
)
from jaxpfl.federated.clients.evaluation import correct_examples, logits
from jaxpfl.models.classifiers import CNN, classifier_cnn
from jaxpfl.models.gan import sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root
from jaxpfl.privacy.plan import Plan

IMAGES = "images"
"""The artifact of what the finished GANs draw, and of public images beside it."""

_PAGE_IMAGES, _MOST_TESTED = 64, 5_000

Limits = dict[str, Any] | None
"""The thresholds of users' accuracy, or the values of the slices, by side."""


@dataclass(frozen=True)
class ImageEvaluator:
    """PUBLIC models that score images: the primary one, and one that calls inverted ones 1.

    Attributes:
      image, label: PUBLIC examples that trained no classifier, if there are others.
      learned: the PUBLIC images that trained the primary one.
      how: how a classifier is trained, arguments of `fit_adam`.
    """

    classifier: tuple[CNN, Any] = field(repr=False)
    polarity: tuple[CNN, Any] = field(repr=False)
    image: np.ndarray = field(repr=False)
    label: np.ndarray = field(repr=False)
    learned: np.ndarray = field(repr=False)
    how: dict[str, Any] = field(repr=False)
    digest: str

    @cached_property
    def accuracy(self) -> float:
        """Of the classifier on these examples."""
        return self.accuracy_of(self.classifier[1])

    @cached_property
    def _normal(self) -> Reference:
        return Reference(moments(logits(*self.classifier, self.image), np.inf))

    def score(self, images_NxHxWxC: np.ndarray) -> dict[str, float]:
        """Scores a set of images with values in 0 .. 1.

        "inverted_share" is the share of images that the polarity model calls inverted, and
        "classifier_score" that of the primary model, which is high for clear images of all classes
        (Salimans et al. 2016, used in this way by Augenstein et al.). "frechet" is the Frechet
        distance between the primary model's logits of these images and of public ones.
        "labelled_accuracy" is that, on public images, of a classifier which is trained on these
        images as the primary model labels them, in place of people (task T5 of Augenstein et al.).
        """
        logits_NxK = logits(*self.classifier, images_NxHxWxC)
        classes = np.argmax(logits(*self.polarity, images_NxHxWxC), axis=-1)
        columns = {"image": images_NxHxWxC, "label": logits_NxK.argmax(axis=-1).astype(np.int32)}
        student = fit_adam(self.classifier[0], columns, **self.how)
        # A generator that diverged has no moments.
        finite = bool(np.isfinite(logits_NxK).all())
        return {
            "inverted_share": float(np.mean(classes == 1)),
            "classifier_score": classifier_score(logits_NxK),
            "frechet": self._normal.distance(moments(logits_NxK, np.inf)) if finite else np.nan,
            "labelled_accuracy": self.accuracy_of(student),
        }

    def accuracy_of(self, params: Any) -> float:
        """The accuracy of a classifier with these parameters on the public examples."""
        classes = np.argmax(logits(self.classifier[0], params, self.image), axis=-1)
        return float(np.mean(classes == self.label))


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    config, public = study.config, study.public
    evaluator = image_evaluator(config, public, workspace.artifacts())
    ledger = ledger_path(config.privacy, workspace.directory)
    released, limits = {}, None
    for name in study.counted:
        released[name] = _accuracy(study, workspace, evaluator, name)
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
        clients = study.clients_in(phase)
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


def made(directory: Path, config: Config, record: Mapping[str, Any], **_: Any) -> base.Made:
    """The GANs, each in a folder of its own; see `systems.base.System`."""
    models, plan, workspace = [], None, Workspace(config, directory)
    for name, about in record["runs"].items():

        def gan(plan: Plan, share: float = about["share"]) -> Algorithm:
            return Study(config, made_up(plan.population)).gan(share)

        plan, params = workspace.finished(name, gan, privacy=about["privacy"])
        models.append(base.TrainedModel(name, config.gan.model, params))
    trained_on = base.trained_on(config.data.source)
    return base.Made(tuple(models), plan, record["stamp"], trained_on, scores={})


def _accuracy(
    study: Study, workspace: Workspace, evaluator: ImageEvaluator, name: str
) -> dict[str, Any]:
    settings, clients = study.config.selection, study.clients_in(name)

    def examples() -> Population:
        correct = correct_examples(*evaluator.classifier, clients)
        if settings.by != "slice" or settings.column is None:
            return with_correct(clients, correct)
        # Each example's row of pairs (right, wrong) of the slices, float32 [examples, 2 slices].
        inside_of = partial(selection.examples_of_slice, clients, settings.column)
        slices = [inside_of(value) for value in settings.slices]
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
    population: Population, side: str, classifier: tuple[CNN, Any], config: Config, limits: Limits
) -> Population:
    """The clients with only the images that a GAN is trained on, as their devices would choose."""
    settings = config.selection
    limit: Any = None if limits is None else limits.get(side)
    if side == "random":
        chosen = selection.random_examples(population, settings.fraction, config.run.seed)
    elif settings.column is not None:
        chosen = selection.examples_of_slice(population, settings.column, limit)
    else:
        correct, low = correct_examples(*classifier, population), side == "low"
        if limits is None:
            outcome = "incorrect" if low else "correct"
            chosen = selection.classified_examples(population, correct, outcome, settings.at_least)
        else:
            where = "below" if low else "above"
            chosen = selection.examples_of_users(population, correct, where, limit)
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


def image_evaluator(config: Config, public: Population, artifacts: Artifacts) -> ImageEvaluator:
    """Loads the evaluator's models from `artifacts`, or trains them and stores them there.

    A resumed study must use the same parameters: if they were trained again on another machine,
    they could differ in the last bits and select other examples.
    """
    settings, seed = config.classifier, config.run.seed
    images, labels = (np.asarray(public.columns[name]) for name in ("image", "label"))
    generator = np.random.Generator(np.random.Philox(key=seed))
    order = generator.permutation(len(images))
    rows, others = np.sort(order[: settings.examples]), order[settings.examples :]
    chosen = generator.random(len(images)) < 0.5
    mixed = np.where(chosen[:, None, None, None], inverted(images), images)
    how = {name: getattr(settings, name) for name in ("batch_size", "learning_rate")}
    how |= {"seed": seed}
    models: dict[str, tuple[CNN, Any]] = {}
    for name, classes, epochs, image, label in (
        ("classifier", settings.classes, settings.epochs, images[rows], labels[rows]),
        ("polarity", 2, 1, mixed, chosen),
    ):
        model = classifier_cnn(config.gan.model.image_shape, classes)
        columns = {"image": image, "label": label.astype(np.int32)}
        train = partial(fit_adam, model, columns, epochs=epochs, **how)
        models[name] = (model, stored_params(artifacts, name, model, train))
    # The classifier is tested on examples that did not train it, if there are any.
    tested = np.sort((others if len(others) else order)[:_MOST_TESTED])
    return ImageEvaluator(
        **models,
        image=images[tested],
        label=labels[tested],
        learned=images[rows],
        how={**how, "epochs": settings.epochs},
        digest=" ".join(artifacts.sha256(name) for name in models),
    )


def classifier_score(logits_NxC: np.ndarray) -> float:
    """Returns exp(mean KL(p(y|x) || p(y))) of a classifier's logits: a number in 1 .. classes."""
    p_NxC = softmax(logits_NxC.astype(np.float64), axis=-1)
    divergence_N = rel_entr(p_NxC, p_NxC.mean(axis=0)).sum(axis=-1)
    return float(np.exp(divergence_N.mean()))
