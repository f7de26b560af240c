"""A chosen public corpus: single public texts, chosen by one release of clients' moments."""

from jaxpfl.experiments.systems.base import System
from jaxpfl.experiments.systems.chosen_corpus.config import Config

SYSTEM = System("chosen_corpus", Config, __name__)
