"""One file or folder per system, each reading like its paper.

fed_avg            DP-FedAvg
fed_avg_gan        DP-FedAvg-GAN: a critic on clients, a generator on the server
fred               a private Frechet distance from clients' data to public corpora
federated_metrics  accuracies of slices and of users, released with privacy
candidate_scores   clients' scores of generated candidates
popri              a language model tuned by clients' scores of what it writes
private_evolution  synthetic texts that clients vote on, and that the server varies
frechet            the distance itself, from moments
gaussian_moments   moments of embeddings, streaming; mixtures in closed form

Each of the first seven is a function that returns an `Algorithm`, which `jaxpfl.run` runs.
"""

from jaxpfl.algorithms import frechet, gaussian_moments
from jaxpfl.algorithms.base import Algorithm, run_rounds
from jaxpfl.algorithms.candidate_scores import Scorer, candidate_scores
from jaxpfl.algorithms.fed_avg import FedAvgState, fed_avg
from jaxpfl.algorithms.fed_avg_gan import GANState, GeneratorTraining, fed_avg_gan
from jaxpfl.algorithms.federated_metrics import MetricsPlan, federated_metrics
from jaxpfl.algorithms.fred import FredPlan, fred
from jaxpfl.algorithms.popri import PopriSettings, popri
from jaxpfl.algorithms.private_evolution import EvolutionSettings, private_evolution

__all__ = [
    "Algorithm",
    "EvolutionSettings",
    "FedAvgState",
    "FredPlan",
    "GANState",
    "GeneratorTraining",
    "MetricsPlan",
    "PopriSettings",
    "Scorer",
    "candidate_scores",
    "fed_avg",
    "fed_avg_gan",
    "federated_metrics",
    "frechet",
    "fred",
    "gaussian_moments",
    "popri",
    "private_evolution",
    "run_rounds",
]
