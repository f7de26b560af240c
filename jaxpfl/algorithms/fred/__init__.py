"""FreD: a private Frechet distance from clients' data to public corpora.

plan      what a query of the clients' moments releases, at which noise and at what cost
query     the query itself
scores    the distances of public corpora from its answer, how certain they are, and the mixture of
          corpora that is nearest
"""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.algorithms.fred.plan import FredPlan as FredPlan
    from jaxpfl.algorithms.fred.query import FredState as FredState
    from jaxpfl.algorithms.fred.query import MomentNoise as MomentNoise
    from jaxpfl.algorithms.fred.query import PrivateMoments as PrivateMoments
    from jaxpfl.algorithms.fred.query import by_embedding as by_embedding
    from jaxpfl.algorithms.fred.query import by_label as by_label
    from jaxpfl.algorithms.fred.query import fred as fred
    from jaxpfl.algorithms.fred.query import moments as moments
    from jaxpfl.algorithms.fred.query import private_moments as private_moments
    from jaxpfl.algorithms.fred.query import public_moments as public_moments
    from jaxpfl.algorithms.fred.query import used_examples as used_examples
    from jaxpfl.algorithms.fred.scores import BestMixture as BestMixture
    from jaxpfl.algorithms.fred.scores import Score as Score
    from jaxpfl.algorithms.fred.scores import best_mixture as best_mixture
    from jaxpfl.algorithms.fred.scores import score as score

__getattr__, __dir__, __all__ = lazy.face(__name__)
