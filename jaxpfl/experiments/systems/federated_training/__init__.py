"""A model trained by DP-FedAvg, perhaps from a public corpus that FreD chose."""

from jaxpfl.experiments.systems.base import LazySystem
from jaxpfl.experiments.systems.federated_training.config import Config

SYSTEM = LazySystem("federated_training", Config, __name__)
