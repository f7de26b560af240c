"""DP-FedAvg-GAN against a plain loop over clients and batches, and what one client can do."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpfl as jp
from jaxpfl.algorithms import GeneratorTraining
from jaxpfl.algorithms.fed_avg_gan import CriticTraining, train_generator
from jaxpfl.data import from_clients
from jaxpfl.federated import Examples, contribution
from jaxpfl.models import GAN
from tests.algorithms.asking import asked, asking
from tests.federated.lowering import lowered_programs
from tests.plans import flat_plan, flat_without_privacy
from tests.trees import assert_close, assert_same

SIZES = (3, 4, 3, 0, 4, 4)
CLIP = 0.02
RATE = 0.01
CLIENT, GENERATOR, SERVER = optax.sgd(RATE), optax.sgd(0.02), optax.sgd(1.0)
GAN_4 = GAN((4, 4, 1), width=0.02, noise=4)


@dataclasses.dataclass(frozen=True)
class Fixed(GAN):
    """Draws the same numbers whatever the key, so that a round can be followed by hand.

    Its loss does not pair drawn and real images either, whose order is secret.
    """

    def draw_noise(self, key, batch):
        del key
        return jnp.linspace(-1, 1, batch * self.noise).reshape(batch, self.noise)

    def critic_loss(self, critic, drawn_BxHxWxC, image_BxHxWxC, real_B, share_B):
        del share_B
        both = jnp.stack([drawn_BxHxWxC, image_BxHxWxC])
        (drawn_B, score_B), statistics = self.scores(critic, both, real_B)
        loss_B = jax.nn.softplus(-score_B) + jax.nn.softplus(drawn_B)
        count = jnp.maximum(jnp.sum(real_B, dtype=jnp.float32), jnp.float32(1))
        return jnp.sum(jnp.where(real_B, loss_B, jnp.float32(0))) / count, statistics


FIXED = Fixed((4, 4, 1), width=0.02, noise=4)


def population():
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (size, 4, 4, 1)).astype(np.uint8) for size in SIZES]
    return from_clients({f"client {i}": {"image": rows} for i, rows in enumerate(images)})


def plan_of(noise=0.0, **changes):
    settings = dict(population=len(SIZES), clients_per_round=len(SIZES), rounds=4, clip_norm=CLIP)
    if not noise:
        return flat_without_privacy(**{**settings, **changes})
    settings = {**settings, "clients_per_round": 3, "accountant": "rdp", **changes}
    return flat_plan(noise_multiplier=noise, delta=1e-3, **settings)


def algorithm(plan=None, gan=FIXED, **changes):
    # One rung and one batch a client: one shape, and an order of images that does not matter.
    settings = dict(
        client=CLIENT, generator=GENERATOR, server=SERVER, plan=plan or plan_of(),
        cohort=jp.CohortSpec(batch_size=4, max_examples=4, clients_per_bucket=4),
        generator_training=GeneratorTraining(steps=2, batch=4),
    )  # fmt: skip
    return jp.algorithms.fed_avg_gan(gan, **{**settings, **changes})


close = partial(assert_close, rtol=1e-4, atol=1e-6)


def norm(tree):
    return np.sqrt(sum(np.square(np.float64(leaf)).sum() for leaf in jax.tree.leaves(tree)))


def apart(one, other):
    return norm(jax.tree.map(np.subtract, one, other))


# Made once: every number of rows is a compilation already.
SLOPES = {gan: jax.jit(jax.grad(gan.critic_loss, has_aux=True)) for gan in (GAN_4, FIXED)}
generate = jax.jit(GAN_4.generate)


def trained_by_hand(gan, params, batches):
    """A critic's change: batch after batch of (images, noise, shares), plain SGD and averages."""
    critic = start = jax.tree.map(np.asarray, params["critic"])
    for image, z, share in batches:
        image = image.astype(np.float32) / np.float32(127.5) - np.float32(1)
        everyone = np.ones(len(image), bool)
        drawn = generate(params["generator"], z, everyone)
        gradient, (mean, variance) = SLOPES[gan](critic, drawn, image, everyone, share)
        critic = jax.tree.map(lambda p, g: p - np.float32(RATE) * np.asarray(g), critic, gradient)
        moving = critic["normalisation"]
        for name, values in (("mean", mean), ("variance", variance)):
            for value in np.asarray(values):
                moving[name] = np.float32(0.999) * moving[name] + np.float32(0.001) * value
    return jax.tree.map(np.subtract, critic, start)


@pytest.mark.long
def test_a_client_trains_on_its_own_images_against_drawn_ones():
    """Two batches, the second of three images; draws follow from the client's key alone."""
    params = GAN_4.init(jax.random.key(0))
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 4, 1)).astype(np.uint8)
    mask = np.ones((2, 4), bool)
    mask[1, 3] = False
    key = jax.random.key(5, impl="threefry4x32")
    batches = []
    for step in range(2):
        words = jax.random.bits(jax.random.fold_in(key, step + 1), (2,), jnp.uint32)
        draws = jax.random.wrap_key_data(words, impl="threefry2x32")
        noise_key, share_key = jax.random.split(draws)
        z = jax.random.normal(noise_key, (4, GAN_4.noise), jnp.float32)
        share = jax.random.uniform(share_key, (4,), jnp.float32)
        rows = mask[step]
        batches.append((images[step][rows], z[rows], share[rows]))
    training = jax.jit(partial(contribution, CriticTraining(GAN_4, CLIENT)))
    with jax.debug_key_reuse(False):
        found = training(params, Examples({"image": images}, mask, np.int32(2)), key)
        close(found, trained_by_hand(GAN_4, params, batches), atol=2e-6)
        other = jax.random.key(6, impl="threefry4x32")
        drawn_anew = training(params, Examples({"image": images}, mask, np.int32(2)), other)
    assert apart(found, drawn_anew) > 1e-4


