"""The study of inverted pixels: federated GANs reveal what a classifier gets wrong.

Source: Augenstein et al. 2020, section 6 and appendix C. A classifier's accuracy drops, but nobody
may look at the images. GANs are trained under differential privacy, on the data that it gets wrong
and right (`selection.by`), with the bug and again after its fix, and compared.

Everything concerns the same clients, happens in this order and is charged to one ledger:

    before the bug    a private histogram of users' accuracy, which gives the thresholds
    with the bug      a second histogram; GANs "bug_low" and "bug_high"
    after the fix     GANs "fixed_low" and "fixed_high"

If slices are selected instead of clients, counts take the histograms' place, and the second says
which slices; for random examples nothing is counted, and the GANs are "bug_random", "fixed_random".

    artifacts/         models of the evaluator, generated images
    runs/NAME/         the run of each GAN, with a report of its own
    ledger.jsonl       unless `privacy.ledger` names another one
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg_gan import fed_avg_gan
from jaxpfl.algorithms.federated_metrics import (
    COLUMN,
    MetricsPlan,
    federated_metrics,
    federated_sums,
    plan_of_everyone,
)
from jaxpfl.data.corruptions import invert_pixels
from jaxpfl.data.population import Population
from jaxpfl.data.selection import examples_of_slice
from jaxpfl.errors import InputError
from jaxpfl.experiments.engine import build, description
from jaxpfl.experiments.engine.evaluate import check_examples
from jaxpfl.experiments.systems import base
from jaxpfl.experiments.systems.gan_inversion.config import Config
from jaxpfl.experiments.systems.workspace import at_scale
from jaxpfl.federated.audits.rehearsal import column, rehearse
from jaxpfl.models.classifiers import classifier_cnn
from jaxpfl.privacy.guarantee import Guarantee
from jaxpfl.privacy.plan import Plan

PHASES = ("bug", "fixed")
SIDES = ("low", "high")
COUNTED = ("before", "bug")
"""When accuracies are released: after the fix the clients are as they were before the bug."""

LEAST_SHARE = 0.05
"""The least share of matching clients that a GAN's rounds are planned for."""

# Of the histogram's bins, which are narrow where a fair classifier's accuracies on users lie.
_EDGES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.84, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0)
# The histogram's share of the squared norm of a client's contribution; the rest is the mean's.
_HISTOGRAM_SHARE = 0.8


