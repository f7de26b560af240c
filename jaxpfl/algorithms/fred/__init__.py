"""FreD: a private Frechet distance from clients' data to public corpora.

plan     what a query of clients' moments does and costs
query    the query, and the candidates' distances
"""

from jaxpfl.algorithms.fred.plan import FredPlan, Split
from jaxpfl.algorithms.fred.query import (
    FredState,
    Noise,
    PrivateMoments,
    Score,
    fred,
    moments,
    private_moments,
    public_moments,
    score,
)

__all__ = [
    "FredPlan",
    "FredState",
    "Noise",
    "PrivateMoments",
    "Score",
    "Split",
    "fred",
    "moments",
    "private_moments",
    "public_moments",
    "score",
]
