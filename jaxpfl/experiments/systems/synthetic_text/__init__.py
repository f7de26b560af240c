"""The study of synthetic text: how much private clients improve a downstream model."""

from jaxpfl.experiments.systems.base import System
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig

SYSTEM = System("synthetic_text", SyntheticTextConfig, __name__)
