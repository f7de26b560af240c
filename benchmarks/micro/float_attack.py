"""Whether the low bits of a noisy sum tell who is in it: an attack on float32 noise.

    python -m benchmarks.micro.float_attack

The adversary of differential privacy knows all clients but one, here a single other one, whose
update is a random vector of norm 1. That one's update is zero or a known vector of norm 1, and the
adversary guesses which by a release of `jp.release`. With exact Gaussian noise of
multiplier 1, no guess is right more often than in 69.1 % of all cases. But noise is a float32, and
so is the sum: of a released number v and a supposed sum s, the difference v - s must round to a
float32, which by a wrong s it often does not (Mironov 2012, "On significance of the least
significant bits for differential privacy", of Laplace noise). One impossible coordinate decides.

    float32          the sum plus float32 noise, as `jp.release` gave it until 2026-11-26
    as released      what `jp.release` gives: that, rounded to multiples of 1/32 of the noise's
                     deviation. Thousands of float32 noises lead to each of them, so only
                     likelihood is left
    exact            what it gives with `Noise(1.0, "exact")`, whole steps of deviation / 2^20

`right` is the share of right guesses, and `impossible` the share of coordinates that a wrong
supposition cannot explain.
"""

import dataclasses
import math
import tempfile
from pathlib import Path

import numpy as np
import tyro

from benchmarks import harness

STEP = 2.0**-5
"""Of the grid of a release with noise of deviation 1."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Releases of each kind and size, half of them with the client's update."""

    dimensions: tuple[int, ...] = (16, 256, 4_096)
    releases: int = 400


def impossible(value_D: np.ndarray, sum_D: np.ndarray) -> np.ndarray:
    """Where no float32 noise makes the sum the released value, bool [D]."""
    nearest_D = (value_D.astype(np.float64) - sum_D).astype(np.float32)
    explained_D = np.zeros(len(value_D), bool)
    for noise_D in (
        nearest_D,
        np.nextafter(nearest_D, np.float32(-np.inf)),
        np.nextafter(nearest_D, np.float32(np.inf)),
    ):
        explained_D |= (sum_D + noise_D.astype(np.float64)).astype(np.float32) == value_D
    return ~explained_D


def out_of_the_grid(value_D: np.ndarray, sum_D: np.ndarray, step: float) -> np.ndarray:
    """Where no float32 noise makes the sum the released value of a grid, bool [D]."""
    noise_D = (value_D.astype(np.float64) - sum_D).astype(np.float32)
    noisy_D = (sum_D + noise_D.astype(np.float64)).astype(np.float32)
    return np.round(noisy_D / step) * step != value_D


def guess(
    without: np.ndarray,
    within: np.ndarray,
    value_D: np.ndarray,
    other_D: np.ndarray,
    update_D: np.ndarray,
) -> bool:
    """Whether the update is in the sum: by its low bits, if they decide, else by likelihood.

    Args:
      without, within: where the released value is impossible without, or with, the update.
    """
    if without.sum() != within.sum():
        return bool(without.sum() > within.sum())
    return bool((value_D - other_D) @ update_D > update_D @ update_D / 2)


def _contribution(broadcast, examples, key):
    import jax.numpy as jnp

    del key
    weights = jnp.where(examples.mask[..., None], examples.batches["weights"], jnp.float32(0))
    update_D, other_D = broadcast
    first, second = jnp.sum(weights, axis=(0, 1))
    return first * update_D + second * other_D


def measured(dimension: int, releases: int) -> list[dict]:
    """The rows of one size."""
    import jax
    import jax.numpy as jnp

    import jaxpfl as jp
    from jaxpfl.federated.double_word import DoubleWord
    from jaxpfl.federated.release.accumulators import rounded_sum
    from jaxpfl.privacy.mechanisms import standard_normal

    # A norm a little below the clip norm, so that nothing is rescaled.
    random_2xD = np.random.default_rng(0).normal(size=(2, dimension))
    random_2xD *= 0.999 / np.linalg.norm(random_2xD, axis=1, keepdims=True)
    update_D, other_D = (np.asarray(each, np.float32) for each in random_2xD)
    update, other = (np.asarray(each, np.float64) for each in (update_D, other_D))
    everyone = jp.Poisson(2, 2)
    plan = jp.Plan(
        rounds=1, clip=jp.Clip(1.0), noise=jp.Noise(1.0), participation=everyone, delta=1e-5
    )
    in_steps = dataclasses.replace(plan, noise=jp.Noise(1.0, "exact"))
    right: dict[str, list[bool]] = {}
    unexplained: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(releases):
            coin = number % 2 == 1
            clients = jp.data.from_clients(
                {"a": {"weights": [[0.0, 1.0]]}, "b": {"weights": [[float(coin), 0.0]]}}
            )
            common = {"broadcast": (update_D, other_D), "cohort": jp.CohortSpec(1, 1)}
            path = Path(folder) / f"{number}.jsonl"
            value_D = jp.release(_contribution, clients, plan, ledger=path, **common).value
            exact = jp.release(
                _contribution, clients, in_steps, ledger=path.with_suffix(".e"), **common
            )
            sums = other, other + update
            noise = standard_normal(jax.random.key(number, impl="threefry4x32"), (dimension,))
            high = sums[coin].astype(np.float32)
            pair = DoubleWord(
                jnp.asarray(high), jnp.asarray((sums[coin] - high).astype(np.float32))
            )
            float_D = np.asarray(rounded_sum(pair, noise))
            none = np.zeros(dimension, bool)
            for name, shown_D, (without, within) in (
                ("float32", float_D, [impossible(float_D, each) for each in sums]),
                ("as released", value_D, [out_of_the_grid(value_D, each, STEP) for each in sums]),
                ("exact", exact.value, (none, none)),
            ):
                right.setdefault(name, []).append(
                    guess(without, within, shown_D, other, update) == coin
                )
                unexplained.setdefault(name, []).append((without if coin else within).mean())
    return [
        {
            "dimensions": dimension,
            "noise": name,
            "releases": releases,
            "right": float(np.mean(each)),
            "exact_gaussian": 0.5 * math.erfc(-0.999 / math.sqrt(8)),
            "impossible": float(np.mean(unexplained[name])),
        }
        for name, each in right.items()
    ]


def main(config: Config) -> None:
    for dimension in config.dimensions:
        rows = measured(dimension, config.releases)
        for row in rows:
            print(row)
        harness.record("float_attack", rows)


if __name__ == "__main__":
    main(tyro.cli(Config))
