"""The study of inverted pixels: two federated GANs reveal what a classifier gets wrong.

Source: Augenstein et al. 2020, section 6 and appendix C. A modeller sees that a classifier's
accuracy drops, but may not look at the images. Two GANs are trained under differential privacy:
one on the data that the classifier gets wrong, one on the data that it gets right (`selection.by`).
They are trained while the bug is present and again after its fix, and their images are compared.

Everything concerns the same clients, happens in this order and is charged to one ledger:

    before the bug    a private histogram of users' accuracy, which gives the thresholds
    with the bug      a second histogram; GANs "bug_low" and "bug_high"
    after the fix     GANs "fixed_low" and "fixed_high"

If examples are selected instead of clients, no thresholds are needed, and the page only shows the
histograms. A client that is not selected stays in the population: see `data.selection`.

    artifacts/         models of the evaluator, both histograms, generated images
    runs/NAME/         the run of each GAN, with a report of its own
    ledger.jsonl       unless `privacy.ledger` names another one
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.federated_metrics import MetricsPlan, release
from jaxpfl.data import selection
from jaxpfl.data.corruptions import invert_pixels
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine.build import (
    check_images,
    read_clients,
    split_clients,
)
from jaxpfl.experiments.engine.run_directory import forget, run_id, saved_secret
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.base import Workspace
from jaxpfl.experiments.systems.gan_inversion import plans
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig, SelectionConfig
from jaxpfl.experiments.systems.gan_inversion.evaluator import (
    ImageEvaluator,
    image_evaluator,
    inverted,
)
from jaxpfl.federated.clients.evaluation import correct_examples
from jaxpfl.models.gan import GAN, sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

IMAGES = "images"
PHASES = ("bug", "fixed")
SIDES = ("low", "high")

_PAGE_IMAGES = 64
# The histograms that the GANs of a phase depend on; the last one gives the matching share.
_HISTOGRAMS = {"bug": ("before", "bug"), "fixed": ("before",)}

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


def prepare(config: GanInversionConfig) -> "InversionStudy":
    """Reads the clients and refuses what cannot be carried out; see `systems.base`."""
    clients = read_clients(config.data)
    check_images(clients, config.gan.model.image_shape, config.classifier.classes)
    parts = split_clients(clients, config.data)
    if not parts["public"].num_examples:
        raise InputError(
            f"data.split.public = {config.data.split.public:g} leaves no public client with "
            "examples: give it a larger share"
        )
    study = InversionStudy(config, parts["train"], parts["public"])
    if config.scaled_up is not None:
        for share in (1.0, plans.LEAST_SHARE):
            study_runs.at_scale(config.scaled_up, {"": study.plan(share)})
    return study


@dataclass(frozen=True)
class InversionStudy:
    """The study, ready to be carried out, with its private clients and those declared public."""

    config: GanInversionConfig
    private: Population = field(repr=False)
    public: Population = field(repr=False)

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do, and returns the public record."""
        return _Progress(self, workspace).public_record()

    def plan(self, share: float) -> Plan:
        """The plan of a GAN's rounds, see `plans.gan_plan`."""
        return plans.gan_plan(self.config, len(self.private), share)

    @cached_property
    def accuracy_plan(self) -> MetricsPlan:
        """What a release of users' accuracy contains and costs."""
        return plans.accuracy_plan(self.config, len(self.private))


