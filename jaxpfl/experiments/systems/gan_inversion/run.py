"""Carries out the study of inverted pixels: histograms, GANs, images."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpfl.algorithms.federated_metrics import release
from jaxpfl.data import selection
from jaxpfl.data.corruptions import invert_pixels
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.run_directory import forget, run_id, saved_secret
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.gan_inversion.config import SelectionConfig
from jaxpfl.experiments.systems.gan_inversion.evaluator import (
    ImageEvaluator,
    image_evaluator,
    inverted,
)
from jaxpfl.experiments.systems.gan_inversion.study import GANS, LEAST_SHARE, SIDES, Study
from jaxpfl.experiments.systems.workspace import (
    Workspace,
    budget_of,
    ledger_path,
    params_digest,
    restate,
)
from jaxpfl.federated.clients.evaluation import correct_examples
from jaxpfl.models.gan import GAN, sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root
from jaxpfl.privacy.ledger import Ledger

IMAGES = "images"
"""The artifact of what the finished GANs draw, and of public images beside it."""

_PAGE_IMAGES = 64

Thresholds = dict[str, float] | None


@dataclass(frozen=True)
class _Scored:
    scores: dict[str, float]

    def result(self) -> dict[str, float]:
        return self.scores


@dataclass(frozen=True)
class _Preview:
    """Draws images from a GAN and scores them, without reading private data."""

    gan: GAN
    evaluator: ImageEvaluator
    number: int
    key: jax.Array
    name: str = "images that it draws"

    def __call__(self, params: Any) -> _Scored:
        images = sample_images(self.gan, params, self.key, self.number)
        return _Scored(self.evaluator.score(images))


def carry_out(study: Study, workspace: Workspace) -> dict[str, Any]:
    """Does what is left to do, and returns the public record."""
    return _Run(study, workspace).public_record()


class _Run:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: Study, workspace: Workspace) -> None:
        assert study.public is not None
        config = study.config
        self.study, self.config, self.workspace = study, config, workspace
        self.public, self.artifacts = study.public, workspace.artifacts()
        self.ledger = ledger_path(config.privacy, workspace.directory)
        self.evaluator = image_evaluator(config, self.public, self.artifacts)
        self.image_key = jax.random.fold_in(training_root(config.run.seed), SAMPLE_IMAGES)
        self.populations = {
            "bug": invert_pixels(study.clients, config.bug.probability, config.bug.seed),
            "fixed": study.clients,
        }

    def public_record(self) -> dict[str, Any]:
        study, config = self.study, self.config
        before = self._accuracy("before", study.clients)
        # Refuses unusable thresholds before the next release is charged.
        thresholds = thresholds_of(before, config.selection)
        accuracy = {"before": before, "bug": self._accuracy("bug", self.populations["bug"])}
        runs, shares, prior = {}, {}, {}
        for name in GANS:
            phase, side = name.split("_")
            used = study.histograms_before(name)
            shares[name] = matching_share(accuracy[used[-1]], side, thresholds) if used else 1.0
            prior[name] = tuple(accuracy[each]["run"] for each in used)
            selected = selected_examples(
                self.populations[phase], side, self.evaluator, config.selection, thresholds
            )
            runs[name] = self._train(name, selected, shares[name], prior[name])
        scores = self._draw_images(runs)
        plans = {name: study.gan_plan(share) for name, share in shares.items()}
        return {
            "population": study.clients.name,
            "unit": study.clients.unit,
            "selection": dataclasses.asdict(config.selection),
            "bug": dataclasses.asdict(config.bug),
            "classifier": {"accuracy": self.evaluator.accuracy},
            "judged_by": f"{self.public.name} (declared public)",
            "accuracy": accuracy,
            "thresholds": thresholds,
            "runs": {
                name: {
                    **scores[name],
                    "share": shares[name],
                    "epsilon": result.metrics["epsilon"],
                    "plan": plans[name].to_dict(),
                    "privacy": restate(result.out, self.ledger, prior[name]),
                }
                for name, result in runs.items()
            },
            "selected_per_round": config.training.clients_per_round,
            "composed_guarantee": self.workspace.composed_guarantee(
                [self.ledger], config.privacy.delta
            ),
            "at_scale": study.at_scale(plans),
        }

    def _accuracy(self, name: str, population: Population) -> dict[str, Any]:
        """The private histogram of users' accuracy, released and charged once."""
        settings, plan, workspace = self.config.selection, self.study.accuracy_plan, self.workspace
        secret_path = workspace.directory / "private" / f"accuracy_{name}_secret.json"
        with Ledger(self.ledger, population, budget=budget_of(self.config.privacy)) as ledger:

            def released() -> Artifact:
                purpose, seed = f"accuracy {name}", workspace.reproducible_seed
                secret = saved_secret(secret_path, reproducible_seed=seed, purpose=purpose)
                run = f"accuracy of users, {name} {run_id(secret)}"
                evaluator = self.evaluator
                correct = correct_examples(evaluator.classifier, evaluator.params, population)
                metrics = release(
                    population, plan, correct=correct, ledger=ledger, secret=secret, run=run
                )
                return Artifact(
                    {
                        "run": run,
                        "stamp": workspace.stamp,
                        **metrics.to_dict(),
                        "accuracy": metrics.accuracy(),
                        "low": metrics.percentile(settings.low),
                        "high": metrics.percentile(settings.high),
                    }
                )

            found = workspace.artifacts(ledger=ledger).load_or_compute(
                f"accuracy_{name}", released, made_from=plan.to_dict()
            )
            forget(secret_path, ledger)
        return dict(found.record)

    def _train(
        self, name: str, selected: Population, share: float, prior: tuple[str, ...]
    ) -> Result:
        config, preview = self.config, self.config.preview
        label = f"GAN {name.replace('_', ', ')} accuracy"
        return self.workspace.train(
            self.study.gan(share)._replace(name=label),
            selected.with_columns({"image": selected.columns["image"]}),
            name=name,
            privacy=config.privacy,
            tracking=Tracking(
                evaluate=_Preview(config.gan.model, self.evaluator, preview.images, self.image_key),
                evaluate_every=preview.every,
                checkpoint_every=config.run.checkpoint_every,
                progress=self.workspace.progress,
            ),
            start=self.evaluator.digest,
            prior=prior,
        )

    def _draw_images(self, runs: dict[str, Result]) -> dict[str, dict[str, float]]:
        """Draws images from the finished GANs and scores them; this costs no privacy."""
        number = max(self.config.preview.images, _PAGE_IMAGES)

        def drawn() -> Artifact:
            scores, pictures = {}, {}
            for name, result in runs.items():
                images = sample_images(self.config.gan.model, result.params, self.image_key, number)
                pictures[name] = _as_bytes(images[:_PAGE_IMAGES])
                scores[name] = self.evaluator.score(images)
            # Examples of normal and inverted images, as the evaluator was trained on them.
            public = np.asarray(self.public.columns["image"][:_PAGE_IMAGES])
            pictures["public"] = _as_bytes(public)
            pictures["public_inverted"] = _as_bytes(inverted(public))
            return Artifact(scores, pictures)

        made_from = {name: params_digest(result.params) for name, result in runs.items()}
        found = self.artifacts.load_or_compute(IMAGES, drawn, made_from)
        return {name: dict(scores) for name, scores in found.record.items()}