@dataclass(frozen=True)
class Study(base.Study):
    """The accuracies and the GANs, of private clients; `public`: the clients declared public."""

    config: Config
    public: Any = field(default=None, repr=False)

    @cached_property
    def plans(self) -> dict[str, Plan]:
        gan = {"GAN": self.gan_plan(1.0)}
        return {"accuracy": self.release, **gan} if self.counted else gan

    @property
    def gans(self) -> tuple[str, ...]:
        sides = ("random",) if self.config.selection.by == "random" else SIDES
        return tuple(f"{phase}_{side}" for phase in PHASES for side in sides)

    @property
    def counted(self) -> tuple[str, ...]:
        """When accuracies are released."""
        return () if self.config.selection.by == "random" else COUNTED

    @property
    def shares(self) -> tuple[float, ...]:
        """The largest and least share of clients that may match; 1 unless clients are selected."""
        return (1.0, LEAST_SHARE) if self.config.selection.by == "client" else (1.0,)

    def clients_in(self, phase: str) -> Population:
        """The clients with the bug, or before it and after its fix."""
        bug, clients, column = self.config.bug, self.clients, self.config.selection.column
        if phase != "bug":
            return clients
        struck = None
        if bug.value is not None and column is not None:
            struck = examples_of_slice(clients, column, bug.value)
        return invert_pixels(clients, bug.probability, self.config.run.seed, struck)

    @cached_property
    def accuracy_plan(self) -> MetricsPlan:
        """What a release of users' accuracy contains and costs."""
        privacy, settings = self.config.privacy, self.config.selection
        shared: Any = {"population": len(self.clients), "edges": _EDGES}
        shared["histogram_share"] = _HISTOGRAM_SHARE
        if settings.epsilon is None or privacy.delta is None:
            return MetricsPlan.without_privacy(**shared)
        return MetricsPlan.calibrated(epsilon=settings.epsilon, delta=privacy.delta, **shared)

    @cached_property
    def release(self) -> Plan:
        """The plan of a release of accuracies: of users, or of slices."""
        privacy, settings = self.config.privacy, self.config.selection
        if settings.by != "slice":
            return self.accuracy_plan.release
        # No client counts more examples than that.
        most = self.config.training.max_examples
        return plan_of_everyone(len(self.clients), most, settings.epsilon, privacy.delta)

    def accuracy(self) -> Algorithm:
        settings = self.config.selection
        if settings.by != "slice":
            return federated_metrics(self.accuracy_plan)
        most = self.config.training.max_examples
        return federated_sums(self.release, length=2 * len(settings.slices), max_examples=most)

    def gan_plan(self, share: float) -> Plan:
        """A plan whose rounds expect `training.clients_per_round` clients of this PUBLIC share."""
        training, number = self.config.training, len(self.clients)
        sampled = min(number, round(training.clients_per_round / share))
        planned = dataclasses.replace(training, clients_per_round=sampled)
        return build.build_plan(self.config.privacy, planned, number)

    def gan(self, share: float) -> Algorithm:
        """The training of a GAN under `gan_plan`, on what this share of the clients holds."""
        settings, training = self.config.gan, self.config.training
        # The sum is divided by the number of sampled clients; this makes it the mean of the
        # matching ones.
        rate = training.server.learning_rate / share
        server = dataclasses.replace(training.server, learning_rate=rate)
        return fed_avg_gan(
            settings.model,
            client=build.build_optimizer(training.client),
            generator=build.build_optimizer(settings.generator_optimizer),
            server=build.build_optimizer(server),
            plan=self.gan_plan(share),
            cohort=build.build_cohort(training),
            generator_training=settings.generator,
            execution=build.build_execution(training),
        )

    def at_scale(self, plans: Sequence[Plan], what: str = "everything") -> dict[str, Guarantee]:
        """The cost at `scaled_up` of GANs with these plans, and of the releases of accuracies."""
        histograms = [self.release.noise_multiplier] * len(self.counted)
        return at_scale(what, self.config.scaled_up, plans, histograms)

    def describe(self) -> description.Description:
        """Costs are stated for the least and for the largest share of clients that may match."""
        settings, selection = self.config.gan.model, self.config.selection
        with description.tracing("the classifier"):
            classifier = classifier_cnn(settings.image_shape, self.config.classifier.classes)
            models = {"classifier": description.Sized.of("CNN", description.shapes_of(classifier))}
        with description.tracing("a round of a GAN"):
            shapes = description.shapes_of(settings)
            for part in ("generator", "critic"):
                models[part] = description.Sized.of(f"width {settings.width:g}", shapes[part])
            images = {"image": column(settings.image_shape, np.float32)}
            rounds = {"each GAN": rehearse(lambda: self.gan(1.0), images)}
        plan, releases = self.release, {}
        if self.counted:
            read = {"correct": column((), np.bool_)}
            if selection.by == "slice":
                read = {COLUMN: column((2 * len(selection.slices),), np.float32)}
            rounds = {"accuracy": rehearse(self.accuracy, read), **rounds}
            what = "counts by slice" if selection.by == "slice" else "histograms of users' accuracy"
            releases[f"each of two {what}"] = description.PlannedRelease(
                plan.guarantee(), "once, of everyone", plan.noise_multiplier, (plan,)
            )
        number = {2: "two", 4: "four"}[len(self.gans)]
        for share in self.shares:
            matching = f", if {share:.0%} of the clients match" if len(self.shares) > 1 else ""
            rounds_of = description.PlannedRelease.of_rounds(self.gan_plan(share))
            releases[f"each of {number} GANs{matching}"] = rounds_of
        together, most = {}, self.gan_plan(min(self.shares))
        if most.private:
            events = [plan.charge_event()] * len(self.counted) + [most.event()] * len(self.gans)
            together["everything, at most"] = Guarantee.of_events(events, most.delta)
            together |= self.at_scale([most] * len(self.gans), "everything, at most")
        return description.Description(models, rounds, releases, together=together)


def prepare(config: Config) -> Study:
    clients = build.read_clients(config.data)
    classifier = classifier_cnn(config.gan.model.image_shape, config.classifier.classes)
    check_examples(classifier, clients, "data.source")
    parts = build.split_clients(clients, config.data)
    if not parts["public"].num_examples:
        what = f"data.split.public = {config.data.split.public:g} leaves no public client"
        raise InputError(f"{what} with examples: give it a larger share")
    study = Study(config, parts["train"], parts["public"])
    if config.selection.column is not None:
        examples_of_slice(study.clients, config.selection.column, config.selection.slices[0])
    study.at_scale([study.gan_plan(min(study.shares))])
    return study
