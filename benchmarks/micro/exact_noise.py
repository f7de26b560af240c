"""What exact noise costs: draws a second, and rounds, beside float32 noise.

    python -m benchmarks.micro.exact_noise [--opendp-python PYTHON]

`draws`: `exact_normal` against `standard_normal` of as many coordinates, compiled. With the Python
of an environment that has OpenDP, its sampler too: the discrete Gaussian of the same deviation, on
a vector of whole numbers, in one thread.

`streams`: one more round of DP-FTRL's noise, which has 16 rounds an epoch.

`rounds`: the release of one round, warm, with plans that differ in the kind of noise alone: the
EMNIST CNN (10 clients, 2 steps of 20 images), the CIFG word model (10 clients, 2 steps of 16
sentences of 20 words), and FreD's second moment (1,000 clients, dimension 384). A ledger is not
kept, and cohorts are not packed: what is timed is the door.
"""

import dataclasses
import subprocess
import sys

import numpy as np
import tyro

from benchmarks import harness

CHILD = """
import time, opendp.prelude as dp
dp.enable_features("contrib")
space = dp.vector_domain(dp.atom_domain(T=int), size={size}), dp.l2_distance(T=float)
gaussian = dp.m.make_gaussian(*space, scale={scale}.0)
gaussian([0] * {size})
start = time.perf_counter()
gaussian([0] * {size})
print(time.perf_counter() - start)
"""


@dataclasses.dataclass(frozen=True)
class Config:
    coordinates: tuple[int, ...] = (10_000, 1_000_000)
    repeats: int = 7
    opendp_python: str | None = None


def draws(config: Config) -> list[dict]:
    """Rows of how long so many draws take."""
    import jax

    from jaxpfl.federated import client_mesh
    from jaxpfl.privacy.exact_noise import STEPS, exact_normal
    from jaxpfl.privacy.keys import training_root
    from jaxpfl.privacy.mechanisms import standard_normal

    rows, key, mesh = [], training_root(0), client_mesh()
    for size in config.coordinates:
        seconds = harness.interleaved(
            {
                "float32": lambda size=size: standard_normal(key, (size,)),
                "exact": lambda size=size: exact_normal(key, size, mesh),
            },
            config.repeats,
        )
        if config.opendp_python is not None:
            code = CHILD.format(size=size, scale=STEPS)
            child = [config.opendp_python, "-c", code]
            done = subprocess.run(child, capture_output=True, text=True, check=True)
            seconds["OpenDP, discrete Gaussian"] = float(done.stdout)
        rows += [
            {"what": "draws", "noise": name, "coordinates": size, "seconds": taken,
             "draws_per_s": size / taken, "ratio": taken / seconds["float32"]}
            for name, taken in seconds.items()
        ]  # fmt: skip
    jax.clear_caches()
    return rows


def streams(config: Config) -> list[dict]:
    """Rows of how long DP-FTRL's noise takes, once its ring is full."""
    from itertools import count

    from jaxpfl.privacy.correlated_noise import NoiseStream
    from jaxpfl.privacy.keys import training_root

    def following(stream):
        rounds = count(16)
        return lambda: stream.noise(next(rounds))

    rows = []
    for size in config.coordinates:
        streams = {
            name: following(NoiseStream(16, training_root(0), size, exact))
            for name, exact in (("banded", False), ("exact banded", True))
        }
        seconds = harness.interleaved(streams, config.repeats)
        rows += [
            {"what": "streams", "noise": name, "coordinates": size, "seconds": taken,
             "draws_per_s": size / taken, "ratio": taken / seconds["banded"]}
            for name, taken in seconds.items()
        ]  # fmt: skip
    return rows


def rounds(config: Config) -> list[dict]:
    """Rows of how long the releases of three systems take."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpfl as jp
    from benchmarks.rounds import door_keys, whole_bucket
    from jaxpfl.federated import LocalTraining, Query
    from jaxpfl.federated.clients.moments import ClientMoment, half_shape
    from jaxpfl.federated.release.door import Door

    draw, rows, keys = np.random.default_rng(0), [], door_keys()
    cnn, words = jp.models.emnist_cnn(), jp.models.CIFGLanguageModel(10_004, 96, 670)
    for name, clients, shape, model, columns in (
        ("EMNIST CNN", 10, (2, 20), cnn,
         {"image": draw.normal(size=(10, 2, 20, 28, 28, 1)).astype(np.float32),
          "label": draw.integers(0, 62, (10, 2, 20)).astype(np.int32)}),
        ("CIFG word model", 10, (2, 16), words,
         {"tokens": draw.integers(4, 10_004, (10, 2, 16, 21)).astype(np.int32)}),
        ("FreD, second moment", 1_000, (1, 8), None,
         {"embedding": draw.normal(size=(1_000, 1, 8, 384)).astype(np.float32)}),
    ):  # fmt: skip
        if model is None:
            client_fn, broadcast = ClientMoment("second", 1.0), jnp.zeros(384)
            like = jax.ShapeDtypeStruct(half_shape(384), jnp.float32)
        else:
            client_fn, broadcast = (
                LocalTraining(model, optax.sgd(0.1)),
                model.init(jax.random.key(0)),
            )
            like = broadcast
        bucket = whole_bucket(columns)
        releases = {}
        for kind in ("independent", "exact"):
            plan = jp.Plan(
                rounds=10,
                clip=jp.Clip(0.5),
                noise=jp.Noise(1.0, kind),
                participation=jp.Poisson(10_000, clients),
                delta=1e-6,
            )
            spec = jp.CohortSpec(shape[1], shape[0] * shape[1], clients_per_bucket=clients)
            door = Door(Query("round", client_fn, plan, spec), like)
            norm = jnp.float32(0.5)
            releases[kind] = lambda door=door, broadcast=broadcast, bucket=bucket, norm=norm: (
                door(broadcast, (bucket,), norm, keys).value
            )
        seconds = harness.interleaved(releases, config.repeats)
        ratio = seconds["exact"] / seconds["independent"]
        rows.append({"what": "round", "system": name, "coordinates": door.coordinates,
                     "float32_s": seconds["independent"], "exact_s": seconds["exact"],
                     "ratio": ratio})  # fmt: skip
    return rows


def main(config: Config) -> None:
    harness.use_cpu_devices(None)
    for part in (draws, streams, rounds):
        rows = part(config)
        harness.record("exact_noise", rows)
        harness.table(rows, list(rows[0]))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config)))
