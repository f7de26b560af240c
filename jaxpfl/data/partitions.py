"""Partitions: data that has no clients is dealt to made-up ones.

The schemes are named as in Flower's `flwr_datasets.partitioner`. The examples are those of a source
in which every example is a client of its own (`PATH?client=*`), or columns in memory.

A made-up client is made of whole original clients, so what protects it protects each of them, too.
The reverse is not true, so the population has a `fingerprint`, and with it a ledger, of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpfl import checks
from jaxpfl.checked import Checked, NonNegativeInt, Positive, PositiveInt
from jaxpfl.data.population import Population, from_rows
from jaxpfl.errors import InputError

_TRIES = 1_000


@dataclass(frozen=True)
class Scheme(Checked):
    """A way to deal examples to clients; its fields are public."""

    clients: PositiveInt
    seed: NonNegativeInt = field(default=0, kw_only=True)

    def deal(self, population: Population) -> np.ndarray:
        """The index of each example's client, int64 [examples]."""
        raise NotImplementedError

    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self.seed))


class Iid(Scheme):
    """Every client has a random share; sizes differ by at most one."""

    def deal(self, population: Population) -> np.ndarray:
        _require_examples(population, self.clients)
        examples = population.num_examples
        order_N = self._generator().permutation(examples)
        client_N = np.empty(examples, np.int64)
        client_N[order_N] = np.arange(examples) % self.clients
        return client_N


@dataclass(frozen=True)
class Dirichlet(Scheme):
    """Each label is dealt in proportions over the clients that a symmetric Dirichlet draws.

    Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks", section
    4, and the floor of Li et al. 2022, "Federated Learning on Non-IID Data Silos": everything is
    drawn again until no client has fewer than `min_examples`. `by` is the column of labels. The
    concentration `alpha` of 0.1 gives a client few labels, 100 nearly equal shares of all.
    """

    by: str = "label"
    alpha: Positive = 0.5
    min_examples: NonNegativeInt = 1

    def deal(self, population: Population) -> np.ndarray:
        _require_examples(population, self.clients * max(self.min_examples, 1))
        labels, label_N = _labels(population, self.by)
        generator = self._generator()
        counts_L = np.bincount(label_N)
        for _ in range(_TRIES):
            share_LxC = generator.dirichlet(np.full(self.clients, self.alpha), labels)
            # A tiny alpha may underflow to no proportions at all.
            share_LxC[~np.isfinite(share_LxC).all(axis=1)] = 1.0 / self.clients
            ends_LxC = np.round(np.cumsum(share_LxC, axis=1) * counts_L[:, None]).astype(np.int64)
            sizes_LxC = np.diff(ends_LxC, axis=1, prepend=0)
            if sizes_LxC.sum(axis=0).min() >= self.min_examples:
                return _by_label(label_N, sizes_LxC, generator)
        gave = f"gave each of {self.clients} clients at least {self.min_examples} examples"
        what = f"none of {_TRIES} draws of Dirichlet(alpha = {self.alpha:g}) {gave}"
        raise InputError(f"partition: {what}: raise alpha, or lower clients or min_examples")


