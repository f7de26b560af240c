"""What a client does: SGD against a plain loop, and padding that leaves no trace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpfl.federated import Examples, LocalTraining, contribution

DIM = 3


@dataclasses.dataclass(frozen=True)
class LinearModel:
    """Least squares, so that the reference is three lines of numpy."""

    name: str = "linear"

    def init(self, key):
        return {"w": jnp.zeros((DIM,), jnp.float32), "b": jnp.zeros((), jnp.float32)}

    def loss(self, params, batch, mask):
        x = jnp.where(mask[:, None], batch["x"], 0.0)
        error = jnp.where(mask, x @ params["w"] + params["b"] - batch["y"], 0.0)
        count = jnp.sum(mask, dtype=jnp.float32)
        total = 0.5 * jnp.sum(error * error)
        sums = {"loss_sum": total, "correct": count, "count": count}
        return total / jnp.maximum(count, 1.0), sums

    def evaluate(self, params, batch, mask):
        return self.loss(params, batch, mask)[1]


def examples(sizes, steps, batch, seed=0, poison=np.nan):
    """Batches of the given sizes, padded with poison to [steps, batch]."""
    rng = np.random.default_rng(seed)
    x = np.full((steps, batch, DIM), poison, np.float32)
    y = np.full((steps, batch), poison, np.float32)
    mask = np.zeros((steps, batch), bool)
    for step, size in enumerate(sizes):
        x[step, :size] = rng.normal(size=(size, DIM))
        y[step, :size] = rng.normal(size=size)
        mask[step, :size] = True
    return Examples({"x": x, "y": y}, mask, np.int32(len(sizes)))


def by_hand(held, learning_rate, momentum=0.0):
    """SGD in float64 numpy, one batch after the other."""
    w, b = np.zeros(DIM), 0.0
    velocity_w, velocity_b = np.zeros(DIM), 0.0
    for step in range(held.mask.shape[0]):
        rows = held.mask[step]
        if not rows.any():
            continue
        x = held.batches["x"][step][rows].astype(np.float64)
        y = held.batches["y"][step][rows].astype(np.float64)
        error = x @ w + b - y
        velocity_w = momentum * velocity_w + x.T @ error / len(y)
        velocity_b = momentum * velocity_b + error.mean()
        w, b = w - learning_rate * velocity_w, b - learning_rate * velocity_b
    return w, b


@functools.cache
def training(momentum=0.0, decay=0.0):
    """Compiled training with SGD, or with AdamW where weights decay."""
    optimizer = optax.adamw(0.1, weight_decay=decay) if decay else optax.sgd(0.1, momentum)
    return jax.jit(functools.partial(contribution, LocalTraining(LinearModel(), optimizer)))


def train(held, longest=None, *, params=None, **how):
    start = LinearModel().init(jax.random.key(0)) if params is None else params
    return training(**how)(start, held, jax.random.key(1), longest)


@pytest.mark.parametrize(
    ("sizes", "batch", "momentum"),
    [(sizes, 4, by) for sizes in ((4,), (4, 4, 1), (2,)) for by in (0.0, 0.9)]
    + [(sizes, 32, 0.0) for sizes in ((5,), (16, 3), (16, 9, 4), (8,), (1, 0, 12))],
)
def test_delta_is_what_a_plain_loop_gives(sizes, batch, momentum):
    """A quarter or a half of the slots may be computed alone; the poison in the others shows it.

    Examples need not be the first of their batch."""
    held = examples(sizes, steps=3, batch=batch)
    backwards = jax.tree.map(lambda leaf: leaf[:, ::-1], (held.batches, held.mask))
    w, b = by_hand(held, 0.1, momentum)
    for each in (held, Examples(*backwards, held.steps)):
        delta = train(each, momentum=momentum)
        np.testing.assert_allclose(delta["w"], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(delta["b"], b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"momentum": 0.9}, {"decay": 0.1}])
def test_steps_that_are_all_padding_change_nothing(how):
    """Clients side by side run as many steps as the largest: the smaller one's result stands."""
    held = examples((4, 3), steps=2, batch=4)
    longer = examples((4, 3), steps=6, batch=4)
    expected, found = train(held, **how), train(longer, jnp.int32(6), **how)
    np.testing.assert_array_equal(found["w"], expected["w"])
    np.testing.assert_array_equal(found["b"], expected["b"])
    assert np.abs(expected["w"]).max() > 0


