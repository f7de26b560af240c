"""What a system's rounds released: it is paid for before it is stored."""

import os
from typing import Any

import numpy as np
import pytest

from jaxpfl.errors import BudgetExhausted
from jaxpfl.experiments.engine.releases import Releases
from jaxpfl.experiments.records.artifacts import Artifacts

MADE = {"x": np.arange(2.0)}


def test_nothing_of_a_release_that_is_not_paid_for_is_written(tmp_path):
    """TRUST 30, 34: what was released is confirmed first."""

    class Releaser:
        paid = False

        def confirm(self):
            if not self.paid:
                raise BudgetExhausted("no")

    releaser: Any = Releaser()
    releases = Releases(Artifacts(tmp_path, run="run a"), "run a", releaser=releaser)
    with pytest.raises(BudgetExhausted):
        releases.load_or_compute("scores", lambda: MADE)
    assert os.listdir(tmp_path) == []
    releaser.paid = True
    assert releases.load_or_compute("scores", lambda: MADE)["x"].tolist() == [0.0, 1.0]