@dataclass(frozen=True)
class Pathological(Scheme):
    """Every client has examples of `labels` labels only, as in McMahan et al. 2017, section 3.

    Labels are assigned in turn, so that each occurs at about as many clients; a label's examples
    are dealt equally to the clients that have it, and those left over to the ones with the fewest
    examples, ties at random. All is drawn again until each client has an example. `by` is the
    column of labels.
    """

    by: str = "label"
    labels: PositiveInt = 2

    def deal(self, population: Population) -> np.ndarray:
        _require_examples(population, self.clients)
        labels, label_N = _labels(population, self.by)
        if not self.labels <= labels <= self.labels * self.clients:
            what = f"{self.clients} clients with {self.labels} labels each cannot share column"
            limits = "expected labels of a client <= labels in all <= clients x labels of a client"
            raise InputError(f"partition: {what} {self.by!r} of {labels} labels: {limits}")
        generator, counts_L = self._generator(), np.bincount(label_N)
        for _ in range(_TRIES // 10):
            sizes_LxC = self._sizes(counts_L, generator)
            if sizes_LxC.any(axis=0).all():
                return _by_label(label_N, sizes_LxC, generator)
        draws = f"no draw of {self.labels} labels for each of {self.clients} clients gave every"
        expected = "expected more examples of each label: lower clients, or raise labels"
        raise InputError(f"partition: {draws} client an example, {expected}")

    def _sizes(self, counts_L: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """How many examples of each label each client has in one draw, int64 [labels, clients]."""
        has_LxC = np.zeros((len(counts_L), self.clients), np.int64)
        for client in range(self.clients):
            # The labels that the fewest clients have, ties at random.
            rank_L = np.lexsort((generator.random(len(counts_L)), has_LxC.sum(axis=1)))
            has_LxC[rank_L[: self.labels], client] = 1
        holders_L = has_LxC.sum(axis=1)
        sizes_LxC = has_LxC * (counts_L // holders_L)[:, None]
        for label in generator.permutation(len(counts_L)):
            (clients,) = np.nonzero(has_LxC[label])
            rank = np.lexsort((generator.random(len(clients)), sizes_LxC.sum(axis=0)[clients]))
            sizes_LxC[label, clients[rank[: counts_L[label] % holders_L[label]]]] += 1
        return sizes_LxC


SCHEMES = {"iid": Iid, "dirichlet": Dirichlet, "pathological": Pathological}
"""The schemes by the name that `partition=` has in a source."""


def partition(examples: Population | Mapping[str, Any], scheme: Scheme) -> Population:
    """Deals examples to clients.

    Args:
      examples: a population whose clients hold one example each, or columns, name -> [examples,
        ...], of data that never had clients.
      scheme: how, for instance `Dirichlet(clients=100, by="label", alpha=0.3)`.

    Raises:
      InputError: a client of the population holds more than one example, a column is missing, or
        there are too few examples.
    """
    if not isinstance(scheme, Scheme):
        expected = "scheme must be one of jaxpfl.data.Iid, Dirichlet and Pathological"
        raise InputError(f"{expected}, found {scheme!r}")
    if not isinstance(examples, Population):
        checks.instance("examples", examples, Mapping, "a Population or columns by name")
        length = len(next(iter(examples.values()), ()))
        ids = [f"example {index}" for index in range(length)]
        examples = from_rows(np.arange(length), ids, examples, name="in memory", unit="example")
    # A plan protects each new client, but not an old one that was split among several of them.
    if np.any(examples.sizes() > 1):
        what = f"the examples of {examples.name!r} have clients of their own, which a partition"
        hint = "use them as they are, or read with client=*, which makes each example a client"
        raise InputError(f"{what} would tear apart: {hint}")
    ids = [f"client {index}" for index in range(scheme.clients)]
    name, unit = f"{examples.name} [{scheme}]", f"made-up client of {examples.unit}s"
    return from_rows(scheme.deal(examples), ids, examples.columns, name=name, unit=unit)


def _require_examples(population: Population, least: int) -> None:
    if population.num_examples < least:
        # The message leaves the number out: how many examples a population has is private.
        raise InputError(f"partition: clients need {least} examples, {population.name!r} has fewer")


def _labels(population: Population, by: str) -> tuple[int, np.ndarray]:
    """How many values a column has, and the index of each example's, int64 [examples]."""
    column = np.asarray(population.columns.get(by, 0))
    if column.ndim != 1:
        expected = f"needs a column {by!r} with one value for each example"
        raise InputError(f"partition: {expected}, found {population.column_types()}")
    # Sorted, so that the order of the examples does not matter.
    values, index_N = np.unique(column, return_inverse=True)
    return len(values), index_N


def _by_label(
    label_N: np.ndarray, sizes_LxC: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Deals the examples of each label at random, so many to each client: clients [examples]."""
    client_N = np.empty(len(label_N), np.int64)
    clients = np.arange(sizes_LxC.shape[1])
    for label, sizes_C in enumerate(sizes_LxC):
        rows = generator.permutation(np.flatnonzero(label_N == label))
        client_N[rows] = np.repeat(clients, sizes_C)
    return client_N
