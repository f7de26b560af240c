"""Central training: the steps are AdamW, whatever the batch is cut into and wherever it stops."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpfl.experiments.central import training as central
from jaxpfl.experiments.central.adamw import Training, decayed
from jaxpfl.experiments.central.training import fit
from jaxpfl.progress import Progress
from tests.refusals import refusal

SETTINGS = Training(epochs=3, batch_size=8, learning_rate=0.03, weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Linear:
    """Least squares on columns x [B, 3] and y [B]; an example with y = 100 has no target."""

    name: str = "linear"
    columns: tuple[str, ...] = ("x", "y")

    def init(self, key: jax.Array) -> Any:
        del key
        return {"kernel": jnp.ones(3), "bias": jnp.ones(())}

    def loss(self, params: Any, batch: Any, mask: jax.Array) -> Any:
        real = jnp.logical_and(mask, batch["y"] < 50)
        found = batch["x"] @ params["kernel"] + params["bias"]
        total = jnp.sum(jnp.where(real, found - batch["y"], 0.0) ** 2)
        count = jnp.sum(real, dtype=jnp.float32)
        sums = {"loss_sum": total, "correct": jnp.zeros(()), "count": count}
        return total / jnp.maximum(count, 1.0), sums

    def evaluate(self, params: Any, batch: Any, mask: jax.Array) -> Any:
        return self.loss(params, batch, mask)[1]


MODEL = Linear()
START = MODEL.init(jax.random.key(0))


def _columns(examples: int = 45, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(examples, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * generator.normal(size=examples)
    y[::5] = 100
    return {"x": x, "y": y.astype(np.float32)}


def _reference(columns: Any, settings: Training, seed: int) -> tuple[np.ndarray, list[float]]:
    """Parameters (kernel, bias) and each epoch's training loss, in float64 numpy."""
    x = np.concatenate([columns["x"], np.ones((len(columns["x"]), 1))], 1).astype(np.float64)
    y, w, m, v = columns["y"].astype(np.float64), np.ones(4), np.zeros(4), np.zeros(4)
    size, steps = settings.batch_size, -(-len(x) // settings.batch_size) * settings.epochs
    step, losses = 0, []
    for epoch in range(settings.epochs):
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(x))
        total = count = 0.0
        for start in range(0, len(x), size):
            rows = order[start : start + size]
            rows = rows[y[rows] < 50]
            residuals = x[rows] @ w - y[rows]
            total, count = total + np.sum(residuals**2), count + len(rows)
            gradient = 2 * x[rows].T @ residuals / len(rows)
            if settings.clip_norm is not None:
                gradient *= min(1.0, settings.clip_norm / np.linalg.norm(gradient))
            rate = settings.learning_rate * 0.5 * (1 + np.cos(np.pi * step / steps))
            step += 1
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            move = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
            decay = settings.weight_decay * np.array([1.0, 1.0, 1.0, 0.0])
            w = w - rate * (move + decay * w)
        losses.append(total / count)
    return w, losses


def flat(params: Any) -> np.ndarray:
    return np.concatenate([params["kernel"], params["bias"][None]])


