"""What a release costs, and why it is safe.

plan          the one object that fixes sampling, clipping, noise, accounting; start here
ledger        write-ahead record of every release on a source of clients, with a hard budget
chain         its file: sealed lines that only grow
budget        what releases cost together, and whether another one fits
sources       its clients: marks and sketches under its secret
accounting    from events to epsilon (PLD, RDP), and back to a noise multiplier
confirmation  second accountants that share no code with the first
published     epsilons as papers print them, and why they do not hold
events        the kinds of release, and their form in a file
sampling      who takes part in a round
clipping      what bounds a client's influence
mechanisms    the noise
keys          where randomness comes from
"""

from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.plan import AdaptiveClip, Plan

__all__ = ["AdaptiveClip", "Budget", "Ledger", "Plan"]
