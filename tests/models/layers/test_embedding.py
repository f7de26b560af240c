"""Rows by their ids: values, gradients, and that no two additions of a gradient meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.models import CIFGLanguageModel
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.layers import embedding
from tests.trees import assert_close

V, E = 7, 3


def drawn(rows, largest=V):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, largest, rows).astype(np.int32)
    return jnp.asarray(ids), jnp.asarray(rng.normal(size=(rows, E)), jnp.float32)


def one_by_one(matrix, ids, rows):
    """The same in float64, a row after the other."""
    total = np.array(matrix, np.float64)
    for index, row in zip(ids, rows, strict=True):
        total[index] += np.asarray(row, np.float64)
    return total


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_rows_are_added_in_one_block_or_in_several(rows, monkeypatch):
    monkeypatch.setattr(embedding, "_BLOCK", 16)
    ids, rows_NxE = drawn(rows)
    matrix = jnp.full((V, E), 0.5)
    found = jax.jit(embedding.add_rows)(matrix, ids, rows_NxE)
    np.testing.assert_allclose(found, one_by_one(matrix, ids, rows_NxE), rtol=1e-5, atol=1e-6)


def test_a_look_up_has_the_gradient_of_indexing():
    ids, weights_NxE = drawn(12, largest=3)
    ids_3x4, weights = ids.reshape(3, 4), weights_NxE.reshape(3, 4, E)
    matrix = jax.random.normal(jax.random.key(0), (V, E))

    def loss(matrix, rows_of):
        return jnp.sum(jnp.sin(rows_of(matrix, ids_3x4)) * weights)

    slope = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = slope(matrix, lambda matrix, ids: matrix[ids])
    assert_close(slope(matrix, embedding.look_up), expected)


def test_a_gradient_of_half_precision_keeps_its_type():
    ids, _ = drawn(12)
    matrix = jnp.ones((V, E), jnp.bfloat16)
    total = jax.grad(lambda m: jnp.sum(embedding.look_up(m, ids).astype(jnp.float32)))
    gradient = jax.jit(total)(matrix)
    assert gradient.dtype == jnp.bfloat16
    counts = np.bincount(np.asarray(ids), minlength=V)
    np.testing.assert_array_equal(gradient[:, 0].astype(jnp.float32), counts)


def scatters(jaxpr):
    """All scatters of a program, those of its parts included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("scatter"):
            yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from scatters(inner)


CIFG = CIFGLanguageModel(11, embedding=4, hidden=4, projection=4)
GPT2 = Decoder(DecoderConfig("gpt2", 11, hidden_size=8, layers=1, heads=2, positions=8))


@pytest.mark.parametrize("model", [CIFG, GPT2], ids=["cifg", "gpt2"])
def test_no_gradient_of_a_language_model_depends_on_the_order_of_a_race(model):
    """Under `vmap` too, which is how clients train; a GPU adds what may meet in any order."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 3, 5), jnp.int32)

    def gradients(params, tokens_BxL):
        mask = jnp.ones(tokens_BxL.shape[0], bool)
        return jax.grad(lambda p: model.loss(p, {"tokens": tokens_BxL}, mask)[0])(params)

    traced = jax.jit(jax.vmap(gradients, (None, 0))).trace(params, tokens)
    adding = [s for s in scatters(traced.jaxpr.jaxpr) if s.primitive.name == "scatter-add"]
    assert adding and all(scatter.params["unique_indices"] for scatter in adding)


def test_no_id_occurs_twice_where_that_is_promised(monkeypatch):
    """What is promised to the compiler is true, beyond the matrix too."""
    ids, rows_NxE = drawn(40)
    promised = []

    class Spy:
        def __init__(self, matrix):
            self.shape, self.dtype, self.at = matrix.shape, matrix.dtype, self

        def __getitem__(self, index):
            promised.append(np.asarray(index))
            return self

        def add(self, rows, **options):
            assert options == {"mode": "drop", "unique_indices": True}
            return self

    embedding.add_rows(Spy(jnp.zeros((V, E))), ids, rows_NxE)
    for index in promised:
        assert len(set(index.tolist())) == len(index)
