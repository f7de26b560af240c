"""FreD: a private Frechet distance from clients' data to public corpora.

plan     what a query of the clients' moments releases, at which noise and at what cost
query    the query itself, and the distances of public corpora from its answer
"""

from jaxpfl.algorithms.fred.plan import FredPlan, Split
from jaxpfl.algorithms.fred.query import (
    FredState,
    MomentNoise,
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
    "MomentNoise",
    "PrivateMoments",
    "Score",
    "Split",
    "fred",
    "moments",
    "private_moments",
    "public_moments",
    "score",
]
