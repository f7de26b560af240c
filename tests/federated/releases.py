"""What tests of the release ask, and of whom."""

import jax.numpy as jnp
import numpy as np
import pytest

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


def ask(
    path, asked=None, *, clients=None, round=1, secret=None, run="run", broadcast=0.0, budget=None
):
    """One release on the ledger at `path`: its value and the ledger's charges."""
    clients = population() if clients is None else clients
    asked = query() if asked is None else asked
    secret = RunSecret.reproducible(7) if secret is None else secret
    with Ledger(path, clients, budget=budget) as ledger:
        with Releaser(clients, ledger, secret, run=run) as releaser:
            found = releaser.release(asked, jnp.float32(broadcast), round=round)
            value = np.asarray(found.value)
        return value, list(ledger.charges)


def require_independent_noise(first: np.ndarray, second: np.ndarray) -> None:
    """The difference of two releases of sums that hardly differ: twice the noise's variance."""
    # Its standard error is SIGMA / sqrt(DIM): one per cent is two of them.
    assert np.std(first - second) == pytest.approx(SIGMA * np.sqrt(2), rel=0.03)
