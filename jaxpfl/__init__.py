"""Private federated learning in JAX: simulate it, measure it, trust it.

The parts that everyone uses have short names here:

    jp.data.open            clients and what they hold
    jp.Plan                 what a run costs in privacy, and the only maker of its noise
    jp.models               networks
    jp.algorithms           one per paper
    jp.run                  from an algorithm and clients to a finished run directory
"""

from jaxpfl import algorithms, data, federated, models, privacy, text
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, RunLocked
from jaxpfl.experiments.run import Result, run
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.plan import AdaptiveClip, Plan

__all__ = [
    "AdaptiveClip",
    "Budget",
    "BudgetExhausted",
    "CohortSpec",
    "CorruptFile",
    "InputError",
    "Ledger",
    "Plan",
    "Result",
    "RunLocked",
    "algorithms",
    "data",
    "federated",
    "models",
    "privacy",
    "run",
    "text",
]
