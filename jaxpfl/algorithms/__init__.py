"""One file per system, each reading like its paper.

fed_avg           DP-FedAvg
fred              a private Frechet distance from clients' data to public corpora
frechet           the distance itself, from moments
gaussian_moments  moments of embeddings, streaming; mixtures in closed form
"""

from jaxpfl.algorithms import frechet, fred, gaussian_moments
from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg import FedAvgState, fed_avg

__all__ = ["Algorithm", "FedAvgState", "fed_avg", "frechet", "fred", "gaussian_moments"]
