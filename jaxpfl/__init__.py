"""Private federated learning in JAX: simulate it, measure it, trust it.

The parts that everyone uses have short names here:

    jp.data.open            clients and what they hold
    jp.Plan                 what a run costs in privacy, and the only maker of its noise
    jp.models               networks
    jp.algorithms           one per paper
    jp.run                  from an algorithm and clients to a finished run directory
    jp.release              one noisy sum, without an algorithm
    jp.secure_release       the same with noise shares of the clients, as under secure aggregation
    jp.track                follows runs with Weights & Biases, MLflow, Trackio or your own

Names are loaded when they are first used, so that `jaxpfl --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpfl import algorithms, data, federated, models, privacy, text
    from jaxpfl.data.cohort import CohortSpec
    from jaxpfl.errors import BudgetExhausted, CorruptFile, InputError, RunLocked
    from jaxpfl.experiments.engine.evaluate import DeclaredPublic, Evaluator
    from jaxpfl.experiments.engine.trackers import track
    from jaxpfl.experiments.run import Result, run
    from jaxpfl.federated.client import ClientSteps
    from jaxpfl.federated.one_release import OneRelease, release
    from jaxpfl.federated.query import Execution, Query
    from jaxpfl.federated.secure_release import SecureRelease, secure_release
    from jaxpfl.privacy.clipping import AdaptiveClip, Clip
    from jaxpfl.privacy.gaussian import Noise
    from jaxpfl.privacy.ledger import Budget, Ledger
    from jaxpfl.privacy.participation import Cyclic, FixedSize, Poisson
    from jaxpfl.privacy.plan import Plan
    from jaxpfl.privacy.secure_sum import SecureSum

__all__ = [
    "AdaptiveClip",
    "Budget",
    "BudgetExhausted",
    "ClientSteps",
    "Clip",
    "CohortSpec",
    "CorruptFile",
    "Cyclic",
    "DeclaredPublic",
    "Evaluator",
    "Execution",
    "FixedSize",
    "InputError",
    "Ledger",
    "Noise",
    "OneRelease",
    "Plan",
    "Poisson",
    "Query",
    "Result",
    "RunLocked",
    "SecureRelease",
    "SecureSum",
    "algorithms",
    "data",
    "federated",
    "models",
    "privacy",
    "release",
    "run",
    "secure_release",
    "text",
    "track",
]

_MODULES = {"algorithms", "data", "federated", "models", "privacy", "text"}
_HOMES = {
    "AdaptiveClip": "privacy.clipping",
    "Budget": "privacy.ledger",
    "BudgetExhausted": "errors",
    "ClientSteps": "federated.client",
    "Clip": "privacy.clipping",
    "CohortSpec": "data.cohort",
    "CorruptFile": "errors",
    "Cyclic": "privacy.participation",
    "DeclaredPublic": "experiments.engine.evaluate",
    "FixedSize": "privacy.participation",
    "Evaluator": "experiments.engine.evaluate",
    "Execution": "federated.query",
    "InputError": "errors",
    "Ledger": "privacy.ledger",
    "Noise": "privacy.gaussian",
    "OneRelease": "federated.one_release",
    "Plan": "privacy.plan",
    "Poisson": "privacy.participation",
    "Query": "federated.query",
    "Result": "experiments.run",
    "RunLocked": "errors",
    "SecureRelease": "federated.secure_release",
    "SecureSum": "privacy.secure_sum",
    "release": "federated.one_release",
    "run": "experiments.run",
    "secure_release": "federated.secure_release",
    "track": "experiments.engine.trackers",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jaxpfl.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"jaxpfl.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'jaxpfl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
