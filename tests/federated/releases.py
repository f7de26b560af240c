"""What tests of the release ask, and of whom."""

from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import Algorithm
from jaxpfl.data import Population
from jaxpfl.data.cohort import CohortSpec
from jaxpfl.federated import Query, Releaser, RunSecret
from jaxpfl.privacy import Clip, Ledger, Noise, Plan, Poisson

CLIENTS = 24
# As many coordinates as a standard deviation needs to be known to one per cent.
DIM = 20_000
SIGMA = 1.5


def population(clients: int = CLIENTS, seed: int = 0, replaced: int | None = None) -> Population:
    """Each client holds one small vector, and its number."""
    held = np.random.default_rng(seed).normal(size=(clients, DIM)).astype(np.float32) / DIM
    if replaced is not None:
        held[replaced] = np.random.default_rng(99).normal(size=DIM) / np.sqrt(DIM)
    names = [f"person {k} of {seed}" for k in range(clients)]
    return Population({"x": held}, np.arange(clients + 1), names, name="vectors")


def plan(rounds: int = 6, clients: int = CLIENTS, taken: int | None = None, **changes) -> Plan:
    settings = dict(
        rounds=rounds,
        clip=Clip(1.0),
        noise=Noise(SIGMA),
        participation=Poisson(clients, clients if taken is None else taken),
        delta=1e-6,
    )
    return Plan(**{**settings, **changes})


def held_vector(broadcast, examples, key):
    real = examples.mask[..., None]
    return jnp.sum(jnp.where(real, examples.batches["x"], 0.0), axis=(0, 1)) + broadcast


def half_of_it(broadcast, examples, key):
    return jnp.float32(0.5) * held_vector(broadcast, examples, key)


def query(client_fn=held_vector, of: Plan | None = None, **changes) -> Query:
    settings = dict(label="sum", cohort=CohortSpec(1, 1, clients_per_bucket=8), columns=("x",))
    return Query(client_fn=client_fn, plan=of or plan(), **{**settings, **changes})


@contextmanager
def releasing(
    path, clients=None, *, secret=None, run="run", budget=None, unit="client", **settings
):
    """A releaser of clients on the ledger at `path`; `settings` are its other arguments."""
    clients = population() if clients is None else clients
    secret = RunSecret.reproducible(7) if secret is None else secret
    with Ledger(path, clients, budget=budget, unit=unit) as ledger:
        yield Releaser(clients, ledger, secret, run=run, **settings)


def ask(
    path, asked=None, *, clients=None, round=1, secret=None, run="run", broadcast=0.0, budget=None
):
    """One release on the ledger at `path`: its value and the ledger's charges."""
    asked = query() if asked is None else asked
    with releasing(path, clients, secret=secret, run=run, budget=budget) as releaser:
        found = releaser.release(asked, jnp.float32(broadcast), round=round)
        value = np.asarray(found.value)
    return value, list(releaser.ledger.charges)


def sum_by(how, client_fn, clients, plan, ledger, broadcast=()):
    """The sum by `jp.run`, `jp.release` or `jp.secure_release`, on a new ledger at this path."""
    given = dict(ledger=ledger, broadcast=broadcast, label="mine")
    if how == "release":
        return jp.release(client_fn, clients, plan, **given).value
    if how == "secure_release":
        secure = jp.SecureSum(len(clients), plan.clip_norm, plan.noise_multiplier)
        return jp.secure_release(client_fn, clients, secure, delta=plan.delta, **given).value
    asked = Query("mine", client_fn, plan, CohortSpec(1, 1))

    def step(state, release, round):
        return release(asked, broadcast).value, {}

    algorithm = Algorithm("own", lambda key: jnp.float32(0), step, (asked,))
    return jp.run(algorithm, clients, ledger=ledger, out=ledger.with_name("run")).state


def require_independent_noise(first: np.ndarray, second: np.ndarray) -> None:
    """The difference of two releases of sums that hardly differ: twice the noise's variance."""
    # Its standard error is SIGMA / sqrt(DIM): one per cent is two of them.
    assert np.std(first - second) == pytest.approx(SIGMA * np.sqrt(2), rel=0.03)
