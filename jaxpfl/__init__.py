"""Private federated learning in JAX: simulate it, measure it, trust it.

The parts that everyone uses have short names here:

    jp.data.open            clients and their data
    jp.Plan                 a run's price in privacy, and the only maker of its noise
    jp.models               networks
    jp.algorithms           one per paper
    jp.run                  from an algorithm and clients to a finished run directory
    jp.load                 a trained model from the folder of `jaxpfl export`
    jp.synthesize           public texts that are like the clients', chosen by one release
    jp.release              one noisy sum, without an algorithm
    jp.secure_release       the same with noise shares of the clients, as under secure aggregation

Names are loaded when they are first used, so that `jaxpfl --help` does not wait for JAX.
"""

import sys
from typing import TYPE_CHECKING

from jaxpfl import lazy

if sys.platform == "win32":
    raise ImportError("jaxpfl runs on Linux and macOS, and not on Windows: use it within WSL 2")

if TYPE_CHECKING:
    from jaxpfl import algorithms as algorithms
    from jaxpfl import data as data
    from jaxpfl import federated as federated
    from jaxpfl import models as models
    from jaxpfl import privacy as privacy
    from jaxpfl import text as text
    from jaxpfl.data.cohort import CohortSpec as CohortSpec
    from jaxpfl.errors import BudgetExhausted as BudgetExhausted
    from jaxpfl.errors import CorruptFile as CorruptFile
    from jaxpfl.errors import InputError as InputError
    from jaxpfl.errors import RunLocked as RunLocked
    from jaxpfl.experiments.engine.by_client import ClientScores as ClientScores
    from jaxpfl.experiments.engine.by_client import Personal as Personal
    from jaxpfl.experiments.engine.evaluate import DeclaredPublic as DeclaredPublic
    from jaxpfl.experiments.engine.evaluate import Evaluator as Evaluator
    from jaxpfl.experiments.engine.setting import KeepBest as KeepBest
    from jaxpfl.experiments.engine.setting import Round as Round
    from jaxpfl.experiments.own_table import synthesize as synthesize
    from jaxpfl.experiments.release import release as release
    from jaxpfl.experiments.run import Result as Result
    from jaxpfl.experiments.run import run as run
    from jaxpfl.federated.clients.client import ClientSteps as ClientSteps
    from jaxpfl.federated.release.query import Execution as Execution
    from jaxpfl.federated.release.query import Query as Query
    from jaxpfl.federated.release.releaser import OneRelease as OneRelease
    from jaxpfl.federated.release.secure_release import secure_release as secure_release
    from jaxpfl.privacy.clipping import AdaptiveClip as AdaptiveClip
    from jaxpfl.privacy.clipping import Clip as Clip
    from jaxpfl.privacy.gaussian import Noise as Noise
    from jaxpfl.privacy.ledger import Budget as Budget
    from jaxpfl.privacy.ledger import Ledger as Ledger
    from jaxpfl.privacy.participation import Cyclic as Cyclic
    from jaxpfl.privacy.participation import CyclicPoisson as CyclicPoisson
    from jaxpfl.privacy.participation import FixedSize as FixedSize
    from jaxpfl.privacy.participation import MinSeparation as MinSeparation
    from jaxpfl.privacy.participation import Poisson as Poisson
    from jaxpfl.privacy.participation import TruncatedPoisson as TruncatedPoisson
    from jaxpfl.privacy.plan import Plan as Plan
    from jaxpfl.privacy.secure_sum import SecureSum as SecureSum
    from jaxpfl.trained import Trained as Trained
    from jaxpfl.trained import load as load

# It loads much of SciPy, 65 MB, for accountants, but most modules need its events alone.
lazy.later("dp_accounting", light="dp_event")

__getattr__, __dir__, __all__ = lazy.face(__name__)
