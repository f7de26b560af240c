"""`prepare` computes each client from its own examples, or is refused before a charge."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxpfl.algorithms.candidate_scores import _with_embeddings, _with_means
from jaxpfl.data import Population, from_clients
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.release.query import Query, prepared
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan


def _clients(count):
    drawn = np.random.default_rng(count)
    return from_clients(
        {
            f"c{i}": {
                "x": drawn.normal(size=(i % 4, 3)).astype(np.float32),
                "embedding": drawn.normal(size=(i % 4, 5)).astype(np.float32),
                "text": [f"t{i} {n}" for n in range(i % 4)],
            }
            for i in range(1, count + 1)
        }
    )


def _query(prepare, count=1000):
    plan = Plan(1, Clip(1.0), Noise(1.0), Poisson(count, 10), 1e-6)
    return Query("mine", lambda b, e, k: b, plan, CohortSpec(2, 4), prepare=prepare)


def _with(clients, x):
    return clients.with_columns({"x": np.asarray(x, np.float32)})


def _less_the_mean(clients):
    return _with(clients, clients.columns["x"] - clients.columns["x"].mean(0))


def _of_the_neighbour(clients):
    return _with(clients, np.roll(clients.columns["x"], 1, axis=0))


def _ranks(clients):
    return _with(clients, np.argsort(np.argsort(clients.columns["x"][:, 0])))


def _counted(clients):
    return _with(clients, np.full(clients.num_examples, len(clients)))


def _pairs(clients):
    """Blocks of an even number of clients would not show it."""
    x, of = clients.columns["x"].copy(), np.repeat(np.arange(len(clients)) // 2, clients.sizes())
    for pair in np.unique(of):
        x[of == pair] = x[of == pair].mean(0)
    return _with(clients, x)


def _all_but_the_largest(clients):
    values = clients.columns["x"][:, 0]
    return clients.keeping(values == values.max())


def _running():
    seen = [0.0]

    def prepare(clients):
        seen[0] += clients.num_examples
        return _with(clients, clients.columns["x"] + seen[0])

    return prepare


def _without_the_last(clients):
    return clients.select(np.arange(len(clients) - 1))


@pytest.mark.parametrize("count", [2, 7, 300])
@pytest.mark.parametrize(
    "prepare",
    [
        _less_the_mean,
        _of_the_neighbour,
        _ranks,
        _counted,
        _pairs,
        _all_but_the_largest,
        _running(),
        _without_the_last,
    ],
)
def test_what_mixes_clients_is_refused(prepare, count):
    with pytest.raises(InputError, match="'mine'.*own data alone") as refused:
        prepared(_query(prepare), _clients(count))
    assert "t1 0" not in str(refused.value)


def _positive(clients):
    return clients.keeping(clients.columns["x"][:, 0] > 0)


def _not_a_number(clients):
    return _with(clients, np.where(clients.columns["x"] > 0, np.nan, 1))


@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize(
    "prepare",
    [
        _positive,
        _not_a_number,
        lambda clients: clients,
        _with_means,
        _with_embeddings,
    ],
)
def test_what_computes_each_client_alone_is_as_before(prepare, count):
    clients = _clients(count)
    assert prepared(_query(prepare), clients).content == prepare(clients).content


def test_an_example_is_handed_over_without_the_others_of_its_client():
    """With unit = 'example', also the examples of one client are others."""

    def less_the_clients_mean(clients):
        x, of = clients.columns["x"], np.repeat(np.arange(len(clients)), clients.sizes())
        means = np.stack([x[of == client].mean(0) for client in range(len(clients))])
        return _with(clients, x - means[of])

    clients = _clients(3)
    found = prepared(_query(less_the_clients_mean), clients)
    assert np.any(found.columns["x"] != 0)
    query = _query(less_the_clients_mean)
    object.__setattr__(query, "plan", SimpleNamespace(unit="example"))
    assert np.all(prepared(query, clients).columns["x"] == 0)


def test_an_example_stays_one():
    """Also where as many vanish as are doubled: a doubled one would move the sum by twice S."""

    def doubled_or_gone(examples):
        times = np.where(examples.columns["x"][:, 0] > 0, 2, 0)
        taken = np.repeat(np.arange(len(examples)), times)
        x = examples.columns["x"][taken]
        return Population({"x": x}, np.concatenate([[0], np.cumsum(times)]), examples.client_ids)

    sign = np.float32([[1], [-1]] * 4)
    clients = from_clients({"a": {"x": sign[:3]}, "b": {"x": sign[3:]}})
    query = _query(doubled_or_gone)
    object.__setattr__(query, "plan", SimpleNamespace(unit="example"))
    with pytest.raises(InputError, match="keep every example"):
        prepared(query, clients)
