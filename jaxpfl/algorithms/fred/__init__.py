"""FreD: a private Frechet distance from clients' data to public corpora.

plan     what a query of clients' moments does and costs
query    the query, and the candidates' distances
"""

from jaxpfl.algorithms.fred.plan import FredPlan, Split
from jaxpfl.algorithms.fred.query import (
    LABEL,
    Noise,
    PrivateMoments,
    Score,
    private_moments,
    public_moments,
    require_affordable,
    score,
)

__all__ = [
    "LABEL",
    "FredPlan",
    "Noise",
    "PrivateMoments",
    "Score",
    "Split",
    "private_moments",
    "public_moments",
    "require_affordable",
    "score",
]
