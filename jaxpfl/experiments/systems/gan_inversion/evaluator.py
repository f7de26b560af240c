"""Who looks at the images that a GAN draws: models of PUBLIC images, which anyone may ask."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.frechet import Moments, distance, moments
from jaxpfl.data.population import Population
from jaxpfl.experiments.central.training import fit_adam
from jaxpfl.experiments.engine import study_runs as studies
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig
from jaxpfl.models.cnn import CNN, classifier_cnn

# A bound on the norm of logits that none ever meets.
_NO_CLIP = 1e6


@dataclass(frozen=True)
class Judge:
    """What the PUBLIC clients teach: to classify digits, and to tell whether ink and paper swapped.

    Attributes:
      classifier, params: the primary model, which users have in their hands.
      polarity, polarity_params: tells an inverted image (class 1) from a normal one (class 0).
      normal, inverted: moments of the classifier's logits on public images, as they are and
        inverted.
      accuracy: of the classifier on public images.
    """

    classifier: CNN
    params: Any = field(repr=False)
    polarity: CNN
    polarity_params: Any = field(repr=False)
    normal: Moments = field(repr=False)
    inverted: Moments = field(repr=False)
    accuracy: float

    def score(self, images_NxHxWxC: np.ndarray) -> dict[str, float]:
        """What a set of images in 0 .. 1 looks like.

        Returns:
          inverted_share: of the images, as the polarity model calls them.
          classifier_score: exp(mean KL(p(y|x) || p(y))) of the primary model, 1 .. classes: high
            for images that are clear and of every class (Salimans et al. 2016, as Augenstein et
            al. use it).
          frechet_normal, frechet_inverted: Frechet distance of the logits to those of public
            images, as they are and inverted.
        """
        called = np.argmax(_logits(self.polarity, self.polarity_params, images_NxHxWxC), axis=-1)
        logits = _logits(self.classifier, self.params, images_NxHxWxC)
        here = moments(logits, _NO_CLIP)
        return {
            "inverted_share": float(np.mean(called == 1)),
            "classifier_score": classifier_score(logits),
            "frechet_normal": distance(here, self.normal),
            "frechet_inverted": distance(here, self.inverted),
        }


def train_judge(
    config: GanInversionConfig, public: Population, directory: Path
) -> tuple[Judge, str]:
    """The judge, trained once and kept in `directory`, with what identifies it.

    Args:
      public: clients that are declared public, with "image" and "label".
    """
    settings = config.classifier
    images = np.asarray(public.columns["image"])
    labels = np.asarray(public.columns["label"])
    generator = np.random.Generator(np.random.Philox(key=config.run.seed))
    order = generator.permutation(len(images))
    rows = np.sort(order[: settings.examples])
    struck = generator.random(len(images)) < 0.5
    both = np.where(struck[:, None, None, None], inverted(images), images)
    columns = {
        "classifier": {"image": images[rows], "label": labels[rows].astype(np.int32)},
        "polarity": {"image": both, "label": struck.astype(np.int32)},
    }
    models = {
        "classifier": classifier_cnn(config.gan.image_shape, settings.classes),
        "polarity": classifier_cnn(config.gan.image_shape, 2),
    }
    epochs = {"classifier": settings.epochs, "polarity": 1}
    params, digests = {}, []
    for name, model in models.items():
        train = partial(
            fit_adam,
            model,
            columns[name],
            epochs=epochs[name],
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            seed=config.run.seed,
        )
        like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
        path = directory / "judge" / f"{name}.npz"
        params[name], digest = studies.load_or_compute(path, train, like)
        digests.append(digest)
    # Where there are others, those that did not train it.
    tested = order[settings.examples :] if len(order) > settings.examples else order
    tested = np.sort(tested[:5_000])
    classifier = models["classifier"]
    logits = _logits(classifier, params["classifier"], images[tested])
    upside_down = _logits(classifier, params["classifier"], inverted(images[tested]))
    judge = Judge(
        classifier=classifier,
        params=params["classifier"],
        polarity=models["polarity"],
        polarity_params=params["polarity"],
        normal=moments(logits, _NO_CLIP),
        inverted=moments(upside_down, _NO_CLIP),
        accuracy=float(np.mean(np.argmax(logits, axis=-1) == labels[tested])),
    )
    return judge, " ".join(digests)


def inverted(images: np.ndarray) -> np.ndarray:
    """Ink for paper and paper for ink: 255 - x for uint8, 1 - x for floats in 0 .. 1."""
    white = images.dtype.type(255 if images.dtype == np.uint8 else 1)
    return white - images


@partial(jax.jit, static_argnames="model")
def _batch_logits(model: CNN, params: Any, images: jax.Array) -> jax.Array:
    return model.logits(params, images)


def _logits(model: CNN, params: Any, images_NxHxWxC: np.ndarray, size: int = 256) -> np.ndarray:
    """Logits [N, classes] in batches of one shape."""
    parts = []
    for start in range(0, len(images_NxHxWxC), size):
        rows = np.minimum(np.arange(start, start + size), len(images_NxHxWxC) - 1)
        parts.append(np.asarray(_batch_logits(model, params, images_NxHxWxC[rows])))
    return np.concatenate(parts)[: len(images_NxHxWxC)]


def classifier_score(logits_NxC: np.ndarray) -> float:
    """exp(mean KL(p(y|x) || p(y))) of a classifier's logits, in 1 .. classes."""
    shifted = logits_NxC.astype(np.float64) - logits_NxC.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    p = np.exp(log_p)
    marginal = np.mean(p, axis=0)
    return float(np.exp(np.mean(np.sum(p * (log_p - np.log(marginal + 1e-300)), axis=-1))))
