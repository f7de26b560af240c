"""Public models: named by what they follow from, found again, and continued when stopped."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.errors import CorruptFile
from jaxpfl.experiments.central import public_models
from jaxpfl.experiments.central.adamw import DecoderModelConfig, Training
from jaxpfl.experiments.central.public_models import PublicModels, data_mesh
from jaxpfl.progress import Progress
from tests.experiments.conftest import FAR, NEAR, write_lines
from tests.refusals import refusal
from tests.trees import assert_same

TINY = DecoderModelConfig(
    hidden_size=16, layers=2, heads=2, inner_size=16, sequence_length=16,
    pretraining=Training(epochs=2, batch_size=8, learning_rate=0.01),
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for name, words in (("near", NEAR), ("far", FAR)):
        write_lines(folder / f"{name}.jsonl", words, 12, 3)
    return {name: str(folder / f"{name}.jsonl") for name in ("near", "far")}


def models(sources, cache, **changes):
    settings = {"limit": 100, "vocab_size": 280, "cache": cache}
    return PublicModels(sources, **(settings | changes))


def test_documents_are_the_same_share_of_each_client(sources, tmp_path):
    whole = models(sources, tmp_path).documents(["far"])
    assert [len(document) for document in whole] == [3] * 12
    made = models(sources, tmp_path, limit=18)
    documents = made.documents(["near", "far"])
    # Half of each corpus: of every document, from its start, one text or two of three.
    assert [sum(map(len, documents[:12])), sum(map(len, documents[12:]))] == [18, 18]
    assert {len(document) for document in documents} == {1, 2}
    assert all(part == all[: len(part)] for part, all in zip(documents[12:], whole, strict=True))
    far = [text for document in documents[12:] for text in document]
    assert all(set(text.split()) <= set(FAR) for text in far)


def test_the_tokeniser_is_made_once_and_round_trips(sources, tmp_path, monkeypatch):
    first = models(sources, tmp_path).tokeniser
    assert first.vocab_size == 280
    assert (first.end_of_text, first.ends, first.start) == (0, (0,), None)
    texts = ["kab lod", "€ ä \n", "<|endoftext|>"]
    ids = first.encode(texts)
    assert [first.decode(row) for row in ids] == texts
    # Text that spells the special token is text.
    assert all(0 not in row.tolist() for row in ids)
    # Corpora's own words take fewer tokens than letters.
    assert len(first.encode(["kab lod"])[0]) < 7
    monkeypatch.setattr(PublicModels, "_learned", pytest.fail)
    again = models(sources, tmp_path).tokeniser
    assert again.name == first.name
    np.testing.assert_array_equal(again.encode(texts[:1])[0], ids[0])


def test_a_decoder_is_pretrained_once_and_found_again(sources, tmp_path, monkeypatch):
    made = models(sources, tmp_path)
    first = made.decoder("tiny", TINY, 24)
    config = first.model.config
    assert (config.positions, config.vocab_size, config.tied) == (24, 280, True)
    (folder,) = (path for path in tmp_path.glob("tiny-*") if path.is_dir())
    record = json.loads((folder / "record.json").read_text())
    assert record["corpora"] == ["near", "far"]
    assert record["valid_loss"][-1] < 0.9 * np.log(280)

    monkeypatch.setattr(PublicModels, "_pretrained", pytest.fail)
    again = models(sources, tmp_path).decoder("tiny", TINY, 24)
    assert again.model == first.model
    assert_same(again.params, first.params)
    assert again.digest() == first.digest()
    path = folder / "arrays.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = models(sources, tmp_path)
    refusal(lambda: again.decoder("tiny", TINY, 24), "arrays.npz: was altered", CorruptFile)


def test_whatever_it_follows_from_changes_its_name(sources, tmp_path, monkeypatch):
    """Another corpus, size, epochs, seed, limit or length is another model."""
    names = []

    def pretrained(self, model, settings, names_of, folder):
        names.append(folder.name)
        raise InterruptedError

    monkeypatch.setattr(PublicModels, "_pretrained", pretrained)
    swapped = {"near": sources["far"], "far": sources["near"]}
    longer = dataclasses.replace(TINY, pretraining=dataclasses.replace(TINY.pretraining, epochs=3))
    of_near = dataclasses.replace(TINY, corpora=("near",))
    cases = [
        (sources, {}, TINY, 24),
        (sources, {"progress": True, "cache": tmp_path / "other"}, TINY, 24),
        (sources, {}, TINY, 25),
        (sources, {}, longer, 24),
        (sources, {}, of_near, 24),
        (sources, {"limit": 35}, TINY, 24),
        (sources, {"seed": 1}, TINY, 24),
        (sources, {"vocab_size": 281}, TINY, 24),
        (swapped, {}, TINY, 24),
        ({"near": sources["near"]}, {}, of_near, 24),
    ]
    for given, changes, settings, positions in cases:
        with pytest.raises(InterruptedError):
            models(given, **({"cache": tmp_path} | changes)).decoder("tiny", settings, positions)
    # Nor does a limit that takes no text away.
    with pytest.raises(InterruptedError):
        models(sources, tmp_path, limit=36).decoder("tiny", TINY, 24)
    assert names.pop() == names[0]
    # How it is shown and where it is kept change nothing.
    assert names[0] == names[1]
    assert len(set(names[1:])) == len(cases) - 1


def test_pretraining_that_was_stopped_continues_to_the_same_bits(sources, tmp_path, monkeypatch):
    whole = models(sources, tmp_path / "whole").decoder("tiny", TINY, 24)

    def stopping(*_):
        raise InterruptedError

    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(Progress, "update", stopping)
        models(sources, tmp_path / "parts").decoder("tiny", TINY, 24)
    assert not any(path.is_dir() for path in (tmp_path / "parts").glob("tiny-*"))
    parts = models(sources, tmp_path / "parts").decoder("tiny", TINY, 24)
    assert_same(parts.params, whole.params)


def test_corpora_without_text_or_too_small_are_refused(sources, tmp_path, monkeypatch):
    large = models(sources, tmp_path, vocab_size=5_000)
    small = models(sources, tmp_path, limit=1, vocab_size=257)
    refusal(lambda: large.tokeniser, "vocab_size must be at most found 5000")
    refusal(lambda: small.decoder("tiny", TINY, 24), "too small to pretrain on")
    numbers = from_clients({"a": {"x": np.zeros(2, np.float32)}})
    monkeypatch.setattr(public_models, "open_population", lambda _: numbers)
    refusal(lambda: models(sources, tmp_path).corpora, "must have a column 'text'")


def test_batches_are_dealt_where_they_divide():
    assert jax.device_count() == 2
    assert data_mesh(7) is None
    assert data_mesh(8) is not None
    assert data_mesh().shape == {"data": 2}
