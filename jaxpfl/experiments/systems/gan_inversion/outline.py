"""The outline of a study of inverted pixels: what a dry run checks, see `engine.outline`."""

import numpy as np

from jaxpfl.algorithms.federated_metrics.query import federated_metrics
from jaxpfl.experiments.engine import outline as engine
from jaxpfl.experiments.engine.outline import Clients, Outline, PlannedRelease, tracing
from jaxpfl.experiments.systems import study_runs
from jaxpfl.experiments.systems.gan_inversion import plans
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig
from jaxpfl.federated.audits.rehearsal import column, rehearse
from jaxpfl.models.cnn import classifier_cnn
from jaxpfl.privacy.guarantee import Guarantee

# Two histograms of users' accuracy, and two GANs with the bug and two after its fix.
_HISTOGRAMS, _GANS = 2, 4


def outline(config: GanInversionConfig) -> Outline:
    """What the config describes: the histograms of accuracy and the rounds of the four GANs.

    How many clients a round samples follows from a histogram, which is not released yet, so costs
    are stated for the least and the most.
    """
    clients = Clients.of(config.data)
    settings, by_client = config.gan.model, config.selection.by == "client"
    histogram = plans.accuracy_plan(config, clients.train)
    shares = (1.0, plans.LEAST_SHARE) if by_client else (1.0,)
    found = {share: plans.gan_plan(config, clients.train, share) for share in shares}
    with tracing("the classifier"):
        classifier = classifier_cnn(settings.image_shape, config.classifier.classes)
        models = {"classifier": engine.outlined("CNN", engine.shapes_of(classifier))}
    with tracing("a round of a GAN"):
        shapes = engine.shapes_of(settings)
        for part in ("generator", "critic"):
            models[part] = engine.outlined(f"width {settings.width:g}", shapes[part])
        rounds = {
            "accuracy": rehearse(
                lambda: federated_metrics(histogram),
                {"correct": column((), np.bool_), "slice": column((), np.int32)},
            ),
            "each GAN": rehearse(
                lambda: plans.gan(config, found[1.0], 1.0),
                {"image": column(settings.image_shape, np.float32)},
            ),
        }
    releases = {
        "each of two histograms of users' accuracy": PlannedRelease(
            histogram.plan().guarantee(),
            "once, of everyone",
            histogram.noise_multiplier,
            (histogram.plan(),),
        )
    }
    for share, plan in found.items():
        matching = f", if {share:.0%} of the clients match" if by_client else ""
        releases[f"each of four GANs{matching}"] = engine.rounds_of(plan)
    together, notes = {}, ()
    most = found[shares[-1]]
    if most.private:
        events = [histogram.event()] * _HISTOGRAMS + [most.event()] * _GANS
        together["everything, at most"] = Guarantee.of_events(events, most.delta)
        before = {"GAN": [histogram.noise_multiplier] * _HISTOGRAMS if by_client else []}
        # Of one GAN: the record of the run states all four.
        scaled = study_runs.at_scale(config.scaled_up, {"GAN": most}, before)
        if scaled is not None:
            notes = (
                f"one GAN, scaled up to {scaled['population']:,} clients with "
                f"{scaled['factor']:g} times the clients per round, at most: "
                f"{scaled['composed_guarantee']['statement']}",
            )
    sources = {"data.source": config.data.source}
    return Outline(clients, sources, models, rounds, releases, together, notes)
