"""The accuracy of a model on private clients, measured by one release with user-level privacy.

plan     what is released, at which noise and at what cost
query    the release itself, and what is computed from it
"""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.algorithms.federated_metrics.plan import TWENTIETHS as TWENTIETHS
    from jaxpfl.algorithms.federated_metrics.plan import MetricsPlan as MetricsPlan
    from jaxpfl.algorithms.federated_metrics.query import ClientMetrics as ClientMetrics
    from jaxpfl.algorithms.federated_metrics.query import MetricsState as MetricsState
    from jaxpfl.algorithms.federated_metrics.query import ReleasedMetrics as ReleasedMetrics
    from jaxpfl.algorithms.federated_metrics.query import SliceMetric as SliceMetric
    from jaxpfl.algorithms.federated_metrics.query import federated_metrics as federated_metrics
    from jaxpfl.algorithms.federated_metrics.query import metrics as metrics
    from jaxpfl.algorithms.federated_metrics.query import release as release
    from jaxpfl.algorithms.federated_metrics.query import with_metrics as with_metrics

__getattr__, __dir__, __all__ = lazy.face(__name__)
