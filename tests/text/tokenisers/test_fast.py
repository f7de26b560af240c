"""Published tokenisers: byte-level, of sentence pieces and of word pieces."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models import PAD
from jaxpfl.text.tokenisers.fast import hugging_face
from tests.published_models import byte_level
from tests.refusals import refusal

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "Hello world",
    "",
    "it's 2024,  two  spaces\n\ttabs",
    "naïve — 日本語 \U0001f600",
    "a <|end|> b",
]


def learnt(specials=("<|end|>", "<|turn|>"), *, framed=False):
    """From a few words; `framed` puts a start token before every text."""
    tokenizer = byte_level(300, specials, "the cat sat on the mat, the end")
    if framed:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|start|> $A",
            special_tokens=[("<|start|>", tokenizer.token_to_id("<|start|>"))],
        )
    return tokenizer


def write(folder, tokenizer, **files):
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_text_round_trips_and_never_becomes_a_special_token(tmp_path):
    tokeniser = hugging_face(write(tmp_path, learnt()))
    for text in TEXTS:
        (ids,) = tokeniser.encode([text])
        assert tokeniser.decode(ids) == tokeniser.decode([*ids, 0, PAD]) == text
        assert not {0, 1} & set(ids.tolist())


def test_bytes_of_byte_level_tokens_agree_with_the_original_decoder(tmp_path):
    original = learnt()
    tokeniser = hugging_face(write(tmp_path, original))
    generator = np.random.default_rng(0)
    for _ in range(20):
        ids = generator.integers(2, tokeniser.vocab_size, 12)
        assert tokeniser.decode(ids) == original.decode(ids.tolist())
    assert tokeniser.token_bytes()[:2] == (b"", b"")


def test_several_end_of_text_ids_and_a_start(tmp_path):
    """The settings of Llama-3: a list of ends, and a start that the tokenizer puts itself."""
    tokenizer = learnt(("<|start|>", "<|end|>", "<|turn|>"), framed=True)
    folder = write(
        tmp_path,
        tokenizer,
        tokenizer_config={"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"},
        generation_config={"eos_token_id": [1, 2]},
    )
    tokeniser = hugging_face(folder)
    assert (tokeniser.start, tokeniser.end_of_text, tokeniser.ends) == (0, 1, (1, 2))
    assert 0 not in tokeniser.encode(["the cat"])[0]
    (folder / "tokenizer_config.json").unlink()
    assert hugging_face(folder).end_of_text == 1


@pytest.mark.parametrize("framed", [False, True])
def test_a_saved_tokeniser_is_read_again(framed, tmp_path):
    tokenizer = learnt(("<|start|>", "<|end|>", "<|turn|>"), framed=framed)
    settings = {"tokenizer_config": {"eos_token": "<|end|>"}}
    tokeniser = hugging_face(write(tmp_path, tokenizer, **settings))
    (tmp_path / "saved").mkdir()
    tokeniser.save(tmp_path / "saved")
    again = hugging_face(tmp_path / "saved")
    for name in ("vocab_size", "end_of_text", "ends", "start"):
        assert getattr(again, name) == getattr(tokeniser, name)
    for found, expected in zip(again.encode(TEXTS), tokeniser.encode(TEXTS), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_start_that_only_the_settings_ask_for(tmp_path):
    tokenizer = learnt(("<|start|>", "<|end|>"))
    folder = write(tmp_path, tokenizer, tokenizer_config={"bos_token": "<|start|>"})
    assert hugging_face(folder).start is None
    write(folder, tokenizer, tokenizer_config={"bos_token": "<|start|>", "add_bos_token": True})
    assert hugging_face(folder).start == 0


def test_pieces_of_sentencepiece(tmp_path):
    pieces = ["<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "\u2581a"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(ids, [("\u2581", "a")], byte_fallback=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokeniser = hugging_face(write(tmp_path, tokenizer))
    for text in ("a aé", "aa  a"):
        found = tokeniser.encode([text])[0]
        assert tokeniser.decode(found) == tokenizer.decode(found.tolist()) == text
    assert tokeniser.token_bytes()[-1] == b" a"
    assert tokeniser.token_bytes()[2 + 0xC3] == b"\xc3"


def test_pieces_of_wordpiece(tmp_path):
    ids = {"[UNK]": 0, "[SEP]": 1, "cat": 2, "##s": 3, "a": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    tokeniser = hugging_face(write(tmp_path, tokenizer))
    ids = tokeniser.encode(["a cats"])[0]
    assert tokeniser.decode([*ids, 1, PAD]) == "a cats"
    assert b"".join(tokeniser.token_bytes()[i] for i in ids) == b" a cats"


def test_bad_folders_are_refused(tmp_path):
    refusal(lambda: hugging_face(tmp_path), "there is no file tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    refusal(lambda: hugging_face(tmp_path), "tokenizer.json is not a tokenizer file", CorruptFile)
    write(tmp_path, learnt(), tokenizer_config={"eos_token": "<|other|>"})
    with pytest.raises(InputError, match=r"tokenizer_config\.json: eos_token must .*<\|other\|>"):
        hugging_face(tmp_path)
    write(tmp_path, learnt(), tokenizer_config={}, generation_config={"eos_token_id": 999})
    refusal(lambda: hugging_face(tmp_path), "generation_config.json: eos_token_id found 999")


def byte_pairs(folder):
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, "th", "the", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))


def words(folder):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


def sentence_pieces(folder):
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    options = {"byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2}
    with (folder / "tokenizer.model").open("wb") as writer:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat", "the cats"] * 9), model_writer=writer,
            model_type="bpe", vocab_size=280, **options,
        )  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.parametrize(
    ("make", "text", "end"),
    [(byte_pairs, "the thé", 258), (words, "the cats", None), (sentence_pieces, "the cät", 2)],
)
def test_live_transformers_makes_what_a_folder_lacks(make, text, end, tmp_path, monkeypatch):
    """In a process of its own, once; a setting that names another file or code is left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    harmful = {"auto_map": {"AutoTokenizer": ["a.B", "a.B"]}, "vocab_file": "/dev/zero"}
    path.write_text(json.dumps(settings | harmful))
    (folder / "a.py").write_text("raise SystemExit('code of a stranger')")
    loaded = "transformers" in sys.modules
    tokeniser = hugging_face(folder)
    assert ("transformers" in sys.modules) == loaded
    assert tokeniser.end_of_text == end
    (ids,) = tokeniser.encode([text])
    assert len(ids) < len(text) and tokeniser.decode(ids) == text
    monkeypatch.setattr(subprocess, "run", None)
    np.testing.assert_array_equal(hugging_face(folder).encode([text])[0], ids)


