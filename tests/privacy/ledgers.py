"""Clients, events and ledgers that the tests of the ledger share."""

import hashlib
import os

import dp_accounting
import numpy as np

from jaxpfl.data import Population
from jaxpfl.privacy import Clip, Ledger, Noise, Plan, Poisson, events
from tests.plans import epsilon_of

NAMES = [hashlib.sha256(f"name {k}".encode()).hexdigest()[:10] for k in range(40)]
GAUSSIAN = dp_accounting.GaussianDpEvent


def poisson(q, z):
    return dp_accounting.PoissonSampledDpEvent(q, GAUSSIAN(z))


def fixed(population, clients, z):
    return dp_accounting.SampledWithoutReplacementDpEvent(population, clients, GAUSSIAN(z))


def truncated(population, q, at_most, z):
    return dp_accounting.TruncatedSubsampledGaussianDpEvent(population, q, at_most, z)


ROUND, OTHER, EVERYONE, FIXED = (
    poisson(0.05, 1.5),
    poisson(0.2, 4.0),
    GAUSSIAN(8.0),
    fixed(100, 10, 2.0),
)


def people(names=NAMES, seed: int = 0) -> Population:
    """Clients with 3 examples each, which follow from the seed and the client's place."""
    x = np.random.default_rng(seed).normal(size=(3 * len(names), 2))
    return Population({"x": x}, 3 * np.arange(len(names) + 1), list(names))


CLIENTS = people()

ASKED = {"program": "0" * 64, "captured": ["scale: float32[]"], "flow_checked": True}
PLAN = Plan(5, Clip(1.0), Noise(8.0), Poisson(len(NAMES), len(NAMES)), 1e-5)


def five_rounds(ledger: Ledger) -> None:
    """On everyone, whose composition has a formula: tests check a hundred certificates."""
    for round in range(1, 6):
        names = {"run": "a", "round": round, "identity": f"fed_avg a {round}"}
        query = {"plan": PLAN.to_dict(), **ASKED}
        ledger.charge(PLAN.charge_event(), "fed_avg", query=query, **names)
        ledger.record(ledger.charges[-1].identity, f"{round:08x}")


def charge(
    ledger, round=0, event: dp_accounting.DpEvent = ROUND, label="fed_avg", run="a", identity=None
) -> None:
    """Charges under an identity of its own for each (label, run, round)."""
    identity = identity or f"{label} {run} {round}"
    ledger.charge(event, label, run=run, round=round, identity=identity)


def filled(path, rounds: int = 5, event: dp_accounting.DpEvent = ROUND) -> str:
    """A closed ledger of some rounds; its head."""
    with Ledger(path, CLIENTS) as ledger:
        for round in range(rounds):
            charge(ledger, round, event)
        return ledger.head


def key_of(path):
    return path.parent / "private" / f"{path.name}.key"


def composed(event, rounds: int, delta: float = 1e-5, accountant="pld") -> float:
    """The epsilon of equal rounds, without a ledger."""
    adjacency = events.adjacency(event)
    repeated = dp_accounting.SelfComposedDpEvent(event, rounds)
    return epsilon_of(repeated, delta, accountant, adjacency)


def synced(monkeypatch) -> list:
    """Which inodes are synced, and at which size, from now on."""
    seen = []
    real = os.fsync

    def watched(descriptor):
        seen.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return seen
