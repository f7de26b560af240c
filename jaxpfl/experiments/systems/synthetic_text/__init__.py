"""Synthetic text: what a downstream model gains from private clients, by method."""

from jaxpfl.experiments.systems.base import LazySystem
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig

SYSTEM = LazySystem("synthetic_text", SyntheticTextConfig, __name__)
