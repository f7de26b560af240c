"""Our own networks as files: exact round trips, and what is refused."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxpfl.models.checkpoints import folders
from jaxpfl.models.classifiers import MLP, classifier_cnn
from jaxpfl.models.gan import GAN
from jaxpfl.models.own import from_functions
from jaxpfl.models.recurrent import CIFGLanguageModel
from jaxpfl.models.resnet import MultiLabelResNet
from tests.refusals import refusal
from tests.trees import assert_same, drawn

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs jaxpfl[text]")

WORDS = CIFGLanguageModel(vocab_size=7, embedding=4, hidden=5, projection=4, layers=2)
NORMS = ("stem_norm", "block_0.norm_1", "block_0.norm_2")
FROZEN = MultiLabelResNet((9, 9, 3), 2, crop=8, width=2, stages=(1,), groups=1, statistics=tuple(
    (name, (0.1, -2.5), (0.3, 1e-7)) for name in NORMS
))  # fmt: skip
SMALL = [MLP(features=2, classes=3, hidden=0), GAN((8, 8, 1), width=0.1)]
MODELS = [WORDS, classifier_cnn((8, 8, 1), 3), FROZEN, *SMALL]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_round_trip_is_exact(model, tmp_path):
    params = drawn(model, 0)
    folders.save(tmp_path, model, params)
    again, found = folders.load(tmp_path)
    assert again == model
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert_same(found, params)
    tensors = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    assert len(tensors) == len(jax.tree.leaves(params))


def test_functions_of_ones_own_are_in_no_file_and_given_to_the_loader(tmp_path):
    model = from_functions(lambda key: {"w": [jnp.ones(2)]}, lambda params, batch: batch["x"])
    params = {"w": [jnp.array([1.5, -2.0])]}
    folders.save(tmp_path, model, params)
    again, found = folders.load(tmp_path, model)
    assert again is model
    assert_same(found, params)
    refusal(lambda: folders.load(tmp_path), "functions of one's own jaxpfl.load(FOLDER,")
    other = from_functions(lambda key: {"w": [jnp.ones(3)]}, lambda params, batch: batch["x"])
    refusal(lambda: folders.load(tmp_path, other), "'w.0' must have shape [3]")


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path):
    params = drawn(WORDS, 0)
    wide, nan = ({**params, "output_bias": bias} for bias in (jnp.zeros(8), jnp.full(7, jnp.nan)))
    for model, given, words in (
        (WORDS, wide, "parameter output_bias must be float32 [7], found"),
        (WORDS, nan, "parameter output_bias holds values that are not finite"),
    ):
        refusal(lambda m=model, given=given: folders.save(tmp_path, m, given), words)
    folders.save(tmp_path, WORDS, params)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    for changed, words in (
        ({"library": "other"}, "library must be 'jaxpfl'"),
        ({"architecture": "RNN"}, "architecture must be one of found 'RNN'"),
        ({"architecture": ["CNN"]}, "architecture must be one of"),
        ({"layers": 10**9}, "layers must be at most 100"),
        ({"hidden": 10**30}, "hidden must be at most 16777216"),
        ({"depth": 3}, "does not describe a CIFGLanguageModel: 'depth'"),
        ({"hidden": -1}, "does not describe a CIFGLanguageModel: hidden must be"),
        ({"hidden": 6}, "must have shape"),
        ({"layers": 1}, "layer_1. is not part of the model"),
    ):
        path.write_text(json.dumps(settings | changed))
        refusal(lambda: folders.load(tmp_path), f"{tmp_path} {words}")
