"""The optional backend: refused clearly where it is missing, equal to ours where it is not."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import registry
from jaxpfl.experiments.config import shipped
from jaxpfl.models.checkpoints import hub
from jaxpfl.text.embed.by_name import SentenceTransformersEmbedder, embedder

GOLDEN = Path(__file__).parents[2] / "golden"


def _library(monkeypatch, model) -> None:
    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = model
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


def test_without_the_library_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(InputError, match=r"pip install 'jaxpfl\[sentence-transformers\]'"):
        SentenceTransformersEmbedder("minilm")


def test_runs_no_code_of_a_model_and_passes_a_revision_on(monkeypatch):
    asked = {}

    class Model:
        def __init__(self, place, **options):
            asked.update(place=place, **options)

        def encode(self, texts, **options):
            return np.array([[len(text), 1, 2] for text in texts], np.float64)

    _library(monkeypatch, Model)
    embedder = SentenceTransformersEmbedder("someone/model@abc")
    assert asked["place"] == "someone/model" and asked["revision"] == "abc"
    assert asked["trust_remote_code"] is False
    assert asked["model_kwargs"] == {"use_safetensors": True}
    assert embedder.name == "sentence-transformers:someone/model@abc"
    vectors = embedder(["ab", ""])
    assert vectors.dtype == np.float32 and vectors.tolist() == [[2, 1, 2], [0, 1, 2]]
    assert embedder([]).shape == (0, 3)


def test_what_the_library_raises_becomes_one_sentence(monkeypatch):
    def fail(*args, **options):
        raise OSError("no such model\nwith a long story")

    _library(monkeypatch, fail)
    with pytest.raises(InputError, match=r"cannot load 'x': OSError: no such model$"):
        SentenceTransformersEmbedder("x")


@pytest.mark.parametrize("kind", ["tiny_bert", "tiny_albert"])
def test_equals_its_golden_file_where_it_is_installed(kind):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    with np.load(GOLDEN / kind / "embeddings.npz", allow_pickle=False) as stored:
        texts, expected = stored["texts"].tolist(), stored["embeddings"]
    found = SentenceTransformersEmbedder(str(GOLDEN / kind))(texts)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_pubmeds_embedder_is_the_papers_and_comes_through_the_library():
    """Skipped where the library, or its model, which nothing here may fetch, is absent."""
    name = registry.load(shipped.find("papers/popri_pubmed")).embedder
    assert name == "sentence-transformers:sentence-transformers/sentence-t5-base"
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    if hub.at_hand(name.partition(":")[2]) is None:
        pytest.skip("sentence-t5-base is not on this machine")
    assert embedder(name)(["an abstract"]).shape == (1, 768)
