"""Models of one's own: against the CNN's and plain formulas, and refused before any charge."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpfl as jp
from jaxpfl.models.base import masked_loss
from tests.refusals import refusal
from tests.trees import assert_close

SHAPE = jax.ShapeDtypeStruct((2, 2, 1), jnp.float32)


def init(key):
    return {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}


def logits(params, batch):
    flat = batch["image"].reshape(len(batch["image"]), -1)
    # The square root has no finite gradient at 0, which is what padding holds.
    return jnp.sqrt(jnp.abs(flat)) @ jnp.sin(params["w"]) + params["b"][None, :]


def loss(params, batch):
    chances = jax.nn.log_softmax(logits(params, batch))
    return -jnp.take_along_axis(chances, batch["label"][:, None], axis=1)[:, 0]


def metrics(params, batch):
    found = logits(params, batch)
    return {"accuracy": jnp.argmax(found, 1) == batch["label"], "largest": jnp.max(found, 1)}


MODEL = jp.models.from_functions(init, loss, metrics)


def batch(seed, size=5):
    random = np.random.default_rng(seed)
    image = random.normal(size=(size, 2, 2, 1)).astype(np.float32)
    return {"image": image, "label": random.integers(0, 3, size).astype(np.int32)}


def clients(count=6, **changed):
    columns = {**batch(0, 4 * count), **changed}
    rows = (slice(4 * i, 4 * i + 4) for i in range(count))
    held = ({name: column[own] for name, column in columns.items()} for own in rows)
    return jp.data.from_clients({str(i): columns for i, columns in enumerate(held)})


def test_loss_metrics_and_gradient_are_those_of_a_plain_formula():
    params, real = MODEL.init(jax.random.key(0)), batch(1)
    mask = np.array([True, True, False, True, False])
    slope = jax.jit(jax.value_and_grad(MODEL.loss, has_aux=True))
    (value, found), gradient = slope(params, real, mask)

    def plain(params):
        rows = {name: column[mask] for name, column in real.items()}
        return masked_loss(logits(params, rows), rows["label"], jnp.ones(3, bool))

    plain_slope = jax.jit(jax.value_and_grad(plain, has_aux=True))
    (expected, sums), plain_gradient = plain_slope(params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(gradient, plain_gradient)
    summary = jp.models.summarise(jax.device_get(found))
    assert summary["accuracy"] == pytest.approx(float(sums["correct"]) / 3)
    largest = np.asarray(logits(params, real)).max(1)[mask].mean()
    assert summary["largest"] == pytest.approx(largest, rel=1e-6)
    assert summary["count"] == 3
    assert summary.keys() == {"loss", "accuracy", "largest", "count"}


class Linen(nn.Module):
    normalise: type | None = None
    rate: float = 0.0

    @nn.compact
    def __call__(self, image):
        hidden = nn.Dense(6)(image.reshape(len(image), -1))
        if self.normalise is not None:
            hidden = self.normalise(use_running_average=False)(hidden)
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not self.rate)(nn.relu(hidden)))


class NNX(nnx.Module):
    def __init__(self, rngs, normalise=None, dropout=False):
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.normalise = normalise and normalise(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else None
        self.second = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, image):
        return self.second(nnx.relu(self.first(image.reshape(len(image), -1))))


def of_logits(found, batch):
    return -jnp.sum(jax.nn.log_softmax(found) * jax.nn.one_hot(batch["label"], 3), axis=1)


def right(found, batch):
    return {"accuracy": jnp.argmax(found, -1) == batch["label"]}


@pytest.mark.parametrize("module", [Linen(), lambda rngs: NNX(rngs)], ids=["linen", "nnx"])
def test_a_flax_module_is_a_model(module):
    model = jp.models.from_flax(module, of_logits, right, inputs={"image": SHAPE})
    real = batch(1)
    params = model.init(jax.random.key(3))
    if isinstance(module, nn.Module):
        expected = module.apply({"params": params}, real["image"])
    else:
        made = module(nnx.Rngs(jax.random.key(3)))
        # The same parameters, of the same key.
        np.testing.assert_array_equal(params["first"]["kernel"], made.first.kernel[...])
        expected = made(real["image"])
    value, sums = model.loss(params, real, jnp.ones(5, bool))
    np.testing.assert_allclose(value, of_logits(expected, real).mean(), rtol=1e-6)
    assert float(sums["accuracy_sum"]) == int(right(expected, real)["accuracy"].sum())
    # Another key gives other parameters.
    other = model.init(jax.random.key(4))
    assert not jax.tree.all(jax.tree.map(np.array_equal, params, other))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Linen(nn.BatchNorm), "GroupNorm"),
        (Linen(rate=0.5), "dropout"),
        (lambda rngs: NNX(rngs, nnx.BatchNorm), "GroupNorm"),
        (lambda rngs: NNX(rngs, dropout=True), "dropout"),
        (NNX(nnx.Rngs(0)), "lambda rngs: Net found NNX, which exists already"),
        (Linen, "type"),
        (nn.Conv(2, (3, 3, 3, 3, 3)), "float32[1, 2, 2, 1]"),
        (lambda: 3, "lambda rngs"),
        (7, "int"),
    ],
)
def test_modules_that_are_refused(module, words):
    refusal(lambda: jp.models.from_flax(module, of_logits, inputs={"image": SHAPE}), words)


def fed_avg(model, held):
    everyone = jp.Poisson(len(held), len(held))
    plan = jp.Plan.calibrated(
        epsilon=8.0, delta=1e-2, rounds=2, clip=jp.Clip(0.5), participation=everyone
    )
    spec, sgd = jp.CohortSpec(batch_size=4, max_examples=4), optax.sgd(0.1)
    return jp.algorithms.fed_avg(model, client=sgd, server=sgd, plan=plan, cohort=spec)


def test_it_trains_and_is_evaluated_by_its_own_metrics(tmp_path, drawn):
    held = clients()
    evaluator = jp.Evaluator(MODEL, jp.DeclaredPublic(clients(3, **batch(5, 12)), "others"))
    files = {"ledger": tmp_path / "ledger.jsonl", "out": tmp_path / "run"}
    result = jp.run(fed_avg(MODEL, held), held, **files, evaluation=evaluator)
    assert result.metrics["evaluation"].keys() == {"loss", "accuracy", "largest", "count"}
    assert "largest on others" in (tmp_path / "run" / "report.html").read_text("utf-8")


def mean_loss(params, batch):
    return loss(params, batch).mean()


MISTAKES = {
    "a missing field": ({"loss": lambda p, b: b["lable"]}, "'lable' image, label"),
    "a mean": ({"loss": mean_loss}, "mean or sum"),
    "whole numbers": ({"loss": lambda p, b: b["label"]}, "float for each example"),
    "no array": ({"loss": lambda p, b: None}, "NoneType"),
    "shapes": ({"loss": lambda p, b: b["image"].reshape(-1, 4) @ p["w"].T}, "cannot be computed"),
    "a metric over the batch": ({"metrics": lambda p, b: {"x": loss(p, b).mean()}}, "'x' mean"),
    "no names": ({"metrics": lambda p, b: loss(p, b)}, "dictionary"),
    "a reserved name": ({"metrics": lambda p, b: {"loss": loss(p, b)}}, "'count'"),
    "integers": ({"init": lambda key: {"w": jnp.zeros((4, 3), jnp.int32)}}, "'w' int32"),
    "no parameters": ({"init": lambda key: {}}, "no array"),
    "columns": ({"columns": ("image", "lable")}, "'lable'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_before_a_charge(tmp_path, mistake):
    changed, words = MISTAKES[mistake]
    functions = {"init": init, "loss": loss, "metrics": metrics, **changed}
    model, held = jp.models.from_functions(**functions), clients()  # pyright: ignore
    files = {"ledger": tmp_path / "ledger.jsonl", "out": tmp_path / "run"}
    refusal(lambda: jp.run(fed_avg(model, held), held, **files), words)
    assert not list(tmp_path.iterdir())
    refusal(lambda: jp.Evaluator(model, jp.DeclaredPublic(held, "public")), words)
