"""One file per system, each reading like its paper."""

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.fed_avg import FedAvgState, fed_avg

__all__ = ["Algorithm", "FedAvgState", "fed_avg"]