@pytest.mark.parametrize("changed", [{}, {"clip_norm": None, "batch_size": 64}])
def test_it_is_adamw_with_clipping_and_a_cosine(changed):
    settings, columns = dataclasses.replace(SETTINGS, **changed), _columns()
    found = fit(MODEL, START, columns, settings, seed=3)
    expected, losses = _reference(columns, settings, 3)
    np.testing.assert_allclose(flat(found.params), expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(found.record["train_loss"], losses, rtol=1e-4)
    np.testing.assert_array_equal(START["kernel"], np.ones(3))


def test_devices_change_nothing_but_rounding():
    columns, valid = _columns(50), _columns(7, 1)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    alone = fit(MODEL, START, columns, SETTINGS, seed=0, valid=valid)
    dealt = fit(MODEL, START, columns, SETTINGS, seed=0, valid=valid, mesh=mesh)
    np.testing.assert_allclose(flat(dealt.params), flat(alone.params), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dealt.record["valid_loss"], alone.record["valid_loss"], rtol=1e-5)


def test_the_best_by_validation_is_kept():
    """Validation data from elsewhere: training comes past it and moves away."""
    columns, valid = _columns(), _columns(9, 1)
    valid["y"] = (valid["x"] @ np.array([1.0, 0.9, 0.92]) + 0.9).astype(np.float32)
    settings = dataclasses.replace(SETTINGS, epochs=9)
    found = fit(MODEL, START, columns, settings, seed=0, valid=valid)
    losses = found.record["valid_loss"]
    assert len(losses) == 9
    assert found.record["best_step"] == 6 * (1 + int(np.argmin(losses))) < 6 * 9
    residuals = valid["x"] @ found.params["kernel"] + found.params["bias"] - valid["y"]
    assert np.mean(residuals**2) == pytest.approx(min(losses), rel=1e-5)


class _Killed(Exception):
    pass


def _watch(monkeypatch, callback) -> None:
    """Calls `callback` with the steps done, and of how many, after each dispatch."""

    class Watched(Progress):
        def update(self, done, *arguments):
            callback(done, self._total)

    monkeypatch.setattr(central, "Progress", Watched)


@pytest.mark.parametrize("kill_after", [1, 6, 7])
def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path, monkeypatch, kill_after):
    settings, columns, valid = SETTINGS, _columns(), _columns(9, 1)
    expected = fit(MODEL, START, columns, settings, seed=0, valid=valid)
    given = {"seed": 0, "valid": valid, "folder": tmp_path}

    def kill(done: int, steps: int) -> None:
        assert steps == 18
        if done >= kill_after:
            raise _Killed

    _watch(monkeypatch, kill)
    with pytest.raises(_Killed):
        fit(MODEL, START, columns, settings, **given)
    started = []
    _watch(monkeypatch, lambda done, _: started.append(done))
    found = fit(MODEL, START, columns, settings, **given)
    assert started[0] > 6 * (kill_after // 6)
    np.testing.assert_array_equal(flat(found.params), flat(expected.params))
    assert found.record == expected.record
    # Finished: nothing is done again.
    _watch(monkeypatch, kill)
    assert fit(MODEL, START, columns, settings, **given).record == expected.record
    other = {**given, "seed": 1}
    refusal(lambda: fit(MODEL, START, columns, settings, **other), "belongs to run")


def test_dispatches_of_any_length_give_the_same(monkeypatch):
    columns = _columns()
    expected = fit(MODEL, START, columns, SETTINGS, seed=0)
    monkeypatch.setattr(central, "_DISPATCHED", 1)
    dispatched = []
    _watch(monkeypatch, lambda done, _: dispatched.append(done))
    found = fit(MODEL, START, columns, SETTINGS, seed=0)
    assert dispatched == list(range(1, 19))
    np.testing.assert_array_equal(flat(found.params), flat(expected.params))


def test_decay_spares_biases_norms_and_embeddings():
    params = {
        "embed": {"token": 0, "position": 0},
        "layers": {"attention_norm": {"scale": 0, "bias": 0}, "q": {"kernel": 0, "bias": 0}},
        "embedding": 0,
        "output_bias": 0,
        "head": {"kernel": 0},
        "up": {"a": 0, "b": 0},
    }
    found = jax.tree_util.tree_flatten_with_path(decayed(params))[0]
    names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, yes in found if yes}
    assert names == {"layers.q.kernel", "head.kernel", "up.a", "up.b"}


def test_data_without_examples_is_named():
    columns = _columns()
    empty = {name: column[:0] for name, column in columns.items()}
    call = partial(fit, MODEL, START, columns, SETTINGS, seed=0, valid=empty)
    refusal(call, "valid: examples")
