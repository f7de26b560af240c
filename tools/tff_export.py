"""Runs in the environment of tensorflow-federated: what it reads, and files that it writes.

    python tools/tff_export.py JOBS.json

JOBS is a list of {"path", "dataset" or "features", "split", "out"}: what TFF reads of the split
goes to `out`, an .npz file. Jobs with "make" write a file first, through TFF's own saver.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tensorflow_federated.python.simulation.datasets import (
    cifar100,
    emnist,
    shakespeare,
    sql_client_data_utils,
    stackoverflow,
)

# How TFF's own loaders parse; they download a file first and have no other entrance.
PARSERS = {
    "cifar100": cifar100._add_proto_parsing,
    "emnist": emnist._add_proto_parsing,
    "shakespeare": shakespeare._add_parsing,
    "stackoverflow": stackoverflow._add_proto_parsing,
}


def spec(features: dict) -> dict:
    """The element_spec of {name: [dtype, shape]}."""
    return {
        name: tf.TensorSpec(shape, tf.string if dtype == "text" else tf.dtypes.as_dtype(dtype))
        for name, (dtype, shape) in features.items()
    }


def read(job: dict) -> None:
    if "dataset" in job:
        data = tff.simulation.datasets.SqlClientData(job["path"], job["split"])
        data = data.preprocess(PARSERS[job["dataset"]])
    else:
        data = tff.simulation.datasets.load_and_parse_sql_client_data(
            job["path"], spec(job["features"]), job["split"]
        )
    sizes, names = [], list(data.element_type_structure)
    found: dict[str, list] = {name: [] for name in names}
    for client in data.client_ids:
        examples = list(data.create_tf_dataset_for_client(client).as_numpy_iterator())
        sizes.append(len(examples))
        for example in examples:
            for name in names:
                found[name].append(example[name])
    arrays = {}
    for name, values in found.items():
        if values and isinstance(values[0], bytes):
            arrays[f"bytes:{name}"] = np.frombuffer(b"".join(values), np.uint8)
            arrays[f"lengths:{name}"] = np.array([len(value) for value in values])
        else:
            arrays[f"array:{name}"] = np.array(values)
    ids = json.dumps(data.client_ids).encode()
    np.savez_compressed(
        job["out"], ids=np.frombuffer(ids, np.uint8), sizes=np.array(sizes), **arrays
    )


def make(path: str, features: dict, clients: int, most: int, seed: int) -> None:
    """A file of random values of `features`; clients of 0 .. `most` examples in two splits."""
    rng = np.random.default_rng(seed)
    words = ["straße", "日本", "a\0b", "", "🙂", "plain", "<URL>", "it's", "x" * 200]
    ids = [
        f"client {rng.integers(10**9)} {rng.choice(['é', 'z', 'Z', '_'])}" for _ in range(clients)
    ]

    def values(dtype: str, shape: list, count: int):
        if dtype == "text":
            return [" ".join(rng.choice(words, rng.integers(0, 8))).encode() for _ in range(count)]
        if dtype.startswith("float"):
            drawn = rng.standard_normal((count, *shape)).astype(dtype)
            drawn[rng.random(drawn.shape) < 0.05] = np.nan
            drawn[rng.random(drawn.shape) < 0.05] = -np.inf
            return drawn
        limits = np.iinfo(dtype)
        low, high = (0, 255) if shape == [84, 84, 3] else (limits.min, limits.max)
        if most == 2 and not shape:
            low, high = 0, 1
        drawn = rng.integers(low, high, (count, *shape), dtype, endpoint=True)
        # Small magnitudes too: varints of every length.
        shift = rng.integers(0, 8 * limits.dtype.itemsize, drawn.shape).astype(dtype)
        return drawn >> shift if high > 255 else drawn

    def dataset(client: str) -> tf.data.Dataset:
        del client
        count = int(rng.integers(0, most + 1))
        parts = {
            name: tf.constant(
                values(dtype, shape, count),
                tf.string if dtype == "text" else dtype,
                shape=(count, *shape),
            )
            for name, (dtype, shape) in features.items()
        }
        return tf.data.Dataset.from_tensor_slices(parts)

    Path(path).unlink(missing_ok=True)
    sql_client_data_utils.save_to_sql_client_data(
        ids, dataset, path, split_names_by_client_id={i: rng.choice(["train", "test"]) for i in ids}
    )


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        if "make" in job:
            make(job["path"], **job["make"])
        read(job)


if __name__ == "__main__":
    main()