def test_a_round_is_what_a_plain_loop_gives(tmp_path):
    """Clipped, unweighted, over the planned number; then the generator against the NEW critic."""
    chosen, held = algorithm(), population()
    before = jax.device_get(chosen.params(chosen.init(jax.random.key(0))))
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), before["critic"])
    norms, key = [], jax.random.key(0)
    z_BxZ = np.asarray(FIXED.draw_noise(key, 4))
    for client, size in enumerate(SIZES):
        images = held.examples(client)["image"]
        batches = [(images, z_BxZ[:size], np.full(size, 0.25, np.float32))] if size else []
        delta = trained_by_hand(FIXED, before, batches)
        norms.append(norm(delta))
        factor = min(1.0, CLIP / max(norms[-1], 1e-30))
        total = jax.tree.map(lambda t, d, f=factor: t + f * d, total, delta)
    assert norms[3] == 0.0  # the client without images
    assert sorted(norms)[1] > CLIP / 100
    assert max(norms) > CLIP  # the clip is at work
    found = asked(chosen, held, tmp_path, rounds=1)
    after, (metrics,) = chosen.params(found.state), found.metrics
    critic = jax.tree.map(lambda p, t: p + t / len(SIZES), before["critic"], total)
    close(after["critic"], critic, atol=2e-6)
    np.testing.assert_allclose(metrics["update_norm"], norm(total) / len(SIZES), rtol=1e-4)
    moved = after["critic"]["normalisation"]["mean"] - before["critic"]["normalisation"]["mean"]
    assert np.abs(moved).max() > 0

    generator, losses = before["generator"], []
    loss_and_slope = jax.jit(jax.value_and_grad(FIXED.generator_loss))
    for _ in range(2):
        loss, gradient = loss_and_slope(generator, after["critic"], z_BxZ)
        generator = jax.tree.map(lambda p, g: p - np.float32(0.02) * g, generator, gradient)
        losses.append(float(loss))
    close(after["generator"], generator)
    np.testing.assert_allclose(metrics["generator_loss"], np.mean(losses), rtol=1e-4)
    assert metrics["generator_left_out"] == 0


def test_the_generators_draws_follow_from_the_start_and_the_round():
    """Public, and another in every round: the released critic alone decides what it learns."""
    chosen = algorithm(gan=GAN_4)
    state = chosen.init(jax.random.key(0))
    params = jax.device_get(chosen.params(state))
    generator_state = GENERATOR.init(params["generator"])

    def trained(draws, round):
        generator = jax.tree.map(jnp.array, params["generator"])
        steps, number = np.int32(2), np.uint32(round)
        given = (generator, generator_state, params["critic"], steps, draws, number)
        return jax.device_get(train_generator(GAN_4, GENERATOR, 4, *given)[0])

    first, again, later = (trained(state.draws, round) for round in (1, 1, 2))
    assert_same(first, again)
    assert apart(first, later) > 0
    other = chosen.init(jax.random.key(1))
    assert not np.array_equal(state.draws, other.draws)


def test_weight_decay_of_the_optimiser_moves_neither_statistics_nor_an_idle_client():
    params = GAN_4.init(jax.random.key(0))
    decaying = optax.adamw(0.1, weight_decay=0.5)
    training = jax.jit(partial(contribution, CriticTraining(FIXED, decaying)))
    mask = np.zeros((2, 4), bool)
    blank = np.full((2, 4, 4, 4, 1), np.nan, np.float32)
    keys = [jax.random.key(i, impl="threefry4x32") for i in range(2)]
    idle = training(params, Examples({"image": blank}, mask, np.int32(0)), keys[0])
    assert norm(idle) == 0.0
    mask[0, :2] = True
    one = np.zeros_like(blank)
    delta = training(params, Examples({"image": one}, mask, np.int32(1)), keys[1])
    # Two batches, drawn and real, whose variance is nearly 0: 1 - 0.999^2.
    assert np.abs(delta["normalisation"]["variance"] + 0.002).max() < 0.001
    assert norm(delta["hidden"]) > 0.1


def test_a_generator_step_that_is_not_finite_is_left_out(tmp_path):
    chosen = algorithm(generator_training=GeneratorTraining(steps=3, batch=4))
    state = chosen.init(jax.random.key(0))
    before = jax.device_get(state.generator)
    broken = jax.tree.map(lambda leaf: leaf.at[...].set(jnp.inf), state.critic)
    with asking(chosen, population(), tmp_path) as releaser:
        state, metrics = releaser.step(chosen.step, state._replace(critic=broken), 1)
    assert_same(jax.device_get(state.generator), before)
    assert (metrics["generator_left_out"], metrics["generator_loss"]) == (3, 0)


def test_settings_that_are_numbers_compile_nothing_new(tmp_path):
    asked(algorithm(plan_of(noise=1.0)), population(), tmp_path, rounds=1)
    size = train_generator._cache_size()
    other = plan_of(noise=2.0, clip_norm=0.2, clients_per_round=2)
    chosen = algorithm(other, generator_training=GeneratorTraining(steps=5, batch=4))
    with lowered_programs() as names:
        asked(chosen, population(), tmp_path, rounds=2)
    assert train_generator._cache_size() == size
    assert not any("accumulate" in name for name in names)
