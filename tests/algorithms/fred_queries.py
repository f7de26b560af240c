"""Clients of a few embeddings, and what FreD asks of them."""

import math

import numpy as np

from jaxpfl.algorithms.fred import FredPlan, private_moments
from jaxpfl.data import from_clients
from jaxpfl.privacy import Ledger

DIM = 5


def clients(count=40, dimension=DIM, seed=0, scale=0.5):
    """Clients of 0 to 6 embeddings."""
    rng = np.random.default_rng(seed)
    axes = rng.normal(size=(dimension, dimension)) / math.sqrt(dimension)
    centre = rng.normal(size=dimension) * 0.3
    held = {}
    for index in range(count):
        rows = rng.normal(size=(index % 7, dimension)) @ axes * scale + centre
        held[f"client {index}"] = {"embedding": np.float32(rows).reshape(-1, dimension)}
    return from_clients(held)


def query(population, plan, tmp_path, secret=None, **settings):
    name = f"{abs(hash((plan, population.fingerprint)))}.jsonl"
    with Ledger(tmp_path / name, population, unit=plan.unit) as ledger:
        return private_moments(population, plan, ledger=ledger, secret=secret, **settings)


def plan_of(**changes):
    settings = dict(epsilon=0.6, delta=2e-6)
    return FredPlan.calibrated(**{**settings, **changes})
