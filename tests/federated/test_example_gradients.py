"""Clipped sums of examples' gradients that are mostly not formed, against those that are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl import models
from jaxpfl.federated.clients.clipped_gradients import clipped_sum
from jaxpfl.models import CNN, MLP, CIFGLanguageModel, LSTMLanguageModel
from jaxpfl.models.layers.embedding import look_up
from tests.trees import drawn

BATCH = 6
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(4, 12, (BATCH, 7)).astype(np.int32)
TOKENS[1, 4:] = -1
# The same word again and again: its rows of the embedding add up.
TOKENS[2] = 5


def images(side: int) -> dict:
    return {
        "image": RNG.normal(size=(BATCH, side, side, 1)).astype(np.float32),
        "label": RNG.integers(0, 5, BATCH).astype(np.int32),
    }


MODELS = {
    "mlp": (
        MLP(9, 5, hidden=16),
        {
            "features": RNG.normal(size=(BATCH, 9)).astype(np.float32),
            "label": RNG.integers(0, 5, BATCH).astype(np.int32),
        },
    ),
    # With 8 channels on either side, a convolution is one of tiles on a CPU.
    "cnn": (CNN("cnn", (11, 11, 1), 5, ((8, False), (8, True)), hidden=12), images(11)),
    "cnn without tiles": (
        CNN("cnn", (11, 11, 1), 5, ((8, False), (8, True)), hidden=12, form="convolution"),
        images(11),
    ),
    "tied CIFG": (
        CIFGLanguageModel(12, embedding=6, hidden=10, projection=6, peepholes=True),
        {"tokens": TOKENS},
    ),
    "LSTM": (LSTMLanguageModel(12, embedding=4, hidden=8), {"tokens": TOKENS}),
}


@functools.cache
def alone(model):
    def loss(params, example):
        batch = {name: value[None] for name, value in example.items()}
        return model.loss(params, batch, jnp.ones((1,), bool))[0]

    return loss


# One function for each loss, so that it is traced and compiled once.
gradient_of = functools.cache(lambda loss: jax.jit(jax.grad(loss)))


def formed(loss, params, batch, mask, clip_norm) -> dict:
    """The reference: every gradient by itself, clipped and added in float64."""
    gradient = gradient_of(loss)
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    for row in np.flatnonzero(mask):
        each = gradient(params, {name: jnp.asarray(v[row]) for name, v in batch.items()})
        each = jax.tree.map(np.float64, each)
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(each)))
        factor = min(1.0, clip_norm / norm)
        total = jax.tree.map(lambda t, leaf, f=factor: t + f * leaf, total, each)
    return total


@functools.cache
def compiled(loss, clip_norm):
    return jax.jit(lambda *given: clipped_sum(loss, *given, clip_norm))


def summed(loss, params, batch, mask, clip_norm):
    return compiled(loss, clip_norm)(params, batch, mask)


def norm_of(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(tree))))


def assert_near(found, expected, tolerance):
    difference = jax.tree.map(lambda a, b: np.float64(a) - b, found, expected)
    assert norm_of(difference) <= tolerance * norm_of(expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_sum_is_that_of_gradients_that_are_formed(name):
    """TRUST 23: for every kind of layer; masked rows add nothing."""
    model, batch = MODELS[name]
    params = drawn(model, 0)
    mask = np.arange(BATCH) != 3
    found = summed(alone(model), params, batch, mask, 0.05)
    assert_near(found, formed(alone(model), params, batch, mask, 0.05), 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_has_the_same_bits_in_each_place(name):
    """TRUST 56: otherwise one that moves to another place would change the sum by itself."""
    model, batch = MODELS[name]
    params, found = drawn(model, 0), set()
    for place in range(BATCH):
        for neighbours in (0, 1e30, np.nan):
            moved = {field: np.roll(column, place, axis=0) for field, column in batch.items()}
            here = np.arange(BATCH) == place
            for column in moved.values():
                if column.dtype == np.float32:
                    column[~here] *= neighbours
            # 0.0 is added so that no zero is negative.
            total = summed(alone(model), params, moved, here, 0.05)
            leaves = [np.asarray(leaf) + np.float32(0) for leaf in jax.tree.leaves(total)]
            found.add(b"".join(leaf.tobytes() for leaf in leaves))
    assert len(found) == 1 and np.any(leaves[0] != 0)


@jax.jit
def layer(x_NxI, weight_IxO):
    return jnp.tanh(x_NxI @ weight_IxO)


def rows_loss(params, example):
    """Rows through products of all kinds: shared functions, transposes, weights on the left."""
    x = layer(layer(example["x"], params["first"]), params["second"])
    x = (params["left"] @ (x @ params["transposed"].T).T).T
    x = jnp.tanh(x @ params["twice"]) @ params["twice"]
    return jnp.sum(jnp.square(x @ params["last"] - example["y"])) / 2


def rows_params(width: int = 16) -> dict:
    names = ("first", "second", "transposed", "left", "twice", "last")
    shapes = {"transposed": (width + 1, width), "left": (width, width + 1)}
    rng = np.random.default_rng(1)
    return {
        name: np.float32(0.3 * rng.normal(size=shapes.get(name, (width, width)))) for name in names
    }


def rows_batch(rows: int, width: int = 16) -> dict:
    shape = (BATCH, rows, width)
    return {name: RNG.normal(size=shape).astype(np.float32) for name in ("x", "y")}


@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_all_kinds(rows, clip_norm):
    params, batch, mask = rows_params(), rows_batch(rows), np.arange(BATCH) < 5
    found = summed(rows_loss, params, batch, mask, clip_norm)
    assert_near(found, formed(rows_loss, params, batch, mask, clip_norm), 1e-5)


def test_gradients_of_matrices_are_not_formed_for_all_examples():
    """At most one at a time, where a weight is used twice; otherwise none."""
    width, rows = 16, 1
    traced = jax.make_jaxpr(lambda *given: clipped_sum(rows_loss, *given, 1.0))(
        rows_params(), rows_batch(rows), np.ones(BATCH, bool)
    )
    for shape in ((width, width), (width + 1, width), (width, width + 1)):
        assert f"f32[{BATCH},{','.join(map(str, shape))}]" not in str(traced)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_embeddings_are_not_all_in_memory(tied):
    """On a CPU: less than half of them."""
    model = CIFGLanguageModel(2_000, embedding=16, hidden=64, projection=16, tied=tied)
    params, mask = drawn(model, 0), np.ones(32, bool)
    batch = {"tokens": RNG.integers(4, 2_000, (32, 5)).astype(np.int32)}
    program = jax.jit(lambda *given: clipped_sum(alone(model), *given, 0.5))
    memory = program.lower(params, batch, mask).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 32 * 4 * models.count_parameters(params) / 2


def bilinear(params, example):
    """A loss whose gradient in W is x' dy for any x and dy that an example may choose."""
    return jnp.sum((example["x"] @ params["w"]) * example["dy"])


