"""What clients hold: populations, the readers that open them, and cohort packing."""

from jaxpfl.data.cohort import Bucket, Cohort, CohortSpec, PackingStats, pack
from jaxpfl.data.open import open
from jaxpfl.data.population import Population, from_clients
from jaxpfl.data.prefetch import prefetch

__all__ = [
    "Bucket",
    "Cohort",
    "CohortSpec",
    "PackingStats",
    "Population",
    "from_clients",
    "open",
    "pack",
    "prefetch",
]
