"""The cost of releases in privacy, and the mechanisms that keep it.

plan           fixes clipping, noise, participation and accounting in one object; start here
participation  the kinds of cohorts, and the cost of a round with each; draws cohorts
gaussian       the noise's multiplier and kind
local_trust    the cost of noise that each client adds itself
guarantee      the cost of a composition: epsilon, second accountant, statement, what fits a budget
ledger         write-ahead record of every release on a source of clients, its budget and its key
chain          the ledger's file: an append-only list of lines that are bound by hashes
accounting     from events to epsilon (PLD, RDP), and back to a noise multiplier
confirmation   second accountants that share no code with the first
auditing       lower bounds on epsilon, from an attack on releases
simulated      noise as if more clients took part than there are: no guarantee
events         the kinds of release, and their form in a file
clipping       bounds a client's contribution
mechanisms     draws the noise, in float32
exact_noise    draws it in whole steps, exactly
secure_sum     noise shares of the clients, and the cost of their sum
keys           a run's secret, the keys of all random draws, and a table of what is drawn for
"""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.privacy.clipping import AdaptiveClip as AdaptiveClip
    from jaxpfl.privacy.clipping import Clip as Clip
    from jaxpfl.privacy.gaussian import Noise as Noise
    from jaxpfl.privacy.guarantee import Guarantee as Guarantee
    from jaxpfl.privacy.keys import ReproducibleSeed as ReproducibleSeed
    from jaxpfl.privacy.ledger import Budget as Budget
    from jaxpfl.privacy.ledger import Ledger as Ledger
    from jaxpfl.privacy.ledger import guarantee_of as guarantee_of
    from jaxpfl.privacy.participation import Cyclic as Cyclic
    from jaxpfl.privacy.participation import CyclicPoisson as CyclicPoisson
    from jaxpfl.privacy.participation import FixedSize as FixedSize
    from jaxpfl.privacy.participation import MinSeparation as MinSeparation
    from jaxpfl.privacy.participation import Poisson as Poisson
    from jaxpfl.privacy.participation import TruncatedPoisson as TruncatedPoisson
    from jaxpfl.privacy.plan import Plan as Plan

__getattr__, __dir__, __all__ = lazy.face(__name__)
