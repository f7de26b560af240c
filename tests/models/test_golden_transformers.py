"""Logits of transformers on tiny random models (tools/golden_transformers.py), and round trips."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.checkpoints.model_files import INDEX, WEIGHTS
from jaxpfl.models.decoder import config as decoder_config
from jaxpfl.models.encoder import config as encoder_config

pytest.importorskip("safetensors", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers"
KINDS = sorted(path.name for path in GOLDEN.iterdir())


def _logits(model, params, tokens_BxL):
    return model.logits(params, model.hidden(params, tokens_BxL))


def _difference(folder: Path, tokens_BxL, real_BxL, expected_BxLxV, **options) -> float:
    model, params = pretrained.load(folder, **options)
    padded_BxL = np.where(real_BxL, tokens_BxL, -1).astype(np.int32)
    found_BxLxV = np.asarray(jax.jit(_logits, static_argnums=0)(model, params, padded_BxL))
    return float(np.abs(found_BxLxV - expected_BxLxV)[real_BxL].max())


def _expected(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(GOLDEN / kind / "expected.npz", allow_pickle=False) as stored:
        assert "transformers" in stored["versions"][1]
        return stored["tokens"], stored["real"], stored["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind, record_property):
    difference = _difference(GOLDEN / kind, *_expected(kind))
    record_property("largest difference", difference)
    assert difference < 2e-5


@pytest.mark.parametrize(
    "changed",
    [{"local_rope_theta": 500.0}, {"rope_theta": 100.0}, {"rope_scaling": None}, {"window": None}],
    ids=str,
)
def test_a_gemma_with_one_rope_is_another(changed):
    """What is compared above depends on both kinds of layers."""
    model, params = pretrained.load(GOLDEN / "gemma3")
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, **changed))
    tokens_BxL, real_BxL, expected_BxLxV = _expected("gemma3")
    padded_BxL = np.where(real_BxL, tokens_BxL, -1).astype(np.int32)
    found_BxLxV = np.asarray(jax.jit(_logits, static_argnums=0)(other, params, padded_BxL))
    assert np.abs(found_BxLxV - expected_BxLxV)[real_BxL].max() > 1e-4


def test_all_architectures_and_layouts_are_there():
    models = [pretrained.read_config(GOLDEN / kind / "config.json") for kind in KINDS]
    found = {(model.name, getattr(model, "causal", True)) for model in models}
    decoders = {(name, True) for name in decoder_config.MODEL_TYPES}
    causal = {(name, True) for name in encoder_config.CAUSAL_TYPES}
    assert found == decoders | causal | {(name, False) for name in encoder_config.MODEL_TYPES}
    assert {model.config.tied for model in models if model.name == "llama"} == {True, False}
    scaled = pretrained.read_config(GOLDEN / "llama_scaled" / "config.json")
    assert scaled.config.rope_scaling is not None
    assert scaled.config.kv_heads < scaled.config.heads
    assert (GOLDEN / "llama_untied" / INDEX).is_file()


# Encoders with a head, and two without.
@pytest.mark.parametrize("kind", [*KINDS, "../tiny_albert", "../tiny_bert"])
def test_a_round_trip_is_exact(kind, tmp_path):
    model, params = pretrained.load(GOLDEN / kind)
    pretrained.save(tmp_path, model, params)
    again, found = pretrained.load(tmp_path)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]


live = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch and transformers are not installed: the golden files stand in",
)


@live
@pytest.mark.filterwarnings("default")
def test_live_transformers_gives_what_we_compute_and_reads_what_we_save(tmp_path):
    from tools import golden_transformers as tool

    tokens_BxL, real_BxL = tool.tokens()
    for kind, drawn in tool.models().items():
        drawn.eval()
        drawn.save_pretrained(tmp_path / kind)
        expected_BxLxV = tool.logits(drawn, tokens_BxL, real_BxL)
        difference = _difference(tmp_path / kind, tokens_BxL, real_BxL, expected_BxLxV)
        assert difference < 2e-5, kind
        model, params = pretrained.load(GOLDEN / kind)
        pretrained.save(tmp_path / "ours" / kind, model, params)
        theirs, report = type(drawn).from_pretrained(
            tmp_path / "ours" / kind, output_loading_info=True
        )
        assert not any(report.values()), (kind, report)
        theirs.eval()
        read_BxLxV = tool.logits(theirs, tokens_BxL, real_BxL)
        # Not the file's logits, which another build of torch rounded.
        golden = type(drawn).from_pretrained(GOLDEN / kind).eval()
        expected_BxLxV = tool.logits(golden, tokens_BxL, real_BxL)
        np.testing.assert_array_equal(read_BxLxV[real_BxL], expected_BxLxV[real_BxL])
