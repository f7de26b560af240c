"""The work that all programs do, made with numpy alone, and the way in which a driver asks for it.

A round of DP-FedAvg: each client takes one epoch of SGD on the EMNIST CNN of
`jaxpfl.models.emnist_cnn` from the same parameters, in batches of 20 and in the order of its
examples; its change is clipped in L2 norm; the sum gets Gaussian noise and is averaged. Images and
labels are random, from a fixed seed: their values cost the same as real ones.

A step of DP-SGD (`*_examples`): the gradient of each of all examples is clipped, the sum gets noise
and is averaged, the parameters take one step of SGD.

A program is started as `python -m benchmarks.peers.NAME FILE`, answers the start with one line of
JSON (its versions), and then each line that it reads with one round and one line of JSON: the L2
norm of the mean change before noise, which shows that the same work was done.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

EXAMPLES, BATCH, CLASSES, SHAPE = 100, 20, 62, (28, 28, 1)
STEPS = EXAMPLES // BATCH
CLIP_NORM, NOISE, LEARNING_RATE = 0.5, 1.0, 0.1
EXAMPLE_CLIP_NORM = 1.0  # of one example's gradient

_SHAPES = {
    "convolution_0.kernel": (3, 3, 1, 32),
    "convolution_1.kernel": (3, 3, 32, 64),
    "hidden.kernel": (9216, 128),
    "output.kernel": (128, CLASSES),
}

LAYERS = [name.removesuffix(".kernel") for name in _SHAPES]

Arrays = dict[str, np.ndarray]


def parameters() -> Arrays:
    """Glorot-uniform kernels and zero biases by name, in the layout of `jaxpfl`."""
    rng = np.random.default_rng(1)
    given = {}
    for name, shape in _SHAPES.items():
        window = math.prod(shape[:-2])
        limit = math.sqrt(6 / (window * (shape[-2] + shape[-1])))
        given[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
        given[name.replace("kernel", "bias")] = np.zeros(shape[-1], np.float32)
    return given


def clients(count: int, ragged: bool) -> Arrays:
    """Images [N, 28, 28, 1], labels [N] and offsets [count + 1] of each client's examples.

    100 examples a client, or, if `ragged`, 1 to 100: log-normal, as client data sets are.
    """
    rng = np.random.default_rng(0)
    sizes = np.full(count, EXAMPLES)
    if ragged:
        sizes = np.clip(rng.lognormal(3.6, 0.8, count), 1, EXAMPLES).astype(int)
    return {
        "image": rng.random((sizes.sum(), *SHAPE), np.float32),
        "label": rng.integers(0, CLASSES, sizes.sum()),
        "offsets": np.concatenate([[0], np.cumsum(sizes)]),
    }


def load(file: str) -> tuple[Arrays, Arrays]:
    """The parameters and the clients of a file that `save` wrote."""
    with np.load(file, allow_pickle=False) as arrays:
        held = dict(arrays)
    return {name: held.pop(name) for name in parameters()}, held


def by_layer(arrays: Arrays) -> dict[str, Arrays]:
    """Parameters as the models of `jaxpfl` have them: those of each layer by name."""
    layers: dict[str, Arrays] = {}
    for name, array in arrays.items():
        layer, leaf = name.split(".")
        layers.setdefault(layer, {})[leaf] = array
    return layers


def save(file: str, count: int, ragged: bool) -> None:
    arrays: Any = {**parameters(), **clients(count, ragged)}
    np.savez(file, **arrays)


def each(held: Arrays) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each client's images and labels."""
    for start, end in zip(held["offsets"], held["offsets"][1:], strict=False):
        yield held["image"][start:end], held["label"][start:end]


def stacked(held: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images [C, steps, batch, ...], labels and mask [C, steps, batch], zeros where there is none.

    This is how a program in JAX takes clients of different sizes.
    """
    count = len(held["offsets"]) - 1
    image = np.zeros((count, EXAMPLES, *SHAPE), np.float32)
    label = np.zeros((count, EXAMPLES), np.int32)
    mask = np.zeros((count, EXAMPLES), bool)
    for client, (images, labels) in enumerate(each(held)):
        image[client, : len(labels)], label[client, : len(labels)] = images, labels
        mask[client, : len(labels)] = True
    shape = (count, STEPS, BATCH)
    return image.reshape(*shape, *SHAPE), label.reshape(shape), mask.reshape(shape)


def serve(round_: Callable[[], float | None], **versions: str) -> None:
    """Answers the driver until it hangs up; `round_` returns the norm."""
    print(json.dumps(versions), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"norm": round_()}), flush=True)
