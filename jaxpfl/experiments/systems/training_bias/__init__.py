"""Training bias: a private language model shows what public training data lacks."""

from jaxpfl.experiments.systems.base import System
from jaxpfl.experiments.systems.training_bias.config import TrainingBiasConfig

SYSTEM = System("training_bias", TrainingBiasConfig, __name__)
