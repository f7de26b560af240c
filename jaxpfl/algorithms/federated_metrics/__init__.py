"""How well a model does on private clients, as one release with user-level privacy.

plan     what a release of metrics does and costs
query    the release, and what is computed from it
"""

from jaxpfl.algorithms.federated_metrics.plan import TWENTIETHS, MetricsPlan
from jaxpfl.algorithms.federated_metrics.query import (
    ClientMetrics,
    Metrics,
    MetricsState,
    SliceMetric,
    federated_metrics,
    metrics,
    release,
    with_metrics,
)

__all__ = [
    "TWENTIETHS",
    "ClientMetrics",
    "Metrics",
    "MetricsPlan",
    "MetricsState",
    "SliceMetric",
    "federated_metrics",
    "metrics",
    "release",
    "with_metrics",
]
