"""The GAN's layers and losses against numpy in float64, and padding that leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpfl.models import GAN, sample_images
from jaxpfl.models.gan import to_range, with_statistics
from tests.trees import assert_close, assert_same

SMALL = GAN((8, 8, 1), width=0.05, noise=6)
EVERYONE = np.ones(4, bool)


@pytest.fixture(scope="module")
def params():
    """Random everywhere: at the start all offsets and biases are 0 and would hide an error."""
    started, rng = jax.jit(SMALL.init)(jax.random.key(0)), np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32), started
    )


def images(batch, seed=0):
    """Images in [-1, 1]."""
    rng = np.random.default_rng(seed)
    return (2 * rng.random((batch, *SMALL.image_shape)) - 1).astype(np.float32)


def as_float64(tree):
    return jax.tree.map(np.float64, tree)


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


def norm_by_hand(x, offset):
    """Batch normalisation in training mode over all axes but the last."""
    axes = tuple(range(x.ndim - 1))
    return (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-3) + offset


def convolve_by_hand(x, k, stride):
    """4 x 4 "SAME": one row of zeros before, one behind at stride 2 and two at stride 1."""
    x = np.pad(x, ((0, 0), (1, 2), (1, 2), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (4, 4), axis=(1, 2))
    windows = windows[:, ::stride, ::stride][:, : (x.shape[1] - 3) // stride]
    return np.einsum("bhwcij,ijco->bhwo", windows, k)


def upsample_by_hand(x, k):
    """Transposed 4 x 4, stride 2: zeros between the pixels, then a plain convolution."""
    batch, height, width, channels = x.shape
    spread = np.zeros((batch, 2 * height + 3, 2 * width + 3, channels))
    spread[:, 2:-1:2, 2:-1:2] = x
    windows = np.lib.stride_tricks.sliding_window_view(spread, (4, 4), axis=(1, 2))
    return np.einsum("bhwcij,ijco->bhwo", windows, k)


def score_by_hand(critic, x):
    for name in ("convolution_0", "convolution_1"):
        x = leaky(convolve_by_hand(x, critic[name]["kernel"], 2) + critic[name]["bias"])
    x = x.reshape(len(x), -1) @ critic["hidden"]["kernel"]
    x = leaky(norm_by_hand(x, critic["normalisation"]["offset"]))
    return (x @ critic["output"]["kernel"] + critic["output"]["bias"])[:, 0]


def draw_by_hand(generator, z):
    offset = [generator[f"normalisation_{i}"]["offset"] for i in range(4)]
    x = np.maximum(norm_by_hand(z @ generator["hidden"]["kernel"], offset[0]), 0)
    x = np.maximum(norm_by_hand(x @ generator["seed"]["kernel"], offset[1]), 0)
    x = x.reshape(len(z), 2, 2, -1)
    for i in range(2):
        x = upsample_by_hand(x, generator[f"upsample_{i}"]["kernel"])
        x = np.maximum(norm_by_hand(x, offset[2 + i]), 0)
    out = generator["output"]
    return np.tanh(convolve_by_hand(x, out["kernel"], 1) + out["bias"])


def decay_by_hand(network):
    kernels = (layer["kernel"] for layer in network.values() if "kernel" in layer)
    return 0.5 * 2.5e-5 * sum((kernel**2).sum() for kernel in kernels)


@pytest.mark.parametrize(("shape", "width"), [((4, 4, 1), 0.01), ((12, 8, 3), 0.1)])
def test_any_size_and_width_gives_images_and_scores(shape, width):
    gan = GAN(shape, width=width, noise=5)

    def both(key, noise, real):
        params = gan.init(key)
        drawn = gan.generate(params["generator"], noise, real)
        return drawn, gan.scores(params["critic"], jnp.stack([drawn, drawn]), real)[0]

    noise, real = np.zeros((3, 5), np.float32), np.ones(3, bool)
    drawn, scores = jax.eval_shape(both, jax.random.key(0), noise, real)
    assert (drawn.shape, drawn.dtype) == ((3, *shape), jnp.float32)
    assert scores.shape == (2, 3)


def test_networks_are_those_written_down(params):
    held = as_float64(params)
    z = np.random.default_rng(1).normal(size=(4, 6))
    expected = draw_by_hand(held["generator"], z)
    found = jax.jit(SMALL.generate)(params["generator"], jnp.asarray(z, jnp.float32), EVERYONE)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    two = np.stack([images(4), images(4, seed=1)])
    scores, (mean, variance) = jax.jit(SMALL.scores)(params["critic"], jnp.asarray(two), EVERYONE)
    for index in range(2):
        expected = score_by_hand(held["critic"], two[index].astype(np.float64))
        np.testing.assert_allclose(scores[index], expected, rtol=1e-4, atol=1e-4)
    assert mean.shape == variance.shape == (2, 51)
    assert np.abs(np.asarray(mean[0] - mean[1])).max() > 1e-3


def test_losses_are_the_formulas(params):
    """The slope by finite differences of the float64 critic: an example's own, through BN too."""
    held = as_float64(params)
    drawn, image = images(3, seed=2), images(3, seed=3)
    share = np.array([0.2, 0.9, 0.5], np.float32)
    real = np.ones(3, bool)
    score = [score_by_hand(held["critic"], x.astype(np.float64)) for x in (drawn, image)]
    between = drawn + share[:, None, None, None].astype(np.float64) * (image - drawn)
    slope = np.zeros_like(between)
    for place in np.ndindex(*between.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = between.copy()
            moved[place] += step
            ends.append(score_by_hand(held["critic"], moved).sum())
        slope[place] = (ends[0] - ends[1]) / 2e-6
    penalty = 10 * np.mean((np.sqrt((slope**2).sum((1, 2, 3))) - 1) ** 2)
    decay = decay_by_hand(held["critic"])
    loss, _ = jax.jit(SMALL.critic_loss)(params["critic"], drawn, image, real, share)
    expected = score[0].mean() - score[1].mean() + penalty + decay
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert penalty > 0.1

    z = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    score = score_by_hand(held["critic"], draw_by_hand(held["generator"], z.astype(np.float64)))
    decay = decay_by_hand(held["generator"])
    loss = jax.jit(SMALL.generator_loss)(params["generator"], params["critic"], z)
    np.testing.assert_allclose(loss, -score.mean() + decay, rtol=1e-4)


@pytest.mark.long
def test_gradient_of_the_critics_loss_is_its_slope(params):
    """Second derivatives too: along its gradient the loss rises by the gradient's norm."""
    drawn, image = images(4, seed=2), images(4, seed=3)
    share = np.linspace(0, 1, 4, dtype=np.float32)

    @jax.jit
    def loss(critic):
        return SMALL.critic_loss(critic, drawn, image, EVERYONE, share)[0]

    critic, gradient = params["critic"], jax.jit(jax.grad(loss))(params["critic"])
    norm = optax.tree.norm(gradient)
    steps = [jax.tree.map(lambda g, s=s: s / norm * g, gradient) for s in (1e-3, -1e-3)]
    ahead, behind = (float(loss(jax.tree.map(jnp.add, critic, step))) for step in steps)
    np.testing.assert_allclose((ahead - behind) / 2e-3, norm, rtol=2e-2)


def test_padding_contributes_nothing_even_when_nan(params):
    """TRUST 23: rows of padding change neither loss, gradient nor statistics."""
    share = np.linspace(0, 1, 5, dtype=np.float32)
    z = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    held = (images(5) + 1) / 2

    def run(rows, real):
        def total(critic):
            drawn = SMALL.generate(params["generator"], z[:rows], real)
            image = to_range(jnp.asarray(held[:rows]), real)
            return SMALL.critic_loss(critic, drawn, image, real, share[:rows])

        return jax.jit(jax.value_and_grad(total, has_aux=True))(params["critic"])

    alone = run(3, np.ones(3, bool))
    padded = run(5, np.arange(5) < 3)
    held[3:] = np.nan
    poisoned = run(5, np.arange(5) < 3)
    assert_same(poisoned, padded)
    # The gradient's entries are up to 20; sums over more rows round otherwise.
    assert_close(padded, alone, rtol=1e-3, atol=1e-3)


def test_a_batch_of_one_has_a_finite_gradient(params):
    """BN makes the critic constant there: the slope is 0, where the norm has no derivative."""
    one, share = np.ones(1, bool), np.full(1, 0.5, np.float32)
    slope = jax.jit(jax.grad(SMALL.critic_loss, has_aux=True))
    gradient, _ = slope(params["critic"], images(1), images(1, seed=1), one, share)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def test_moving_statistics_follow_each_batch_in_turn(params):
    statistics = (jnp.ones((2, 51)) * jnp.array([[3.0], [5.0]]), jnp.full((2, 51), 7.0))
    moved = with_statistics(params["critic"], statistics)["normalisation"]
    before = as_float64(params["critic"]["normalisation"])
    expected = 0.999 * (0.999 * before["mean"] + 0.003) + 0.005
    np.testing.assert_allclose(moved["mean"], expected, rtol=1e-5, atol=1e-6)
    expected = 0.999 * (0.999 * before["variance"] + 0.007) + 0.007
    np.testing.assert_allclose(moved["variance"], expected, rtol=1e-5)
    np.testing.assert_array_equal(moved["offset"], params["critic"]["normalisation"]["offset"])


def test_images_are_brought_to_minus_one_and_one():
    byte = np.array([[[[0]], [[255]]], [[[51]], [[9]]]], np.uint8)
    found = to_range(jnp.asarray(byte), np.array([True, False]))
    np.testing.assert_allclose(found.reshape(2, 2), [[-1, 1], [0, 0]], atol=1e-6)
    share = to_range(jnp.asarray([[0.25], [np.nan]], jnp.float32), np.array([True, False]))
    np.testing.assert_allclose(share.reshape(-1), [-0.5, 0])


def test_sampled_images_do_not_depend_on_how_many_are_drawn(params):
    key = jax.random.key(7)
    many, few = (sample_images(SMALL, params, key, number) for number in (70, 3))
    assert many.shape == (70, 8, 8, 1)
    assert many.dtype == np.float32
    assert 0 <= many.min() < many.max() <= 1
    np.testing.assert_array_equal(many[:3], few)
    assert len({image.tobytes() for image in many}) == 70
    other = sample_images(SMALL, params, jax.random.key(8), 3)
    assert not np.array_equal(other, few)
