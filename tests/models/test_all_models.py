"""What every model promises: padding leaves no trace, published sizes, checked settings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import distilgpt2, llama3_8b
from jaxpfl.models import (
    GAN,
    MLP,
    CIFGLanguageModel,
    LSTMLanguageModel,
    MultiLabelResNet,
    ResNet,
    classifier_cnn,
    count_parameters,
    emnist_cnn,
    from_functions,
)
from jaxpfl.models.base import initialised
from jaxpfl.models.decoder import lora
from jaxpfl.models.decoder.config import DecoderConfig, LoRA
from jaxpfl.models.decoder.network import Decoder
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder
from tests.refusals import refusal
from tests.trees import assert_close, assert_same, drawn

SIZES = dict(vocab_size=23, hidden_size=8, layers=1, heads=2, positions=12)
TOKENS = np.array([[1, 5, 3, 8, 2, -1], [1, 4, 4, 6, 7, 3], [1, 2, -1, -1, -1, -1]], np.int32)
WORDS = CIFGLanguageModel(vocab_size=11, embedding=4, hidden=6, projection=4)
CHARACTERS = CIFGLanguageModel(
    vocab_size=258, embedding=128, hidden=256, projection=128, layers=3, tied=False
)


LABELS = np.array([0, 2, 1, 2, 0], np.int32)


def images(*shape: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"image": random.random((5, *shape), np.float32), "label": LABELS}


def own_loss(params, batch):
    # The square root has no finite gradient at 0, which is what padding may hold.
    found = jnp.sqrt(jnp.abs(batch["image"].reshape(len(batch["label"]), -1))) @ params["w"]
    return jnp.square(found[:, 0] - batch["label"].astype(jnp.float32))


# Batches of five examples, of which the last two are padding.
MODELS = {
    "cnn": (classifier_cnn((6, 6, 1), 3), images(6, 6, 1)),
    "resnet": (ResNet((9, 9, 1), 3, crop=8, width=2, stages=(1,)), images(9, 9, 1)),
    "multi label": (
        MultiLabelResNet((9, 9, 3), 4, crop=8, width=2, stages=(1,), groups=2),
        {"image": images(9, 9, 3)["image"], "labels": LABELS[:, None] == np.arange(4)[None]},
    ),
    "mlp": (MLP(3, 4, 5), {"features": images(3)["image"], "label": LABELS}),
    "own": (from_functions(lambda key: {"w": jnp.ones((4, 1))}, own_loss), images(2, 2, 1)),
    "lstm": (LSTMLanguageModel(vocab_size=11, embedding=3, hidden=5, layers=1), None),
    "cifg": (WORDS, None),
    "gpt2": (Decoder(DecoderConfig("gpt2", **SIZES)), None),
    "llama": (Decoder(DecoderConfig("llama", **SIZES)), None),
    "encoder": (Encoder(EncoderConfig(**SIZES), causal=True, head=True), None),
}


# Others have their layers.
LONG = ("resnet", "lstm", "gpt2")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in MODELS]
)
def test_padding_leaves_no_trace_and_calls_keep_nothing(kind):
    """TRUST 1 and 23: padding contributes exactly zero, whatever it holds; so do empty clients."""
    model, batch = MODELS[kind]
    batch = batch or {"tokens": np.concatenate([TOKENS, TOKENS[:2]])}
    mask = np.arange(5) < 3
    params = drawn(model, 0, 0.1)
    before = jax.tree.map(np.array, params)
    step = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, sums), gradient = step(params, batch, mask)
    assert {leaf.dtype for leaf in jax.tree.leaves((loss, sums, gradient))} == {np.dtype("f4")}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert float(loss) > 0
    np.testing.assert_allclose(loss, sums["loss_sum"] / sums["count"], rtol=1e-6)
    evaluated = jax.jit(model.evaluate)(params, batch, mask)
    assert_close(evaluated, sums, rtol=1e-6)

    # What padding holds makes no difference at all.
    other = {name: values.copy() for name, values in batch.items()}
    for values in other.values():
        values[3:] = np.nan if values.dtype == np.float32 else 1
    (again, _), again_gradient = step(params, other, mask)
    assert loss == again
    assert_same(gradient, again_gradient)

    # Without padding, sums are rounded otherwise.
    real = {name: values[:3] for name, values in batch.items()}
    alone = step(params, real, mask[:3])
    assert_close(((loss, sums), gradient), alone, rtol=1e-4, atol=1e-6)
    if kind in ("mlp", "own"):
        np.testing.assert_allclose(model.loss(params, real, mask[:3])[0], alone[0][0], rtol=1e-5)

    empty = step(params, batch, np.zeros(5, bool))
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(empty))
    moved = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(0.5), params)
    assert step(moved, batch, mask)[0][0] != loss
    assert step(params, batch, mask)[0][0] == loss
    assert_same(params, before)


def read(model_type: str, **fields: int) -> Encoder:
    return Encoder(EncoderConfig.from_dict({"model_type": model_type, **fields}))


QWEN2 = DecoderConfig("qwen2", 151_936, 896, 24, 14, 2, inner_size=4_864, tied=True)
MISTRAL = DecoderConfig("mistral", 32_000, 4_096, 32, 32, 8, inner_size=14_336)
QWEN3 = DecoderConfig("qwen3", 151_936, 1_024, 28, 16, 8, 128, 3_072, tied=True)
GEMMA3 = DecoderConfig("gemma3_text", 262_144, 1_152, 26, 4, 1, 256, 6_912)
PUBLISHED = [
    (classifier_cnn(), 95_012),
    (emnist_cnn(), 1_206_590),
    (ResNet(), 11_227_812),
    # Torchvision's 11,689,512 with 17 classes in place of 1,000.
    (MultiLabelResNet(), 11_185_233),
    (LSTMLanguageModel(), 820_522),
    (CIFGLanguageModel(), 1_422_250),
    (CIFGLanguageModel(tied=False), 2_382_250),
    (CHARACTERS, 756_738),
    (dataclasses.replace(CHARACTERS, peepholes=True), 758_274),
    (GAN(), 13_285_217 + 6_558_913),
    (Decoder(distilgpt2()), 81_912_576),
    (Decoder(llama3_8b()), 8_030_261_248),
    (Decoder(QWEN2), 494_032_768),
    (Decoder(MISTRAL), 7_241_732_096),
    (Decoder(QWEN3), 596_049_920),
    (Decoder(GEMMA3), 999_885_952),
    # Encoders without the pooler; a head without the tied output layer.
    (Encoder(EncoderConfig()), 108_891_648),
    (Encoder(EncoderConfig(), head=True), 109_514_298),
    # What a file leaves out has the values of transformers.
    (read("albert", hidden_size=768, num_attention_heads=12, intermediate_size=3_072), 11_092_992),
    (read("roberta", max_position_embeddings=514, type_vocab_size=1), 124_055_040),
]


@pytest.mark.parametrize(("model", "number"), PUBLISHED, ids=range(len(PUBLISHED)))
def test_there_are_as_many_parameters_as_published(model, number):
    assert count_parameters(jax.eval_shape(model.init, jax.random.key(0))) == number


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (classifier_cnn, {"image_shape": (28, 28)}, "image_shape"),
        (classifier_cnn, {"image_shape": (0, 3, 1)}, "image_shape"),
        (classifier_cnn, {"classes": True}, "classes"),
        (ResNet, {"crop": 33}, "crop must fit"),
        (ResNet, {"width": 3}, "groups must divide width = 3, found 2"),
        (MultiLabelResNet, {"image_shape": (256, 256, 1)}, "image_shape must have 3 channels"),
        (MLP, {"features": 0, "classes": 2}, "features must be at least 1"),
        (LSTMLanguageModel, {"hidden": 0}, "hidden"),
        (CIFGLanguageModel, {"hidden": 0}, "hidden"),
        (CIFGLanguageModel, {"projection": 64}, "projection must equal embedding"),
        (CIFGLanguageModel, {"output_bias_prior": (0.5,)}, "output_bias_prior must have"),
        (GAN, {"image_shape": (28, 30, 1)}, "multiples of 4"),
        (GAN, {"width": float("nan")}, "width"),
        (GAN, {"noise": 0}, "noise"),
        (LoRA, {"rank": 0}, "rank must be at least 1, found 0"),
        (LoRA, {"alpha": float("nan")}, "alpha must be a finite number"),
        (LoRA, {"targets": ()}, "targets must be different names, at least one"),
        (LoRA, {"targets": ("q", "q")}, "targets must be different names, at least one"),
        (LoRA, {"targets": ("query",)}, "targets[0] must be one of 'q', found 'query'"),
    ],
)
def test_settings_are_checked(make, settings, words):
    """TRUST 9."""
    refusal(lambda: make(**settings), words)


HUGE = CIFGLanguageModel(vocab_size=10**9, embedding=1_000, hidden=8, projection=1_000)


def test_a_model_larger_than_memory_is_refused_before_it_is_drawn():
    """TRUST 39: 4 TB of parameters. A dry run may be for another machine, and only traces."""
    said = refusal(lambda: initialised(HUGE, jax.random.key(0)), "parameters would take GiB")
    assert said.startswith("a model of 1,00") and said.split()[3].count(",") == 4
    shapes = jax.eval_shape(lambda key: initialised(HUGE, key), jax.random.key(0))
    assert count_parameters(shapes) > 10**12
    assert_same(initialised(WORDS, jax.random.key(1)), WORDS.init(jax.random.key(1)))


def test_adapters_of_a_rank_that_no_machine_holds_are_refused():
    model, key = Decoder(DecoderConfig("llama", **SIZES)), jax.random.key(0)

    def adapted(params):
        return lora.attach(model, params, LoRA(rank=10**9), key)[1]

    params = jax.jit(model.init)(key)
    refusal(lambda: adapted(params), "adapters of rank 1,000,000,000 would take GiB")
    assert count_parameters(jax.eval_shape(adapted, params)) > 10**9
