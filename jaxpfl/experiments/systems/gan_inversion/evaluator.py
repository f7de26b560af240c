"""Scores generated images by models that are trained on PUBLIC images."""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from scipy.special import rel_entr, softmax

from jaxpfl.algorithms.frechet import Reference, moments
from jaxpfl.data.corruptions import inverted
from jaxpfl.data.population import Population
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.records.artifacts import Artifacts
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig
from jaxpfl.experiments.systems.workspace import stored_params
from jaxpfl.federated.clients.evaluation import logits
from jaxpfl.models.classifiers import CNN, classifier_cnn

_MOST_TESTED = 5_000


@dataclass(frozen=True)
class ImageEvaluator:
    """PUBLIC models that score images: the primary one, and one that calls inverted ones 1.

    Attributes:
      image, label: PUBLIC examples that trained no classifier, if there are others.
      learned: the PUBLIC images that trained the primary one.
      how: how a classifier is trained, arguments of `fit_adam`.
      accuracy: of the classifier on these examples.
    """

    classifier: tuple[CNN, Any] = field(repr=False)
    polarity: tuple[CNN, Any] = field(repr=False)
    image: np.ndarray = field(repr=False)
    label: np.ndarray = field(repr=False)
    learned: np.ndarray = field(repr=False)
    how: dict[str, Any] = field(repr=False)
    accuracy: float
    digest: str

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


def image_evaluator(
    config: GanInversionConfig, public: Population, artifacts: Artifacts
) -> ImageEvaluator:
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
    how: dict[str, Any] = {"batch_size": settings.batch_size, "seed": seed}
    how["learning_rate"] = settings.learning_rate
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
    digest = " ".join(artifacts.sha256(name) for name in models)
    made = ImageEvaluator(
        **models,
        image=images[tested],
        label=labels[tested],
        learned=images[rows],
        how={**how, "epochs": settings.epochs},
        accuracy=np.nan,
        digest=digest,
    )
    return replace(made, accuracy=made.accuracy_of(models["classifier"][1]))


def classifier_score(logits_NxC: np.ndarray) -> float:
    """Returns exp(mean KL(p(y|x) || p(y))) of a classifier's logits: a number in 1 .. classes."""
    p_NxC = softmax(logits_NxC.astype(np.float64), axis=-1)
    divergence_N = rel_entr(p_NxC, p_NxC.mean(axis=0)).sum(axis=-1)
    return float(np.exp(divergence_N.mean()))
