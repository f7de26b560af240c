"""Who takes part in a round.

Poisson sampling takes each client independently with probability q: the cohort's size varies,
may be 0, and is private. Fixed-size sampling takes exactly n without replacement; putting one
client in pushes another out, so it is accounted for under replace-one (see `privacy.plan`). In
epochs, each client is dealt to one of an epoch's rounds, always the same one, independently of the
others: nothing is amplified, so an accountant needs no secret here. The seed is kept secret all the
same: places are addressed by index, and removing a client moves those after it.
Cohorts are a function of (seed, round) alone; whoever knows the seed knows who took part, so
accounting with amplification assumes that the seed is kept from the adversary.
"""

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *address: int) -> np.random.Generator:
    """Returns a numpy generator that is a function of its arguments alone."""
    text = " ".join(["jaxpfl", purpose, str(int(seed)), *(str(int(part)) for part in address)])
    words = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


def poisson(population: int, probability: float, seed: int, round: int) -> np.ndarray:
    """Returns the sorted indices (int64) of a Poisson cohort; may be empty."""
    draws = generator(seed, "poisson cohort", round).random(population)
    return np.flatnonzero(draws < probability)


def fixed_size(population: int, clients: int, seed: int, round: int) -> np.ndarray:
    """Returns the sorted indices (int64) of `clients` distinct clients."""
    drawn = generator(seed, "fixed-size cohort", round).choice(
        population, clients, replace=False, shuffle=False
    )
    return np.sort(drawn.astype(np.int64))


def in_epochs(population: int, rounds_per_epoch: int, seed: int, round: int) -> np.ndarray:
    """Returns the sorted indices (int64) of the clients dealt to round 1, 2, ...; may be empty."""
    places = generator(seed, "place in the epoch").integers(0, rounds_per_epoch, population)
    return np.flatnonzero(places == (round - 1) % rounds_per_epoch)
