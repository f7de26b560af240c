"""One look chooses texts: single texts of a public pool, by one release of the clients' moments.

matching  weights on the pool whose moments come near to the clients', by a convex problem's dual;
          and the first form, descent on the Frechet distance itself
choice    how closely the release is followed, what is drawn, and how near it is
"""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.algorithms.chosen_texts.choice import Choice as Choice
    from jaxpfl.algorithms.chosen_texts.choice import choose as choose
    from jaxpfl.algorithms.chosen_texts.matching import Evidence as Evidence
    from jaxpfl.algorithms.chosen_texts.matching import descend as descend

__getattr__, __dir__, __all__ = lazy.face(__name__)