class _Progress:
    """The study in its directory: each part is found there, or made and stored."""

    def __init__(self, study: InversionStudy, workspace: Workspace) -> None:
        config = study.config
        self.study, self.config, self.workspace = study, config, workspace
        self.ledger = study_runs.ledger_path(config.privacy, workspace.directory)
        self.artifacts = workspace.artifacts(study_runs.config_id(config))
        self.evaluator = image_evaluator(config, study.public, self.artifacts)
        self.image_key = jax.random.fold_in(training_root(config.run.seed), SAMPLE_IMAGES)
        self.populations = {
            "bug": invert_pixels(study.private, config.bug.probability, config.bug.seed),
            "fixed": study.private,
        }

    def public_record(self) -> dict[str, Any]:
        """Does what is left to do, and returns the public record."""
        config = self.config
        before = self._accuracy("before", self.study.private)
        # Refuses unusable thresholds before the next release is charged.
        thresholds = thresholds_of(before, config.selection)
        accuracy = {"before": before, "bug": self._accuracy("bug", self.populations["bug"])}
        runs, shares, prior = {}, {}, {}
        for phase in PHASES:
            for side in SIDES:
                name = f"{phase}_{side}"
                # After the fix the clients are as they were before the bug.
                histogram = accuracy[_HISTOGRAMS[phase][-1]]
                shares[name] = matching_share(histogram, side, thresholds)
                used = () if thresholds is None else _HISTOGRAMS[phase]
                prior[name] = tuple(accuracy[each]["run"] for each in used)
                selected = selected_examples(
                    self.populations[phase], side, self.evaluator, config.selection, thresholds
                )
                runs[name] = self._train(name, selected, shares[name], prior[name])
        scores = self._draw_images(runs)
        run_plans = {name: self.study.plan(share) for name, share in shares.items()}
        return {
            "population": self.study.private.name,
            "unit": self.study.private.unit,
            "selection": dataclasses.asdict(config.selection),
            "bug": dataclasses.asdict(config.bug),
            "classifier": {"accuracy": self.evaluator.accuracy},
            "judged_by": f"{self.study.public.name} (declared public)",
            "accuracy": accuracy,
            "thresholds": thresholds,
            "runs": {
                name: {
                    **scores[name],
                    "share": shares[name],
                    "epsilon": result.metrics["epsilon"],
                    "plan": run_plans[name].to_dict(),
                    "privacy": study_runs.restate(result.out, self.ledger, prior[name]),
                }
                for name, result in runs.items()
            },
            "selected_per_round": config.training.clients_per_round,
            "composed_guarantee": study_runs.composed_guarantee(
                [self.ledger], config.privacy.delta, self.workspace.stamp
            ),
            "at_scale": study_runs.at_scale(
                config.scaled_up,
                run_plans,
                {name: self._prior_multipliers(name) for name in run_plans},
            ),
        }

    def _prior_multipliers(self, name: str) -> list[float]:
        """Noise multipliers of the histograms that a GAN depends on; by example there are none."""
        if self.config.selection.by == "example" or not self.config.privacy.private:
            return []
        histograms = _HISTOGRAMS[name.partition("_")[0]]
        return [self.study.accuracy_plan.noise_multiplier] * len(histograms)

    def _accuracy(self, name: str, population: Population) -> dict[str, Any]:
        """The private histogram of users' accuracy, released and charged once."""
        run_config, settings = self.config.run, self.config.selection
        plan = self.study.accuracy_plan
        private = files.private_directory(self.workspace.directory / "private")
        secret_path = private / f"accuracy_{name}_secret.json"

        def released(ledger: Ledger) -> Artifact:
            secret = saved_secret(
                secret_path,
                reproducible_seed=run_config.seed if run_config.reproducible_noise else None,
                purpose=f"accuracy {name}",
            )
            run = f"accuracy of users, {name} {run_id(secret)}"
            correct = correct_examples(self.evaluator.classifier, self.evaluator.params, population)
            metrics = release(
                population, plan, correct=correct, ledger=ledger, secret=secret, run=run
            )
            record = {
                "run": run,
                "stamp": self.workspace.stamp,
                **metrics.to_dict(),
                "accuracy": metrics.accuracy(),
                "low": metrics.percentile(settings.low),
                "high": metrics.percentile(settings.high),
            }
            return Artifact(record)

        budget = study_runs.budget_of(self.config.privacy)
        with Ledger(self.ledger, population, budget=budget) as ledger:
            found = self.workspace.artifacts(self.artifacts.run, ledger).load_or_compute(
                f"accuracy_{name}", partial(released, ledger), made_from=plan.to_dict()
            )
            forget(secret_path, ledger)
        return dict(found.record)

    def _train(
        self, name: str, selected: Population, share: float, prior: tuple[str, ...]
    ) -> Result:
        config, preview = self.config, self.config.preview
        algorithm = plans.gan(config, self.study.plan(share), share)
        return study_runs.train(
            config,
            algorithm._replace(name=f"GAN {name.replace('_', ', ')} accuracy"),
            selected.with_columns({"image": selected.columns["image"]}),
            name=name,
            directory=self.workspace.directory,
            ledger=self.ledger,
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
            public = np.asarray(self.study.public.columns["image"][:_PAGE_IMAGES])
            pictures["public"] = _as_bytes(public)
            pictures["public_inverted"] = _as_bytes(inverted(public))
            return Artifact(scores, pictures)

        made_from = {name: study_runs.params_digest(result.params) for name, result in runs.items()}
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
        return plans.LEAST_SHARE
    cumulative = np.concatenate([np.zeros(1), np.cumsum(counts)])
    edges = released["plan"]["edges"]
    below = float(np.interp(thresholds[side], edges, cumulative)) / cumulative[-1]
    return float(np.clip(below if side == "low" else 1.0 - below, plans.LEAST_SHARE, 1.0))


def _as_bytes(images: np.ndarray) -> np.ndarray:
    return images if images.dtype == np.uint8 else np.round(255 * images).astype(np.uint8)
