"""How well a model does on private clients, as one release with user-level privacy.

plan     what a release of metrics does and costs
query    the release, and what is computed from it
"""

from jaxpfl.algorithms.federated_metrics.plan import TWENTIETHS, MetricsPlan
from jaxpfl.algorithms.federated_metrics.query import (
    LABEL,
    ClientMetrics,
    Metrics,
    SliceMetric,
    release,
)

__all__ = [
    "LABEL",
    "TWENTIETHS",
    "ClientMetrics",
    "Metrics",
    "MetricsPlan",
    "SliceMetric",
    "release",
]
