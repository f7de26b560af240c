"""Client functions share a program if they are the same, whatever their own `==` says."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.federated import LocalTraining
from jaxpfl.federated.clients.client import Static
from jaxpfl.models import emnist_cnn

CLIENTS = 6
TRACED = []


def held(examples):
    TRACED.append(None)
    return jnp.where(examples.mask, examples.batches["x"], 0).sum()


@dataclasses.dataclass(frozen=True)
class Uncompared:
    scale: float = dataclasses.field(compare=False)
    array: jax.Array | None = dataclasses.field(default=None, compare=False)

    def __call__(self, broadcast, examples, key):
        return held(examples) * (self.scale if self.array is None else self.array[0])


@dataclasses.dataclass(frozen=True)
class Compared:
    scale: float

    def __call__(self, broadcast, examples, key):
        return held(examples) * jnp.copysign(1.0, self.scale) * (1.0 + abs(self.scale))


@dataclasses.dataclass(frozen=True)
class Wrapping:
    inner: object
    sizes: tuple = (1, 2.0, "three", None)

    def __call__(self, broadcast, examples, key):
        return self.inner(broadcast, examples, key)


class OneForAll:
    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 0


class EqualToItsClass(OneForAll):
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, broadcast, examples, key):
        return held(examples) * self.scale


class EqualPartial(OneForAll, functools.partial):
    pass


@dataclasses.dataclass(frozen=True)
class OfANumber(float):
    """The number is no field."""

    name: str = "scale"

    def __call__(self, broadcast, examples, key):
        return held(examples) * float(self)


def of_a_number(scale):
    made = float.__new__(OfANumber, scale)
    object.__setattr__(made, "name", "scale")
    return made


class Pair(NamedTuple):
    scale: float
    other: object

    __eq__, __hash__ = OneForAll.__eq__, OneForAll.__hash__

    def __call__(self, broadcast, examples, key):
        return held(examples) * self.scale


def scaled(scale, broadcast, examples, key):
    return held(examples) * scale


def asked(client_fn, folder):
    """What six clients of 0.1 each send, and the digest of the program that the ledger states."""
    clients = jp.data.from_clients({f"c{i}": {"x": np.float32([0.1])} for i in range(CLIENTS)})
    plan = jp.Plan(1, jp.Clip(9.0), jp.Noise(1e-5), jp.Poisson(CLIENTS, CLIENTS), 1e-2)
    path = folder / f"{len(list(folder.iterdir()))}"
    found = jp.release(client_fn, clients, plan, ledger=path, cohort=jp.CohortSpec(2, 4))
    return float(found.value), jp.Ledger.read(path).queries[0]["program"]


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: Uncompared(1.0, jnp.full(1, scale)),
        lambda scale: Wrapping(Uncompared(scale)),
        lambda scale: Uncompared(scale).__call__,
        lambda scale: Wrapping(EqualToItsClass(scale)),
        lambda scale: EqualPartial(scaled, scale),
        lambda scale: Pair(scale, None),
    ],
)
def test_functions_that_compare_equal_are_told_apart(make):
    """By what each program's cache is addressed with, as the next test sees by releases."""
    assert Static(make(1.0)) != Static(make(5.0))


@pytest.mark.parametrize("make", [Uncompared, EqualToItsClass, of_a_number])
def test_functions_that_compare_equal_run_their_own_programs(make, tmp_path):
    one, other = make(1.0), make(5.0)
    (first, program), (second, changed) = asked(one, tmp_path), asked(other, tmp_path)
    np.testing.assert_allclose([first, second], [0.6, 3.0], atol=0.01)
    assert program != changed


def test_numbers_that_compare_equal_are_told_apart(tmp_path):
    assert asked(Compared(0.0), tmp_path)[0] > 0.5
    assert asked(Compared(-0.0), tmp_path)[0] < -0.5
    assert Static(Compared(1)) != Static(Compared(True)) != Static(Compared(1.0))
    assert Static(Compared(np.float32(1))) != Static(Compared(np.float64(1)))


def test_what_is_made_anew_of_equal_settings_is_compiled_once(tmp_path):
    """As the points of a sweep."""
    TRACED.clear()
    asked(Wrapping(Compared(2.0)), tmp_path)
    once = len(TRACED)
    asked(Wrapping(Compared(2.0)), tmp_path)
    assert len(TRACED) == once > 0
    asked(Wrapping(Compared(3.0)), tmp_path)
    assert len(TRACED) == 2 * once


def test_training_of_equal_models_is_the_same():
    optimizer = optax.sgd(0.1)
    first, second = (LocalTraining(emnist_cnn(classes=3), optimizer) for _ in range(2))
    jax.eval_shape(first.model.init, jax.random.key(0))  # what follows from the fields is no field
    assert Static(first) == Static(second) and hash(Static(first)) == hash(Static(second))
    assert Static(first) != Static(LocalTraining(emnist_cnn(classes=4), optimizer))
    assert Static(first) != Static(LocalTraining(emnist_cnn(classes=3), optax.sgd(0.1)))
