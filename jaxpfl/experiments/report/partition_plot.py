"""A picture of a partition: how many examples of each label every client holds."""

from typing import Any

import numpy as np

from jaxpfl.data.partitions import labels_of
from jaxpfl.data.population import Population
from jaxpfl.experiments.report import plots

_MOST_LABELS = 10


def partition_plot(population: Population, by: str = "label") -> Any:
    """A matplotlib figure: a bar for each client, in the population's order, parted by label.

    It shows exact counts of what each client holds and therefore says NOT PRIVATE: it is for data
    that was dealt to made-up clients. The rarest of more than ten labels are drawn as one.

    Raises:
      InputError: the population has no such column.
    """
    labels, label_N = labels_of(population, by)
    clients = len(population)
    client_N = np.repeat(np.arange(clients), population.sizes())
    counts_LxC = np.zeros((len(labels), clients), np.int64)
    np.add.at(counts_LxC, (label_N, client_N), 1)
    names = [str(label) for label in labels]
    if len(labels) > _MOST_LABELS:
        order = np.argsort(-counts_LxC.sum(axis=1), kind="stable")
        shown, rest = np.sort(order[: _MOST_LABELS - 1]), order[_MOST_LABELS - 1 :]
        names = [names[index] for index in shown] + [f"{len(rest)} others"]
        counts_LxC = np.concatenate([counts_LxC[shown], counts_LxC[rest].sum(0, keepdims=True)])
    axes = plots.axes("Who holds what", width=7.2, stamped=True)
    edges = np.arange(clients + 1) - 0.5
    tops_LxC = np.cumsum(counts_LxC, axis=0)
    for index, name in enumerate(names):
        axes.stairs(
            tops_LxC[index],
            edges,
            baseline=tops_LxC[index] - counts_LxC[index],
            fill=True,
            color=_colour(index, len(names)),
            label=name,
        )
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, None)
    axes.legend(title=by, fontsize=8, title_fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    plots.subtitle(axes, "Who holds what", population.name)
    return plots.labelled(axes, "client", "examples")


def _colour(index: int, of: int) -> Any:
    from matplotlib import colormaps

    return colormaps["turbo"](0.08 + 0.84 * index / max(of - 1, 1))