def test_a_folder_of_which_no_tokenizer_can_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.json").write_text("no JSON")
    with pytest.raises(
        InputError, match=r"has no tokenizer\.json, and transformers .* vocab\.json"
    ):
        hugging_face(tmp_path)
    assert not list((tmp_path / "cache").rglob("tokenizer*.json"))


def test_a_cache_that_cannot_be_written_and_a_file_too_large_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").touch()
    with (tmp_path / "vocab.json").open("wb") as file:
        refusal(lambda: hugging_face(tmp_path), "cache/jaxpfl/tokenizers")
        file.truncate(2**40)
        refusal(lambda: hugging_face(tmp_path), "vocab.json must have at most")


def test_transformers_sees_the_settings_that_are_no_paths(tmp_path, monkeypatch):
    """And no run without end is waited for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    harmless = {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}, "n": 3}
    harmful = {"vocab": "/a", "source_spm": "a", "options": {"a": {"b": "../a"}}, "x_file": "a"}
    names = ("tokenizer_config.json", "special_tokens_map.json")
    for name in names:
        (tmp_path / name).write_text(json.dumps(harmless | harmful))
    (tmp_path / "vocab.json").write_text("{}")

    def run(command, timeout, **options):
        given = command[-2]
        assert [json.loads((given / name).read_text()) for name in names] == [harmless] * 2
        assert not (given / "vocab.json").is_symlink()
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    refusal(lambda: hugging_face(tmp_path), "makes none of vocab")
