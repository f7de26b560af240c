"""Federated training: DP-FedAvg, with FreD's choice of a public corpus before it."""

from jaxpfl.experiments.systems.base import System
from jaxpfl.experiments.systems.federated_training.config import Config

SYSTEM = System("federated_training", Config, __name__)
