import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.models import classifier_cnn, count_parameters, emnist_cnn
from tests.models.masking import check_all_masked, check_masked, check_parameters_kept


def batch_for(model, size, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.random((size, *model.image_shape), np.float32),
        "label": rng.integers(0, model.classes, size, np.int32),
    }


def test_classifier_has_the_papers_number_of_parameters():
    shapes = jax.eval_shape(classifier_cnn().init, jax.random.key(0))
    assert count_parameters(shapes) == 95_012


def test_emnist_network_has_the_fields_number_of_parameters():
    shapes = jax.eval_shape(emnist_cnn().init, jax.random.key(0))
    assert count_parameters(shapes) == 1_206_590


@pytest.mark.parametrize("make", [classifier_cnn, emnist_cnn])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 9, 3), (8, 8, 1), (17, 13, 2)])
def test_any_image_size_gives_logits(make, shape):
    model = make(shape, 5)
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.eval_shape(model.logits, params, jax.ShapeDtypeStruct((3, *shape), jnp.float32))
    assert (logits.shape, logits.dtype) == ((3, 5), jnp.float32)


def test_forms_give_the_same_loss_and_gradient():
    models = [classifier_cnn((12, 12, 1), 4, form) for form in ("patches", "convolution")]
    params = models[0].init(jax.random.key(0))
    batch = batch_for(models[0], 4)
    mask = np.ones(4, bool)
    results = [jax.jit(jax.grad(lambda p, m=m: m.loss(p, batch, mask)[0]))(params) for m in models]
    for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_loss_is_the_mean_cross_entropy():
    model = classifier_cnn((8, 8, 1), 5)
    params = model.init(jax.random.key(0))
    batch = batch_for(model, 4)
    mask = np.array([True, False, True, True])
    loss, metrics = jax.jit(model.loss)(params, batch, mask)
    logits = np.asarray(jax.jit(model.logits)(params, batch["image"]), np.float64)
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(4), batch["label"]]
    np.testing.assert_allclose(loss, nll[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_sum"], nll[mask].sum(), rtol=1e-5)
    assert metrics["count"] == 3
    hits = (logits.argmax(1) == batch["label"])[mask].sum()
    assert float(metrics["correct"]) == hits


def test_uint8_images_are_scaled_to_one():
    model = classifier_cnn((4, 4, 1), 3)
    params = model.init(jax.random.key(0))
    image = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 1), np.uint8)
    expected = model.logits(params, image.astype(np.float32) / np.float32(255))
    np.testing.assert_allclose(model.logits(params, image), expected, rtol=1e-5)


def test_masked_examples_contribute_nothing_even_when_nan():
    """TRUST 23: padding contributes exactly zero, whatever it holds."""
    model = classifier_cnn((6, 6, 1), 3)
    padded = batch_for(model, 3, seed=1)
    padded["image"][:] = np.nan
    check_masked(model, batch_for(model, 2), padded)


def test_a_batch_without_examples_has_zero_loss_and_gradient():
    """TRUST 1: an empty client contributes exactly zero."""
    model = classifier_cnn((6, 6, 1), 3)
    check_all_masked(model, batch_for(model, 3))


def test_calls_do_not_change_parameters():
    check_parameters_kept(model := classifier_cnn((6, 6, 1), 3), batch_for(model, 3))


@pytest.mark.parametrize(
    ("shape", "classes"), [((28, 28), 3), ((0, 3, 1), 3), ((8, 8, 1), 0), ((8, 8, 1), True)]
)
def test_bad_sizes_are_refused(shape, classes):
    with pytest.raises(InputError, match="image_shape|classes"):
        classifier_cnn(shape, classes)
