"""`prepare` computes each client from its own examples, or is refused before a charge."""

import functools
import itertools
import json
import logging
import threading
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms.candidate_scores import _with_embeddings, _with_means
from jaxpfl.data import Population, from_clients
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.errors import InputError
from jaxpfl.federated.release.preparation import prepared
from jaxpfl.federated.release.query import Query
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.gaussian import Noise
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed.hashed import HashedNgrams
from tests.refusals import refusal


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


def _x(clients):
    return clients.columns["x"]


def _pairs(clients):
    """Blocks of an even number of clients would not show it."""
    x, of = _x(clients).copy(), np.repeat(np.arange(len(clients)) // 2, clients.sizes())
    for pair in np.unique(of):
        x[of == pair] = x[of == pair].mean(0)
    return _with(clients, x)


def _running():
    seen = [0.0]

    def prepare(clients):
        seen[0] += clients.num_examples
        return _with(clients, _x(clients) + seen[0])

    return prepare


def _of_the_source(clients):
    """A seed that follows from everybody."""
    drawn = np.random.default_rng(int(clients.fingerprint, 16)).normal(size=3)
    return _with(clients, _x(clients) * drawn)


MIXING = {
    "less the mean": lambda clients: _with(clients, _x(clients) - _x(clients).mean(0)),
    "of the neighbour": lambda clients: _with(clients, np.roll(_x(clients), 1, axis=0)),
    "ranks": lambda clients: _with(clients, np.argsort(np.argsort(_x(clients)[:, 0]))),
    "counted": lambda clients: _with(clients, np.full(clients.num_examples, len(clients))),
    "pairs": _pairs,
    "largest": lambda clients: clients.keeping(_x(clients)[:, 0] == _x(clients)[:, 0].max()),
    "of the source": _of_the_source,
    "all but the last": lambda clients: clients.select(np.arange(len(clients) - 1)),
}


@pytest.mark.parametrize("count", [2, 7, 300])
@pytest.mark.parametrize("prepare", MIXING.values(), ids=MIXING)
def test_what_mixes_clients_is_refused(prepare, count):
    with pytest.raises(InputError, match="'mine'.*own data alone") as refused:
        prepared(_query(prepare), _clients(count))
    assert "t1 0" not in str(refused.value)


ALONE = {
    "positive": lambda clients: clients.keeping(_x(clients)[:, 0] > 0),
    "not a number": lambda clients: _with(clients, np.where(_x(clients) > 0, np.nan, 1)),
    "as it is": lambda clients: clients,
    "means": _with_means,
    "embeddings": _with_embeddings,
}


@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("prepare", ALONE.values(), ids=ALONE)
def test_what_computes_each_client_alone_is_as_before(prepare, count):
    clients = _clients(count)
    assert prepared(_query(prepare), clients).content == prepare(clients).content


def _of_examples(prepare):
    query = _query(prepare)
    object.__setattr__(query, "plan", SimpleNamespace(unit="example"))
    return query


def test_an_example_is_handed_over_without_the_others_of_its_client():
    """With unit = 'example', also the examples of one client are others."""

    def less_the_clients_mean(clients):
        x, of = _x(clients), np.repeat(np.arange(len(clients)), clients.sizes())
        means = np.stack([x[of == client].mean(0) for client in range(len(clients))])
        return _with(clients, x - means[of])

    clients = _clients(3)
    assert np.any(_x(prepared(_query(less_the_clients_mean), clients)) != 0)
    assert np.all(_x(prepared(_of_examples(less_the_clients_mean), clients)) == 0)


def test_an_example_stays_one():
    """Also where as many vanish as are doubled: a doubled one would move the sum by twice S."""

    def doubled_or_gone(examples):
        times = np.where(examples.columns["x"][:, 0] > 0, 2, 0)
        taken = np.repeat(np.arange(len(examples)), times)
        x = examples.columns["x"][taken]
        return Population({"x": x}, np.concatenate([[0], np.cumsum(times)]), examples.client_ids)

    sign = np.float32([[1], [-1]] * 4)
    clients = from_clients({"a": {"x": sign[:3]}, "b": {"x": sign[3:]}})
    refusal(lambda: prepared(_of_examples(doubled_or_gone), clients), "keep every example")


class Scale:
    """x over the largest x, which is fitted when it is first called."""

    top = None

    def __call__(self, clients):
        if self.top is None:
            self.top = _top(clients)
        return _scaled(clients, self.top)

    def bound(self, clients):
        return self(clients)


class ScaleOfAll(Scale):
    """It remembers for all objects of its class."""

    def __call__(self, clients):
        if ScaleOfAll.top is None:
            ScaleOfAll.top = _top(clients)
        return super().__call__(clients)


class NotCopied(Scale):
    def __deepcopy__(self, memo):
        return self


class ScaleOfASlot:
    """It says of its state that there is none, and has no dictionary."""

    __slots__ = ("top",)

    def __getstate__(self):
        return None

    def __call__(self, clients):
        if not hasattr(self, "top"):
            self.top = _top(clients)
        return _scaled(clients, self.top)


class ScaleOfAProperty:
    def __call__(self, clients):
        self.clients = clients
        found = _scaled(clients, self.top)
        del self.clients
        return found

    @functools.cached_property
    def top(self):
        return _top(self.clients)


class Standardised:
    def __init__(self):
        from sklearn.preprocessing import StandardScaler

        self.scaler = StandardScaler()

    def __call__(self, clients):
        x = _x(clients)
        if not hasattr(self.scaler, "mean_"):
            self.scaler.fit(x)
        return _with(clients, self.scaler.transform(x))


def _scaled(clients, top):
    return _with(clients, _x(clients) / top)


def _top(clients):
    return np.abs(_x(clients)).max(initial=1e-3)


TOP, ROWS, OWN = None, {}, ModuleType("own")


def _in_a_global(clients):
    global TOP
    TOP = _top(clients) if TOP is None else TOP
    return _scaled(clients, TOP)


def _in_a_module(clients):
    OWN.top = getattr(OWN, "top", None) or _top(clients)
    return _scaled(clients, OWN.top)


def _in_a_default(clients, fitted=[]):  # noqa: B006
    fitted.append(_top(clients))
    return _scaled(clients, fitted[0])


def _in_an_attribute(clients):
    _in_an_attribute.top = getattr(_in_an_attribute, "top", None) or _top(clients)
    return _scaled(clients, _in_an_attribute.top)


def _by_id(clients):
    """Rows that were computed in the company of the first call, found again by a client's id."""
    x, top = _x(clients), _top(clients)
    for k, name in enumerate(clients.client_ids.to_pylist()):
        rows = slice(*clients.offsets[k : k + 2])
        ROWS.setdefault(name, x[rows] / top)
    return _with(clients, np.concatenate([ROWS[n] for n in clients.client_ids.to_pylist()]))


def _in_a_closure():
    fitted = None

    def prepare(clients):
        nonlocal fitted
        fitted = _top(clients) if fitted is None else fitted
        return _scaled(clients, fitted)

    return prepare


class Table:
    """Equal to all others."""

    def __init__(self, clients):
        self.clients = clients

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


@functools.lru_cache
def _cached_top(table):
    return _top(table.clients)


def _in_a_cache(clients):
    return _scaled(clients, _cached_top(Table(clients)))


def _of_another(scale, clients):
    return scale(clients)


def _scaled_by(scale):
    return lambda clients: scale(clients)


@pytest.mark.parametrize(
    "prepare",
    [
        Scale(),
        ScaleOfAll(),
        NotCopied(),
        Standardised(),
        Scale().bound,
        functools.partial(_of_another, Scale()),
        _scaled_by(Scale()),
        _scaled_by(Standardised()),
        _scaled_by(ScaleOfASlot()),
        _scaled_by(ScaleOfAProperty()),
        _in_a_global,
        _in_a_module,
        _in_a_default,
        _in_an_attribute,
        _in_a_closure(),
        _in_a_cache,
        _by_id,
        pytest.param(_running(), id="counts"),
    ],
)
@pytest.mark.parametrize("count", [7, 300])  # asked again, it remembers the first time
def test_what_remembers_is_refused(prepare, count):
    """TRUST 54: whatever it fits, counts or keeps, and wherever; no value of it is told."""
    clients = _clients(count)
    with pytest.raises(InputError, match="'mine': prepare must") as refused:
        prepared(_query(prepare), clients)
    assert "c1" not in str(refused.value) and f"{_top(clients):.4f}"[:6] not in str(refused.value)


def test_a_fit_on_one_block_is_no_fit_of_any_other():
    """Where the largest value is one of few clients', most blocks agree on everything else."""
    held = {f"c{i}": {"x": np.float32([[1.0]])} for i in range(200)}
    for giants in ([], [0], [0, 1], range(0, 200, 50)):
        clients = from_clients(held | {f"c{i}": {"x": np.float32([[1e6]])} for i in giants})
        if not giants:
            assert np.all(prepared(_query(Scale()), clients).columns["x"] == 1)
            continue
        with pytest.raises(InputError, match="own data alone"):
            prepared(_query(Scale()), clients)


EMBEDDER, LOG, ROUNDED = HashedNgrams(8), logging.getLogger("prepare"), jax.jit(jnp.round)


class Embeds:
    def __init__(self):
        self.embedder = HashedNgrams(8)

    def __call__(self, clients):
        return clients.with_columns({"embedding": self.embedder(clients.columns["text"])})


def _logging(clients):
    """Logs and compiled functions have caches of their own."""
    LOG.debug("called")
    ROUNDED(np.zeros(len(clients), np.float32))
    return Embeds()(clients)


@pytest.mark.parametrize(
    "prepare",
    [
        Embeds(),
        _scaled_by(Embeds()),
        lambda clients: clients.with_columns({"embedding": EMBEDDER(clients.columns["text"])}),
        _logging,
    ],
)
def test_what_follows_from_no_client_may_be_kept(prepare):
    """An embedder draws its projection when it is first called."""
    clients = _clients(30)
    expected = HashedNgrams(8)(clients.columns["text"])
    found = prepared(_query(prepare), clients).columns["embedding"]
    np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_copied_is_refused():
    class Locked(Scale):
        def __init__(self):
            self.lock = threading.Lock()

    refusal(lambda: prepared(_query(Locked()), _clients(7)), "'mine' copy Locked")


@pytest.mark.parametrize("count", [3, 7, 97, 98, 300, 9_500])
def test_clients_are_dealt_to_small_blocks_twice_and_no_two_meet_twice(count, tmp_path):
    clients, path = from_clients({str(i): {"x": np.float32([i])} for i in range(count)}), tmp_path

    def prepare(clients):
        with (path / "blocks").open("a") as file:  # the one place that nobody looks at
            file.write(json.dumps(clients.client_ids.to_pylist()) + "\n")
        return clients

    prepared(_query(prepare), clients)
    blocks = [json.loads(line) for line in (path / "blocks").read_text().splitlines()]
    assert max(map(len, blocks)) <= min(97, count - 1)
    taken, counts = np.unique([int(each) for block in blocks for each in block], return_counts=True)
    assert len(taken) == count and np.all(counts == 2)
    pairs = [pair for block in blocks for pair in itertools.combinations(sorted(block), 2)]
    assert len(set(pairs)) == len(pairs)
