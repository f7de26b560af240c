"""A model trained by DP-FedAvg, perhaps from a public corpus that FreD chose."""

from jaxpfl.experiments.systems.base import ExportingSystem
from jaxpfl.experiments.systems.federated_training.config import Config

SYSTEM = ExportingSystem("federated_training", Config, __name__)