def adversarial(rows: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ones = np.ones((rows, 8), np.float32)
    found = {
        "large x, small dy": (1e25 * ones, 1e-25 * ones),
        "small x, large dy": (1e-30 * ones, 1e30 * ones),
        "small x, whose square is lost": (1e-22 * ones, 1e21 * ones),
        "large": (1e14 * ones, 1e3 * ones),
        "overflow": (1e30 * ones, 1e30 * ones),
        "infinite": (np.inf * ones, ones),
        "NaN in dy": (ones, np.nan * ones),
        "zero times infinity": (0 * ones, np.inf * ones),
    }
    if rows > 1:
        sign = np.float32(-1) ** np.arange(rows)[:, None]
        for digit in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
            near = ones + np.float32(digit) * RNG.normal(size=ones.shape).astype(np.float32)
            found[f"rows that cancel to {digit}"] = (1e4 * sign * near, 1e4 * ones)
        size = np.float32(10) ** np.linspace(-10, 15, rows, dtype=np.float32)[:, None]
        found["rows large in one and small in the other"] = (ones * size, ones * size[::-1])
    return found


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_one_example_moves_the_sum_by_at_most_the_bound(rows):
    """TRUST 2, 16: whatever its x and dy are, also where the norm is that of a nearly empty sum."""
    clip_norm, place = 0.5, BATCH - 1
    params = {"w": jnp.ones((8, 8), jnp.float32)}
    batch = {name: RNG.normal(size=(BATCH, rows, 8)).astype(np.float32) for name in ("x", "dy")}

    def run(batch, mask):
        return np.float64(summed(bilinear, params, batch, mask, clip_norm)["w"])

    without = run(batch, np.arange(BATCH) != place)
    for what, (x, dy) in adversarial(rows).items():
        more = {name: column.copy() for name, column in batch.items()}
        more["x"][place], more["dy"][place] = x, dy
        moved = np.linalg.norm(run(more, np.ones(BATCH, bool)) - without)
        # As far as single precision can tell: the two sums themselves are rounded.
        assert moved <= clip_norm * (1 + 1e-6), what
        if what in ("overflow", "infinite", "NaN in dy", "zero times infinity"):
            assert moved == 0, what
        if what == "large":
            assert moved >= clip_norm * (1 - 1e-4), what


def tied(params, example):
    """An embedding that is an output matrix, too; the example chooses the gradient of each use."""
    rows = look_up(params["w"], example["ids"]) * example["d_rows"]
    return jnp.sum(rows) + jnp.sum((example["x"] @ params["w"].T) * example["dy"])


@pytest.mark.parametrize("rest", [0.0, 1e-6, 1e-3, 1.0, 1e30, np.nan])
def test_one_matrix_that_is_embedding_and_output_is_clipped_as_a_whole(rest):
    """TRUST 2, 16: its uses add up, as do equal ids, or cancel but for a rest."""
    clip_norm, place = 0.5, BATCH - 1
    params = {"w": jnp.ones((16, 8), jnp.float32)}
    ids = np.full((BATCH, 3), 5, np.int32)
    ids[:, 1] = np.arange(BATCH)
    dy = np.zeros((BATCH, 2, 16), np.float32)
    dy[:, 0, 5] = dy[:, 1, 9] = 1
    batch = {
        "ids": ids,
        "d_rows": RNG.normal(size=(BATCH, 3, 8)).astype(np.float32),
        "x": RNG.normal(size=(BATCH, 2, 8)).astype(np.float32),
        "dy": dy,
    }
    # Of this example, row 5 of the product is minus the rows that are looked up, but for the rest.
    ids[place] = 5
    batch["x"][place] = [[-rest], [0]] - 1e4 * batch["d_rows"][place].sum(0) * [[1], [0]]
    batch["d_rows"][place] *= 1e4
    mask = np.ones(BATCH, bool)
    whole = summed(tied, params, batch, mask, clip_norm)
    # Another array: JAX may still read the first, whose memory it shares.
    others = np.arange(BATCH) != place
    without = summed(tied, params, batch, others, clip_norm)
    moved = np.linalg.norm(np.float64(whole["w"]) - np.float64(without["w"]))
    assert_near(without, formed(tied, params, batch, others, clip_norm), 1e-5)
    assert moved <= clip_norm * (1 + 1e-6)
    if not rest <= 1:
        assert moved == 0
    if rest == 1:
        assert moved >= clip_norm * (1 - 1e-3)


def test_gradients_of_many_weights_are_formed_for_a_few_examples_at_a_time(monkeypatch):
    model, batch = MODELS["LSTM"]
    params, mask = drawn(model, 0), np.arange(BATCH) != 3
    size = models.count_parameters(params)
    whole = summed(alone(model), params, batch, mask, 0.05)
    monkeypatch.setattr("jaxpfl.federated.clients.clipped_gradients._ENTRIES_OF_CPU", 2 * size)
    parts = compiled.__wrapped__(alone(model), 0.05)(params, batch, mask)
    assert_near(parts, whole, 1e-6)


def test_accelerators_form_the_gradients_of_many_examples_side_by_side(monkeypatch):
    model, batch = MODELS["tied CIFG"]
    params, mask = drawn(model, 0), np.arange(BATCH) != 3
    monkeypatch.setattr("jaxpfl.federated.clients.clipped_gradients.traced_platform", lambda: "gpu")
    found = compiled.__wrapped__(alone(model), 0.05)(params, batch, mask)
    assert_near(found, formed(alone(model), params, batch, mask, 0.05), 2e-5)
