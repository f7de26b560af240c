"""A generator that is steered by one release: the release, its bound, and what the vectors do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpfl.algorithms.steering import (
    DIFFERENCES,
    PublicStates,
    SteeringSettings,
    steer,
    steering,
    with_differences,
)
from jaxpfl.data import from_clients
from jaxpfl.models.base import PAD
from jaxpfl.models.decoder.config import DecoderConfig
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.privacy.clipping import Clip
from jaxpfl.privacy.participation import Poisson
from jaxpfl.privacy.plan import Plan
from jaxpfl.text.embed.encoder import HiddenStates
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.tokenisers.base import pad
from tests.algorithms.asking import asked
from tests.algorithms.popri_parts import FAR, NEAR, WRITER, trained_generator
from tests.published_models import SIZES
from tests.refusals import refusal
from tests.text.tokenisers.utf8_bytes import UTF8Bytes
from tests.trees import drawn

LAYERS, HIDDEN = 3, 4


class Scattered:
    """An embedder of whole numbers, which are the seeds of their states."""

    name, column, dimension = "scattered", "text", LAYERS * HIDDEN

    def __init__(self, huge: str = ""):
        self.huge = huge

    def __call__(self, examples):
        states = [np.random.default_rng(int(text)).normal(size=self.dimension) for text in examples]
        factor = [1e36 if text == self.huge else 1.0 for text in examples]
        scale = np.repeat([0.1, 1.0, 30.0], HIDDEN)
        return (np.stack(states) * scale * np.array(factor)[:, None]).astype(np.float32)


PUBLIC = PublicStates.of(Scattered()([str(seed) for seed in range(100, 120)]), LAYERS)


def holding(*clients):
    """Clients of these seeds."""
    held = {f"client {i}": {"text": list(map(str, seeds))} for i, seeds in enumerate(clients)}
    return from_clients(held)


def noiseless(clients):
    everyone = Poisson(len(clients), len(clients))
    return Plan.without_privacy(rounds=1, clip=Clip(1.0), participation=everyone)


def released(clients, folder, states=None):
    """The sum that a release without noise gives."""
    states = states or Scattered()
    algorithm = steering(noiseless(clients), states.dimension)
    prepared = with_differences(clients, states, PUBLIC)
    return np.asarray(asked(algorithm, prepared, folder).state)


def test_the_release_is_the_mean_of_clipped_differences_by_layer(tmp_path):
    """By a plain float64 loop over clients, layers and texts; a client without texts is none."""
    seeds = [(1,), (2, 3, 4), (), (5, 6), (7,), (8, 9, 10, 11)]
    found = PUBLIC.vectors(released(holding(*seeds), tmp_path), 0.0)
    public = np.float64(Scattered()([str(seed) for seed in range(100, 120)])).reshape(20, 3, 4)
    expected, clipped = np.zeros((LAYERS, HIDDEN)), 0
    for layer in range(LAYERS):
        mean = sum(public[:, layer]) / 20
        lengths = sorted(np.linalg.norm(row - mean) for row in public[:, layer])
        bound = (lengths[9] + lengths[10]) / 2
        assert found["bounds"][layer] == pytest.approx(bound)
        for own in filter(None, seeds):
            states = np.float64(Scattered()(list(map(str, own)))).reshape(-1, 3, 4)[:, layer]
            difference = sum(states) / len(own) - mean
            length = np.linalg.norm(difference)
            clipped += length > bound
            expected[layer] += difference * min(1, bound / length) / 5
    assert 0 < clipped < 15
    np.testing.assert_allclose(found["vectors"], expected, rtol=1e-4, atol=1e-6)
    assert (found["noise"] == 0).all()


def test_one_client_moves_the_sum_by_at_most_the_clip_norm(tmp_path):
    """One with huge states, or with many texts; one with states that are not finite by nothing."""
    rest = [(1,), (2, 3), (4,)]
    without = released(holding(*rest), tmp_path / "without")
    for number, (huge, own) in enumerate([("5", (5,)), ("6", (5, 6) * 20)]):
        clients = holding(*rest, own)
        moved = released(clients, tmp_path / str(number), Scattered(huge)) - without
        assert 0.9 < np.linalg.norm(moved) <= 1 + 1e-6
    prepared = with_differences(holding(*rest, (5,)), Scattered(), PUBLIC)
    rows = np.array(prepared.columns[DIFFERENCES])
    rows[3] = np.nan
    algorithm = steering(noiseless(prepared), Scattered.dimension)
    broken = asked(algorithm, prepared.with_columns({DIFFERENCES: rows}), tmp_path / "broken")
    np.testing.assert_allclose(broken.state, without, atol=1e-6)


def test_the_noise_that_is_told_is_that_of_the_vectors():
    rng = np.random.default_rng(0)
    clients, std = 50, 0.3
    count = np.sqrt(0.004) * clients
    found = [
        PUBLIC.vectors(np.append(rng.normal(size=LAYERS * HIDDEN) * std, count), std)
        for _ in range(2_000)
    ]
    squares = np.mean([np.sum(each["vectors"] ** 2, axis=1) for each in found], axis=0)
    np.testing.assert_allclose(np.sqrt(squares), found[0]["noise"], rtol=0.03)
    # Much noise makes no vector that no clients could have.
    wild = PUBLIC.vectors(np.append(rng.normal(size=LAYERS * HIDDEN) * 1e4, 0), 1e4)
    assert (np.linalg.norm(wild["vectors"], axis=1) <= PUBLIC.bound_L * (1 + 1e-9)).all()


def decoder(kind="llama", **changes):
    sizes = SIZES | {"layers": 3} | changes
    model = Decoder(DecoderConfig(kind, vocab_size=257, positions=48, tied=True, **sizes))
    return model, drawn(model, 3)


def test_the_states_of_a_text_are_the_means_of_its_layers():
    """By the parts of shorter models and shorter texts, without the first token."""
    model, params = decoder()
    states = HiddenStates(LanguageModel(model, params, UTF8Bytes()), [0, 2], 20)
    texts = ["abc", "", "a longer text, that is cut", "b"]
    found = states(texts).reshape(4, 2, 16)
    np.testing.assert_array_equal(found[[3]], states(["b"]).reshape(1, 2, 16))
    for place, layers in enumerate((1, 3)):
        config = DecoderConfig(
            "llama", vocab_size=257, positions=48, tied=True, **SIZES | {"layers": layers}
        )
        part = jax.tree.map(lambda leaf, n=layers: leaf[:n], params["layers"])
        short = Decoder(config)
        means, reads = jax.jit(short.layer_means), jax.jit(short.hidden)
        for row, text in enumerate(texts):
            ids = [256, *(text or "\0").encode()[:20]]
            ids[1] = 256 if not text else ids[1]
            sums = [
                np.asarray(means(params | {"layers": part}, pad([np.array(cut)], 30)))
                * (len(cut) - 1)
                for cut in (ids[:-1], ids)
            ]
            np.testing.assert_allclose(
                sums[1][-1, 0] / (len(ids) - 1), found[row, place], rtol=1e-4, atol=1e-5
            )
            # The last norm of what the last token adds is what the model reads.
            last = short._normed(params, jnp.asarray((sums[1] - sums[0])[-1][:, None]))
            hidden = reads(params | {"layers": part}, pad([np.array(ids)], 30))[:, len(ids) - 1]
            hidden = hidden[:, None]
            np.testing.assert_allclose(last, hidden, rtol=1e-3, atol=1e-3)


def test_vectors_move_what_is_read_and_what_is_written():
    """As the bias of a GPT-2's last map of a layer, in training, prefill and later tokens."""
    model, params = decoder("gpt2")
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3, 16)).astype(np.float32)
    down = params["layers"]["down"]
    biased = params | {
        "layers": params["layers"] | {"down": down | {"bias": down["bias"] + vectors}}
    }
    steered, moved = model.steer(params, vectors)
    tokens = np.array([[256, 97, 98, 99, PAD], [256, 100, 97, 120, 121]])
    expected = jax.jit(model.hidden)(biased, tokens)
    real = (tokens != PAD)[..., None]
    np.testing.assert_allclose(
        np.where(real, jax.jit(steered.hidden)(moved, tokens), 0),
        np.where(real, expected, 0),
        atol=1e-5,
    )
    prompts, options = ["ab", "a longer prompt", "x"] * 5, {"decoding": Decoding(12)}
    texts = [
        LanguageModel(*pair, UTF8Bytes()).write(prompts, jax.random.key(1), **options).texts
        for pair in ((model, biased), (steered, moved), (model, params))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_no_strength_writes_the_same_bits(kind):
    writer = LanguageModel(*decoder(kind), UTF8Bytes())
    prompts, key = ["ab", "a longer prompt", ""] * 8, jax.random.key(2)
    vectors = np.random.default_rng(0).normal(size=(1, 16))
    texts = [
        steer(writer, vectors, SteeringSettings((0.5,), strength))
        .write(prompts, key, decoding=Decoding(16, top_p=0.9), responses=2)
        .texts
        for strength in (0.0, 1.0)
    ]
    plain = writer.write(prompts, key, decoding=Decoding(16, top_p=0.9), responses=2).texts
    assert texts[0] == plain != texts[1]


def test_steering_makes_text_like_the_clients_more_likely(tmp_path):
    """Without noise: clients write half of what the generator does."""
    writer, settings = trained_generator(), SteeringSettings((0.5, 1.0))
    states = HiddenStates(writer, settings.numbers(WRITER.config.layers), 8)
    public = PublicStates.of(states(NEAR + FAR), 2)
    clients = from_clients({f"client {k}": {"text": [NEAR[k % 4]]} for k in range(8)})
    algorithm = steering(noiseless(clients), states.dimension)
    prepared = with_differences(clients, states, public)
    sum_D = np.asarray(asked(algorithm, prepared, tmp_path).state)
    steered = steer(writer, public.vectors(sum_D, 0.0)["vectors"], settings)

    def nats(model, texts):
        rows = pad([np.array([256, *f"{text}\n".encode()]) for text in texts], 10)
        loss = jax.jit(model.model.loss)
        return float(loss(model.params, {"tokens": rows}, np.ones(4, bool))[0])

    assert nats(steered, NEAR) < nats(writer, NEAR) - 0.05
    assert nats(steered, FAR) > nats(writer, FAR)
    written = steered.write(
        ["ab ab ba\n"] * 4, jax.random.key(0), decoding=Decoding(9), responses=8
    )
    plain = writer.write(["ab ab ba\n"] * 4, jax.random.key(0), decoding=Decoding(9), responses=8)
    far = [sum(text.count("y") for row in each.texts for text in row) for each in (written, plain)]
    assert far[0] < far[1]


def test_settings_that_name_no_layer_are_refused():
    assert SteeringSettings((0.5, 1.0, 0.51)).numbers(4) == [1, 2, 3]
    assert SteeringSettings((0.01, 1.0)).numbers(30) == [0, 29]
    refusal(lambda: SteeringSettings(()), "layers at least one layer found none")
    refusal(lambda: SteeringSettings((0.0,)), "layers greater than 0")
    refusal(lambda: PublicStates.of(np.ones((3, 12)), 3), "hidden states public texts differ")
