"""The picture of a partition draws what the clients hold."""

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from jaxpfl.data import from_clients
from jaxpfl.experiments.report.partition_plot import partition_plot


def drawn(figure):
    """The heights of each label's bars, by its name in the legend: [clients]."""
    found = {}
    for patch in figure.axes[0].patches:
        assert isinstance(patch, StepPatch)
        values, _, baseline = patch.get_data()
        found[patch.get_label()] = (values - baseline).tolist()
    return found


def test_a_bar_has_the_number_of_examples():
    held = from_clients({"a": {"label": [0, 0, 2]}, "b": {"label": [2]}, "c": {"label": []}})
    figure = partition_plot(held)
    assert drawn(figure) == {"0": [2, 0, 0], "2": [1, 1, 0]}
    assert "NOT PRIVATE" in [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("labels", [10, 11, 40])
def test_rare_labels_are_drawn_together(labels):
    counts_L = np.arange(1, labels + 1)
    found = drawn(partition_plot(from_clients({"a": {"label": np.repeat(counts_L, counts_L)}})))
    assert len(found) == 10
    assert sum(sum(bar) for bar in found.values()) == counts_L.sum()
    assert found[str(labels)] == [labels]
