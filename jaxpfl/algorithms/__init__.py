"""One file or folder per system, each reading like its paper; its head says which paper that is.

Models are trained by `fed_avg`, `fed_sgd`, `scaffold`, `ada_fed_prox`, `fed_dyn`, `fed_buff`,
`ifca` and `fed_avg_gan`; `fred` and `federated_metrics` measure; `popri`, `private_evolution`,
`chosen_texts` and `steering` give texts, by `candidate_scores` or by `one_look`; `frechet` and
`gaussian_moments` are what several share. A system is a function that returns an `Algorithm`, which
`jaxpfl.run` runs.
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
