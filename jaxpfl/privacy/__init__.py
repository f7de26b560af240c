"""What a release costs, and why it is safe.

plan           the one object that fixes clipping, noise, participation, accounting; start here
participation  who takes part in a round, and what a Gaussian of that round costs
clip           what bounds a contribution, as a plan states it
gaussian       the mechanism behind every plan, and the noise that an epsilon needs
guarantee      what releases cost together: epsilon, second accountant, statement
ledger         write-ahead record of every release on a source of clients, with a hard budget
chain          its file: sealed lines that only grow
budget         what releases cost together, and whether another one fits
sources        its clients: marks and sketches under its secret
accounting     from events to epsilon (PLD, RDP), and back to a noise multiplier
confirmation   second accountants that share no code with the first
published      epsilons as papers print them, and why they do not hold
events         the kinds of release, and their form in a file
sampling       draws cohorts
clipping       scales contributions down to the bound
mechanisms     draws the noise
secret         what a run's cohorts, shuffles and noise follow from
keys           where randomness comes from
"""

from jaxpfl.privacy.clip import AdaptiveClip, Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.guarantee import Guarantee, guarantee_of
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.participation import Epochs, FixedSize, Poisson
from jaxpfl.privacy.plan import Plan

__all__ = [
    "AdaptiveClip",
    "Budget",
    "Clip",
    "Epochs",
    "FixedSize",
    "Guarantee",
    "Ledger",
    "Noise",
    "Plan",
    "Poisson",
    "guarantee_of",
]