def test_client_without_examples_changes_nothing():
    """TRUST 1: exactly 0, whatever the optimizer would do on its own."""
    # Parameters of zero would hide a weight decay.
    params = {"w": jnp.ones(DIM), "b": jnp.float32(1)}
    # Alone, and beside one with two batches.
    for longest in (None, jnp.int32(2)):
        held = examples((), steps=2, batch=4)
        delta = train(held, longest, params=params, decay=0.1)
        np.testing.assert_array_equal(delta["w"], np.zeros(DIM))
        np.testing.assert_array_equal(delta["b"], 0.0)


@dataclasses.dataclass(frozen=True)
class RowCounter(LinearModel):
    """Its gradient is the number of rows that are computed."""

    def loss(self, params, batch, mask):
        rows = jnp.float32(mask.shape[0])
        return rows * params["b"] + 0.0 * jnp.sum(params["w"]), {}


@pytest.mark.parametrize(("sizes", "rows"), [((3,), 8), ((9,), 16), ((17,), 32), ((32, 32, 2), 72)])
def test_rows_without_examples_are_not_computed(sizes, rows):
    client = LocalTraining(RowCounter(), optax.sgd(1.0))
    params = LinearModel().init(jax.random.key(0))
    held = examples(sizes, steps=3, batch=32)
    found = jax.jit(functools.partial(contribution, client))(params, held, jax.random.key(1))
    assert found["b"] == -rows


@pytest.mark.parametrize("model", [LinearModel(), RowCounter()])
def test_no_client_changes_what_another_beside_it_computes(model):
    """TRUST 16: not even the rounding, which would add to what a client moves the sum by."""
    client, params = LocalTraining(model, optax.sgd(0.1)), LinearModel().init(jax.random.key(0))
    held = examples((5,), steps=2, batch=32)

    @jax.jit
    def one(held):
        return contribution(client, params, held, jax.random.key(1), jnp.int32(2))

    both, found = jax.vmap(one), []
    for other in (examples((2,), steps=2, batch=32), examples((32, 32), steps=2, batch=32)):
        pair = jax.tree.map(lambda *leaves: np.stack(leaves), held, other)
        found.append(jax.tree.map(lambda leaf: leaf[0], both(pair)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    np.testing.assert_allclose(found[0]["w"], one(held)["w"], rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class AdaptedModel:
    """Least squares with the weights W + a b, one linear map of a decoder's layers."""

    def loss(self, params, batch, mask):
        part = params["layers"]["q"]
        weights = (part["kernel"] + part["a"] @ part["b"])[:, 0]
        return LinearModel().loss({"w": weights, "b": jnp.float32(0.0)}, batch, mask)


def test_adapters_are_trained_on_their_base_which_is_not_sent_back():
    held = examples((4, 3), steps=2, batch=4)
    kernel, a, b = (
        np.random.default_rng(1).normal(size=shape) for shape in ((3, 1), (3, 2), (2, 1))
    )
    adapters = {"q": {"a": np.float32(a), "b": np.float32(b)}}
    base = {"layers": {"q": {"kernel": np.float32(kernel)}}}
    client = LocalTraining(AdaptedModel(), optax.sgd(0.1), adapters=True)  # pyright: ignore
    found = jax.jit(functools.partial(contribution, client))(
        (adapters, base), held, jax.random.key(0)
    )
    first_a, first_b = a, b
    for step in range(2):
        rows = held.mask[step]
        x, y = (held.batches[name][step][rows].astype(np.float64) for name in ("x", "y"))
        slope = x.T @ (x @ (kernel + a @ b)[:, 0] - y)[:, None] / len(y)
        a, b = a - 0.1 * slope @ b.T, b - 0.1 * a.T @ slope
    assert found.keys() == {"q"} and found["q"].keys() == {"a", "b"}
    np.testing.assert_allclose(found["q"]["a"], a - first_a, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["q"]["b"], b - first_b, rtol=1e-4, atol=1e-6)
