"""The study of synthetic text: how much private clients improve a downstream model."""

from jaxpfl.experiments.systems.base import LazySystem
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig

SYSTEM = LazySystem("synthetic_text", SyntheticTextConfig, __name__)
