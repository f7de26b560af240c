"""One file or folder per system, each reading like its paper.

fed_avg            DP-FedAvg
fed_sgd            DP-SGD: protects single examples
scaffold           SCAFFOLD: clients correct the drift of their steps
ada_fed_prox       AdaFedProx: a penalty that follows the loss
fed_dyn            FedDyn: clients move a regulariser of their own
fed_buff           FedBuff: clients of different speed send changes of older models
ifca               IFCA: several models, each client trains the one that fits it best
fed_avg_gan        DP-FedAvg-GAN: a critic on clients, a generator on the server
fred               a private Frechet distance from clients' data to public corpora
federated_metrics  accuracies of users and sums of counts, released with privacy
candidate_scores   clients' scores of generated candidates
popri              a language model tuned by clients' scores of its texts
one_look           the same by one release of the clients' moments
chosen_texts       single public texts that one release of the clients' moments chooses
steering           a generator steered by one release of differences of hidden states
private_evolution  synthetic texts that clients vote on, and that the server varies
frechet            the distance itself, from moments
gaussian_moments   moments of embeddings, streaming; mixtures in closed form

Each of the first nine is a function that returns an `Algorithm`, which `jaxpfl.run` runs.
"""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.algorithms import frechet as frechet
    from jaxpfl.algorithms import gaussian_moments as gaussian_moments
    from jaxpfl.algorithms.ada_fed_prox import ada_fed_prox as ada_fed_prox
    from jaxpfl.algorithms.base import Algorithm as Algorithm
    from jaxpfl.algorithms.base import run_rounds as run_rounds
    from jaxpfl.algorithms.candidate_scores import Scorer as Scorer
    from jaxpfl.algorithms.candidate_scores import candidate_scores as candidate_scores
    from jaxpfl.algorithms.fed_avg import FedAvgState as FedAvgState
    from jaxpfl.algorithms.fed_avg import fed_avg as fed_avg
    from jaxpfl.algorithms.fed_avg_gan import GANState as GANState
    from jaxpfl.algorithms.fed_avg_gan import GeneratorTraining as GeneratorTraining
    from jaxpfl.algorithms.fed_avg_gan import fed_avg_gan as fed_avg_gan
    from jaxpfl.algorithms.fed_buff import fed_buff as fed_buff
    from jaxpfl.algorithms.fed_dyn import fed_dyn as fed_dyn
    from jaxpfl.algorithms.fed_sgd import fed_sgd as fed_sgd
    from jaxpfl.algorithms.federated_metrics import MetricsPlan as MetricsPlan
    from jaxpfl.algorithms.federated_metrics import federated_metrics as federated_metrics
    from jaxpfl.algorithms.fred import FredPlan as FredPlan
    from jaxpfl.algorithms.fred import fred as fred
    from jaxpfl.algorithms.ifca import ifca as ifca
    from jaxpfl.algorithms.one_look import MomentRewards as MomentRewards
    from jaxpfl.algorithms.popri import PopriSettings as PopriSettings
    from jaxpfl.algorithms.popri import popri as popri
    from jaxpfl.algorithms.private_evolution import EvolutionSettings as EvolutionSettings
    from jaxpfl.algorithms.private_evolution import private_evolution as private_evolution
    from jaxpfl.algorithms.scaffold import scaffold as scaffold

__getattr__, __dir__, __all__ = lazy.face(__name__)