def thresholds_of(before: dict[str, Any], settings: SelectionConfig) -> Thresholds:
    """The two thresholds from the histogram before the bug; None if examples are selected.

    Raises:
      InputError: the histogram has no positive number of users.
    """
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
    evaluator: ImageEvaluator,
    settings: SelectionConfig,
    thresholds: Thresholds,
) -> Population:
    """The clients with only the images that a GAN is trained on, as their devices would choose."""
    correct = correct_examples(evaluator.classifier, evaluator.params, population)
    if thresholds is None:
        outcome: selection.Outcome = "incorrect" if side == "low" else "correct"
        chosen = selection.classified_examples(
            population, correct, outcome, at_least=settings.at_least
        )
    elif side == "low":
        chosen = selection.examples_of_users(population, correct, below=thresholds["low"])
    else:
        chosen = selection.examples_of_users(population, correct, above=thresholds["high"])
    return selection.select(population, chosen)


def matching_share(released: dict[str, Any], side: str, thresholds: Thresholds) -> float:
    """The share of matching clients, computed from a private histogram and therefore public.

    It is at least 0.05, so that noise cannot make every round sample all clients. If examples are
    selected, nearly all clients match, and the share is 1.
    """
    if thresholds is None:
        return 1.0
    counts = np.maximum(np.asarray(released["histogram"]), 0.0)
    if not counts.sum() > 0:
        return LEAST_SHARE
    cumulative = np.concatenate([np.zeros(1), np.cumsum(counts)])
    edges = released["plan"]["edges"]
    below = float(np.interp(thresholds[side], edges, cumulative)) / cumulative[-1]
    return float(np.clip(below if side == "low" else 1.0 - below, LEAST_SHARE, 1.0))


def _as_bytes(images: np.ndarray) -> np.ndarray:
    return images if images.dtype == np.uint8 else np.round(255 * images).astype(np.uint8)
