"""The accuracy of a model on private clients, measured by one release with user-level privacy.

plan     what is released, at which noise and at what cost
query    the release itself, and what is computed from it
"""

from jaxpfl.algorithms.federated_metrics.plan import TWENTIETHS, MetricsPlan
from jaxpfl.algorithms.federated_metrics.query import (
    ClientMetrics,
    MetricsState,
    ReleasedMetrics,
    SliceMetric,
    federated_metrics,
    metrics,
    release,
    with_metrics,
)

__all__ = [
    "TWENTIETHS",
    "ClientMetrics",
    "MetricsPlan",
    "MetricsState",
    "ReleasedMetrics",
    "SliceMetric",
    "federated_metrics",
    "metrics",
    "release",
    "with_metrics",
]
