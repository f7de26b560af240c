"""The study of inverted pixels: two federated GANs show what a classifier's errors are made of.

Source: Augenstein et al. 2020, section 6 and appendix C. A modeller sees a classifier's accuracy
drop and may not look at the images. Two GANs are trained under differential privacy, one on the
data that the classifier gets wrong and one on what it gets right (`selection.by`), while the bug
is there and again after it was fixed, and are looked at side by side.

One world happens to the same clients, in this order, and one ledger adds it all up:

    before the bug    a private histogram of users' accuracy gives the thresholds
    with the bug      the histogram again: it has moved; GANs "bug_low" and "bug_high"
    after the fix     GANs "fixed_low" and "fixed_high"

Where data is selected by example the thresholds are not needed, and only the histograms' pictures
use them. Nobody leaves the population for being unselected: see `data.selection`.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpfl import files
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg_gan import GeneratorTraining, fed_avg_gan
from jaxpfl.algorithms.federated_metrics import MetricsPlan, release
from jaxpfl.data import selection
from jaxpfl.data.corruptions import invert_pixels
from jaxpfl.data.population import Population
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine import study_runs as studies
from jaxpfl.experiments.engine.build import (
    build_cohort,
    build_optimizer,
    build_plan,
    check_images,
    read_clients,
)
from jaxpfl.experiments.engine.run_secret import forget, run_id, saved_secret
from jaxpfl.experiments.engine.setting import Result, Tracking
from jaxpfl.experiments.engine.tracking import jsonable
from jaxpfl.experiments.systems.base import Workspace, stamp_of
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig
from jaxpfl.experiments.systems.gan_inversion.evaluator import Judge, inverted, train_judge
from jaxpfl.federated.evaluation import correct_examples
from jaxpfl.federated.query import Execution
from jaxpfl.models.gan import GAN, sample_images
from jaxpfl.privacy.keys import SAMPLE_IMAGES, training_root
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.privacy.plan import Plan

PHASES = ("bug", "fixed")
SIDES = ("low", "high")

_SHOWN_IMAGES = 64
# Of the squared norm of what a client says of its accuracy; the rest gives the mean.
_HISTOGRAM_SHARE = 0.8
_LEAST_SHARE = 0.05
# The histograms that a phase's GANs depend on; the last says how many match.
_KNOWN = {"bug": ("before", "bug"), "fixed": ("before",)}


@dataclass(frozen=True)
class _Scored:
    scores: dict[str, float]

    def result(self) -> dict[str, float]:
        return self.scores


@dataclass(frozen=True)
class _Look:
    """Draws images from a GAN and judges them: no private data enters."""

    gan: GAN
    judge: Judge
    number: int
    key: jax.Array
    name: str = "images that it draws"

    def __call__(self, params: Any) -> _Scored:
        return _Scored(self.judge.score(sample_images(self.gan, params, self.key, self.number)))


def prepare(config: GanInversionConfig) -> "_Study":
    """Reads the clients and builds all that can be refused, before a directory is touched."""
    clients = read_clients(config.data)
    check_images(clients, config.gan.image_shape, config.classifier.classes)
    parts = clients.split(dataclasses.asdict(config.data.split), seed=config.data.split_seed)
    private, public = parts["train"], parts["public"]
    if not public.num_examples:
        raise InputError("data.split.public: no client is public: give it a larger share")
    study = _Study(config, private, public)
    if config.scaled_up is not None:
        for share in (1.0, _LEAST_SHARE):
            studies.at_scale(config.scaled_up, {"": study.plan(share)})
    return study


@dataclass(frozen=True)
class _Study:
    config: GanInversionConfig
    private: Population = field(repr=False)
    public: Population = field(repr=False)

    def plan(self, share: float) -> Plan:
        """So many clients a round that `training.clients_per_round` of them match.

        Args:
          share: of clients who match; PUBLIC, from a release.
        """
        training = self.config.training
        sampled = min(len(self.private), round(training.clients_per_round / share))
        sampled_training = dataclasses.replace(training, clients_per_round=sampled)
        return build_plan(self.config.privacy, sampled_training, len(self.private))

    @cached_property
    def gan(self) -> GAN:
        settings = self.config.gan
        return GAN(
            image_shape=settings.image_shape,
            width=settings.width,
            noise=settings.noise,
            loss=settings.loss,
        )

    def algorithm(self, share: float) -> Algorithm:
        """For a selection that a public `share` of the clients matches."""
        settings, training = self.config.gan, self.config.training
        server = training.server
        # The sum is divided by all who were sampled: this makes it the mean of those who match.
        server = dataclasses.replace(server, learning_rate=server.learning_rate / share)
        return fed_avg_gan(
            self.gan,
            client=build_optimizer(training.client),
            generator=build_optimizer(settings.generator),
            server=build_optimizer(server),
            plan=self.plan(share),
            cohort=build_cohort(training),
            generator_training=GeneratorTraining(
                settings.generator_steps, settings.generator_batch
            ),
            execution=Execution(chunk=training.chunk),
        )

    def carry_out(self, workspace: Workspace) -> dict[str, Any]:
        """Does what is left to do in the directory."""
        config, directory, shown = self.config, workspace.directory, workspace.progress
        ledger = directory / "ledger.jsonl"
        if config.privacy.ledger is not None:
            ledger = Path(config.privacy.ledger)
        phases = {
            "bug": invert_pixels(self.private, config.bug.probability, config.bug.seed),
            "fixed": self.private,
        }
        judge, judged_by = train_judge(config, self.public, directory)
        before = self._metrics("before", self.private, judge, directory, ledger)
        # Checked before the next release is paid for.
        thresholds = self._thresholds(before)
        during = self._metrics("bug", phases["bug"], judge, directory, ledger)
        metrics = {"before": before, "bug": during}
        runs, shares, priors = {}, {}, {}
        for phase in PHASES:
            for side in SIDES:
                name = f"{phase}_{side}"
                held = self._selected(phases[phase], side, judge, thresholds)
                # After the fix the clients are as they were before the bug.
                shares[name] = _share(metrics[_KNOWN[phase][-1]], side, thresholds)
                known = () if thresholds is None else _KNOWN[phase]
                prior = priors[name] = [metrics[each]["run"] for each in known]
                runs[name] = self._run(
                    name, shares[name], held, judge, judged_by, directory, ledger, prior, shown
                )
        statements = {
            name: studies.restate(result.out, ledger, priors[name]) for name, result in runs.items()
        }
        record = self._record(judge, metrics, thresholds, runs, shares, directory, ledger)
        for name, run in record["runs"].items():
            run["privacy"] = statements[name]
        return record

    def _histograms_behind(self, name: str) -> list[float]:
        """Noise multipliers of the histograms that a GAN depends on: none by example."""
        if self.config.selection.by == "example" or not self.config.privacy.private:
            return []
        return [self._metrics_plan.noise_multiplier] * len(_KNOWN[name.partition("_")[0]])

    @cached_property
    def _metrics_plan(self) -> MetricsPlan:
        privacy, settings = self.config.privacy, self.config.selection
        shared: dict[str, Any] = {
            "population": len(self.private),
            "edges": settings.edges,
            "histogram_share": _HISTOGRAM_SHARE,
        }
        if settings.epsilon is None or privacy.delta is None:
            return MetricsPlan.without_privacy(**shared)
        return MetricsPlan.calibrated(epsilon=settings.epsilon, delta=privacy.delta, **shared)

    def _metrics(
        self, name: str, population: Population, judge: Judge, directory: Path, ledger: Path
    ) -> dict[str, Any]:
        """The private histogram of users' accuracy: read where it was released, else made."""
        path = directory / "releases" / f"accuracy_{name}.json"
        path.parent.mkdir(exist_ok=True)
        plan, settings = self._metrics_plan, self.config.selection
        budget = studies.budget_of(self.config.privacy)
        private = files.private_directory(directory / "private")
        secret_path = private / f"accuracy_{name}_secret.json"
        with Ledger(ledger, population, budget=budget) as opened:
            if path.exists():
                record = files.read_json(path)
                # A ledger cut off after the release would be charged too little.
                opened.verify(record["ledger_head"])
                if record["plan"] != jsonable(plan.to_dict()):
                    raise InputError(f"{path}: is of another plan than the config's")
                forget(secret_path)
                return record
            run_config = self.config.run
            secret = saved_secret(
                secret_path,
                reproducible_seed=run_config.seed if run_config.reproducible_noise else None,
                purpose=f"accuracy {name}",
            )
            run = f"accuracy of users, {name} {run_id(secret)}"
            released = release(
                population,
                plan,
                correct=correct_examples(judge.classifier, judge.params, population),
                ledger=opened,
                secret=secret,
                run=run,
            )
            head = opened.head
        record = jsonable(
            {
                "run": run,
                "stamp": stamp_of(directory),
                **released.to_dict(),
                "accuracy": released.accuracy(),
                "low": released.percentile(settings.low),
                "high": released.percentile(settings.high),
                "ledger_head": head,
            }
        )
        files.write_atomically(path, json.dumps(record, indent=1) + "\n")
        forget(secret_path)
        return record

    def _thresholds(self, before: dict[str, Any]) -> dict[str, float] | None:
        """From the histogram before the bug: post-processing of a release."""
        if self.config.selection.by == "example":
            return None
        found = {side: before[side] for side in SIDES}
        if None in found.values():
            raise InputError(
                "the private histogram of users' accuracy is all noise: too few clients for "
                f"selection.epsilon = {self.config.selection.epsilon:g}"
            )
        return found

    def _selected(
        self,
        population: Population,
        side: str,
        judge: Judge,
        thresholds: dict[str, float] | None,
    ) -> Population:
        """The clients with the images that a GAN may see; a device does this by itself."""
        settings = self.config.selection
        correct = correct_examples(judge.classifier, judge.params, population)
        if thresholds is None:
            outcome: selection.Outcome = "incorrect" if side == "low" else "correct"
            kept = selection.classified_examples(
                population, correct, outcome, at_least=settings.at_least
            )
        elif side == "low":
            kept = selection.examples_of_users(population, correct, below=thresholds["low"])
        else:
            kept = selection.examples_of_users(population, correct, above=thresholds["high"])
        return selection.select(population, kept)

    def _run(
        self,
        name: str,
        share: float,
        population: Population,
        judge: Judge,
        judged_by: str,
        directory: Path,
        ledger: Path,
        prior: Sequence[str],
        shown: bool,
    ) -> Result:
        config, look = self.config, self.config.look
        algorithm = self.algorithm(share)
        return studies.train(
            config,
            algorithm._replace(name=f"GAN {name.replace('_', ', ')} accuracy"),
            population.with_columns({"image": population.columns["image"]}),
            name=name,
            directory=directory,
            ledger=ledger,
            budget=studies.budget_of(config.privacy),
            tracking=Tracking(
                evaluate=_Look(self.gan, judge, look.images, self._look_key()),
                evaluate_every=look.every,
                checkpoint_every=config.run.checkpoint_every,
                progress=shown,
            ),
            start=judged_by,
            prior=prior,
        )

    def _look_key(self) -> jax.Array:
        return jax.random.fold_in(training_root(self.config.run.seed), SAMPLE_IMAGES)

    def _record(
        self,
        judge: Judge,
        metrics: dict[str, Any],
        thresholds: dict[str, float] | None,
        runs: dict[str, Result],
        shares: dict[str, float],
        directory: Path,
        ledger: Path,
    ) -> dict[str, Any]:
        """Draws the images and judges them; all of it is post-processing."""
        config = self.config
        found, pictures = {}, {}
        for name, result in runs.items():
            images = sample_images(
                self.gan, result.params, self._look_key(), max(config.look.images, _SHOWN_IMAGES)
            )
            pictures[name] = np.round(255 * images[:_SHOWN_IMAGES]).astype(np.uint8)
            plan = self.plan(shares[name])
            found[name] = {
                **judge.score(images),
                "share": shares[name],
                "epsilon": result.metrics["epsilon"],
                "plan": plan.to_dict(),
            }
        # The judge's own examples: what normal and inverted images look like to it.
        public = np.asarray(self.public.columns["image"][:_SHOWN_IMAGES])
        for name, images in (("public", public), ("public_inverted", inverted(public))):
            pictures[name] = _as_bytes(images)
        files.write_atomically(directory / "images.npz", files.npz(pictures))
        return {
            "population": self.private.name,
            "unit": self.private.unit,
            "selection": dataclasses.asdict(config.selection),
            "bug": dataclasses.asdict(config.bug),
            "classifier": {"accuracy": judge.accuracy},
            "accuracy": metrics,
            "thresholds": thresholds,
            "runs": found,
            "selected_per_round": config.training.clients_per_round,
            "composed_guarantee": studies.composed_guarantee(
                [ledger], config.privacy.delta, stamp_of(directory)
            ),
            "at_scale": studies.at_scale(
                config.scaled_up,
                {name: self.plan(share) for name, share in shares.items()},
                {name: self._histograms_behind(name) for name in shares},
            ),
        }


def _share(released: dict[str, Any], side: str, thresholds: dict[str, float] | None) -> float:
    """How many clients match, as a private histogram says: post-processing, public.

    Within bounds, so that noise cannot ask for everyone. By example nearly everyone matches.
    """
    if thresholds is None:
        return 1.0
    counts = np.maximum(np.asarray(released["histogram"]), 0.0)
    if not counts.sum() > 0:
        return _LEAST_SHARE
    below = np.concatenate([np.zeros(1), np.cumsum(counts)])
    under = float(np.interp(thresholds[side], released["plan"]["edges"], below)) / below[-1]
    return float(np.clip(under if side == "low" else 1.0 - under, _LEAST_SHARE, 1.0))


def _as_bytes(images: np.ndarray) -> np.ndarray:
    return images if images.dtype == np.uint8 else np.round(255 * images).astype(np.uint8)
