"""One file per system, each reading like its paper.

fed_avg            DP-FedAvg
fed_avg_gan        DP-FedAvg-GAN: a critic on clients, a generator on the server
fred               a private Frechet distance from clients' data to public corpora
frechet            the distance itself, from moments
candidate_scores   clients' scores of generated candidates, released with privacy
federated_metrics  accuracies of slices and of users, released with privacy
gaussian_moments   moments of embeddings, streaming; mixtures in closed form
"""

from jaxpfl.algorithms import (
    candidate_scores,
    federated_metrics,
    frechet,
    fred,
    gaussian_moments,
)
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg import FedAvgState, fed_avg
from jaxpfl.algorithms.fed_avg_gan import GANState, fed_avg_gan

__all__ = [
    "Algorithm",
    "FedAvgState",
    "GANState",
    "candidate_scores",
    "fed_avg",
    "fed_avg_gan",
    "federated_metrics",
    "frechet",
    "fred",
    "gaussian_moments",
]
