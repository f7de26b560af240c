"""Weights and folders of published models: what is wrong is refused by name."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.checkpoints.model_files import read_object
from jaxpfl.models.checkpoints.safetensors_files import WEIGHTS

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[2] / "golden"
QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the tiny BERT that a test may spoil."""
    return Path(shutil.copytree(GOLDEN / "tiny_bert", tmp_path / "tiny"))


def _change(folder: Path, change) -> None:
    path = folder / WEIGHTS
    tensors = safetensors_numpy.load_file(path)
    change(tensors)
    safetensors_numpy.save_file(tensors, path)


@pytest.mark.parametrize("kind", ["tiny_bert", "tiny_albert"])
def test_every_parameter_is_filled_with_the_shape_that_init_gives(kind):
    model, params = pretrained.load(GOLDEN / kind)
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0)))
    assert jax.tree.map(np.shape, params) == shapes
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def test_a_kernel_is_the_transposed_query_key_and_value_side_by_side():
    tensors = safetensors_numpy.load_file(GOLDEN / "tiny_bert" / WEIGHTS)
    params = pretrained.load(GOLDEN / "tiny_bert")[1]
    kernel = params["layer_1"]["qkv"]["kernel"]
    for i, part in enumerate(("query", "key", "value")):
        name = f"encoder.layer.1.attention.self.{part}.weight"
        np.testing.assert_array_equal(kernel[:, 32 * i : 32 * (i + 1)], tensors[name].T)


def test_prefixes_heads_and_old_names_are_understood(folder):
    expected = pretrained.load(folder)[1]

    def rename(tensors):
        for name in list(tensors):
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            new = new.replace("LayerNorm.bias", "LayerNorm.beta")
            tensors["bert." + new] = tensors.pop(name)
        tensors["cls.seq_relationship.bias"] = np.zeros(3, np.float32)
        tensors["bert.embeddings.position_ids"] = np.arange(64)[None]

    _change(folder, rename)
    found = pretrained.load(folder)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_half_precision_is_widened(folder):
    expected = pretrained.load(folder)[1]
    _change(folder, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
    found = pretrained.load(folder)[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float16).astype(np.float32)),
        found,
        expected,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QUERY), f"tensor '{QUERY}' is missing"),
        (lambda t: t.update(more=t[QUERY]), "tensor 'more' is not part of the described model"),
        (
            lambda t: t.update({"encoder.layer.2.output.dense.bias": t[QUERY][0]}),
            "tensor 'encoder.layer.2.output.dense.bias' is not part",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY][:31].copy()}),
            rf"tensor '{QUERY}' must have shape \[32, 32\], found \[31, 32\]",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY].astype(np.int32)}),
            f"tensor '{QUERY}' must be floating point, found I32",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY] * np.float32(np.nan)}),
            f"tensor '{QUERY}' holds values that are not finite",
        ),
    ],
)
def test_wrong_tensors_are_refused_naming_file_and_tensor(folder, change, message):
    _change(folder, change)
    with pytest.raises(InputError, match=message) as caught:
        pretrained.load(folder)
    assert str(folder / WEIGHTS) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 500, 60_000])
def test_a_truncated_file_is_refused(folder, keep):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFile, match="is not a whole safetensors file"):
        pretrained.load(folder)


def test_pickled_weights_are_not_read(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no file .*model\.safetensors .*; .* files only"):
        pretrained.load(folder)


def _decoder(**changed) -> str:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 8}
    return json.dumps({"model_type": "mistral", **sizes, **changed})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"model_type": "t5"}', InputError, "model_type must be one of .*, found 't5'"),
        ('{"model_type": "bert", "hidden_act": "swish"}', InputError, "activation must be one of"),
        ('{"model_type": ["bert"]}', InputError, "model_type must be one of"),
        ('{"model_type": "bert", "num_hidden_layers": "12"}', InputError, "layers must be a whole"),
        ('{"model_type": "bert", "hidden_size": [768]}', InputError, "hidden_size must be a whole"),
        ('{"model_type": "bert", "num_hidden_layers": 1000000000}', InputError, "at most 1000"),
        (
            '{"model_type": "bert", "vocab_size": 1000000000}',
            InputError,
            "vocab_size must be at most",
        ),
        (_decoder(rope_scaling="x"), InputError, "rope_scaling must be an object, found 'x'"),
        (_decoder(rope_parameters=[1]), InputError, "rope_parameters must be an object"),
        (_decoder(rope_theta="x"), InputError, "rope_theta must be a finite number"),
        (_decoder(rope_theta=10**400), InputError, "rope_theta must be a finite number"),
        (_decoder(rms_norm_eps=None, head_dim=2**23), InputError, "heads times head_size must be"),
        (
            _decoder(num_hidden_layers=10**9, layer_types=["sliding_attention"]),
            *(InputError, "layer_types must be"),
        ),
        ("[]", CorruptFile, "must hold a JSON object"),
        ("{", CorruptFile, "is not a JSON file"),
        ("[" * 100_000, CorruptFile, "is not a JSON file"),
    ],
)
def test_a_configuration_is_refused_naming_its_file(folder, text, error, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(error, match=message) as caught:
        pretrained.load(folder)
    assert "config.json" in str(caught.value)


def test_a_json_object_is_utf_8(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": "\u00e9"}, ensure_ascii=False), "utf-8")
    assert read_object(tmp_path / "a.json") == {"a": "\u00e9"}
    with pytest.raises(InputError, match="there is no file"):
        read_object(tmp_path / "b.json")
