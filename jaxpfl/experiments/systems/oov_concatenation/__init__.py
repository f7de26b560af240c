"""Joined words: federated language models show a tokenizer's bug."""

from jaxpfl.experiments.systems.base import System
from jaxpfl.experiments.systems.oov_concatenation.config import OovConcatenationConfig

SYSTEM = System("oov_concatenation", OovConcatenationConfig, __name__)
