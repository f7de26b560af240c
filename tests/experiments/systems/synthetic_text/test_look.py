"""What follows from one look's release: which list of texts is the nearest."""

import numpy as np

from jaxpfl.algorithms.frechet import moments
from jaxpfl.algorithms.fred import FredPlan
from jaxpfl.experiments.systems.synthetic_text.look import EMBEDDING, Look
from jaxpfl.text.embed import embedder
from tests.algorithms.test_one_look import released

NEAR = [f"the senate will vote on bill {number}" for number in range(40)]
FAR = [f"moths and zebras {number}, by a river in the north" for number in range(40)]


def test_the_nearest_texts_are_chosen_where_the_noise_hides_all_distances():
    """Also where there are lists without texts, which are as far as texts can be."""
    function = embedder("hashed:16")
    target = moments(np.asarray(function(NEAR)), 1.0)
    look = Look({EMBEDDING: FredPlan.without_privacy()}, {EMBEDDING: function}, 100)
    for entry in (0.0, 0.5):
        found = look.judged({EMBEDDING: released(target, entry)}, [["", " "], FAR, NEAR], 1)
        assert found["chosen"] == 2
        assert found["distances"][0] == 4.0
    assert found["distances"][1:].tolist() == [0.0, 0.0]
