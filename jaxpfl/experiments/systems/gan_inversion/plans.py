"""The study's releases: users' accuracy, and the rounds of each GAN, for a number of clients."""

import dataclasses
from typing import Any

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg_gan import fed_avg_gan
from jaxpfl.algorithms.federated_metrics import MetricsPlan
from jaxpfl.experiments.engine.build import (
    build_cohort,
    build_execution,
    build_optimizer,
    build_plan,
)
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig
from jaxpfl.privacy.plan import Plan

LEAST_SHARE = 0.05
"""The least share of matching clients that a GAN's rounds are planned for."""

# The histogram's share of the squared norm of a client's contribution; the rest is the mean's.
_HISTOGRAM_SHARE = 0.8


def accuracy_plan(config: GanInversionConfig, clients: int) -> MetricsPlan:
    """What a release of users' accuracy contains and costs."""
    privacy, settings = config.privacy, config.selection
    shared: dict[str, Any] = {
        "population": clients,
        "edges": settings.edges,
        "histogram_share": _HISTOGRAM_SHARE,
    }
    if settings.epsilon is None or privacy.delta is None:
        return MetricsPlan.without_privacy(**shared)
    return MetricsPlan.calibrated(epsilon=settings.epsilon, delta=privacy.delta, **shared)


def gan_plan(config: GanInversionConfig, clients: int, share: float) -> Plan:
    """A plan whose rounds expect `training.clients_per_round` matching clients.

    Args:
      share: the share of clients that match; PUBLIC, because it comes from a release.
    """
    sampled = min(clients, round(config.training.clients_per_round / share))
    training = dataclasses.replace(config.training, clients_per_round=sampled)
    return build_plan(config.privacy, training, clients)


def gan(config: GanInversionConfig, plan: Plan, share: float) -> Algorithm:
    """The training of a GAN under `gan_plan`, on what this share of the clients holds."""
    settings, training = config.gan, config.training
    # The sum is divided by the number of sampled clients; this makes it the mean of the matching
    # ones.
    server = dataclasses.replace(
        training.server, learning_rate=training.server.learning_rate / share
    )
    return fed_avg_gan(
        settings.model,
        client=build_optimizer(training.client),
        generator=build_optimizer(settings.generator_optimizer),
        server=build_optimizer(server),
        plan=plan,
        cohort=build_cohort(training),
        generator_training=settings.generator,
        execution=build_execution(training),
    )
