"""Inverted pixels: federated GANs show what a classifier's errors are made of."""

from jaxpfl.experiments.systems.base import System
from jaxpfl.experiments.systems.gan_inversion.config import GanInversionConfig

SYSTEM = System("gan_inversion", GanInversionConfig, __name__)
