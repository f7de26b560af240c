import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.models import PAD
from jaxpfl.text import Vocabulary
from jaxpfl.text.tokenisers.open import (
    check_fits,
    from_vocabulary,
    gpt2,
    hugging_face,
    llama2c,
    one_per_row,
    packed,
    pad,
    utf8_bytes,
)

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "Hello world",
    "",
    "it's 2024,  two  spaces\n\ttabs",
    "naïve — 日本語 \U0001f600",
    "a <|endoftext|> b",
]


@pytest.fixture(scope="session")
def gpt2_files(data_folder):
    folder = data_folder / "tokenizer_gpt2"
    if not folder.is_dir():
        pytest.skip("GPT-2's tokeniser is not at hand")
    return folder


@pytest.fixture(scope="session")
def llama2c_file(data_folder):
    path = data_folder / "weights_stories260k" / "tok512.bin"
    if not path.is_file():
        pytest.skip("llama2.c's tokeniser is not at hand")
    return path


def byte_level(specials=("<|end|>", "<|turn|>"), *, framed=False):
    """A byte-level BPE learnt from a few words, the style of GPT-2 and Llama-3."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end"] * 3, trainer)
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


def test_padding_is_no_token_of_any_vocabulary():
    rows = pad([np.array([5, 6, 7], np.int32), np.array([], np.int32)], 2)
    np.testing.assert_array_equal(rows, [[5, 6], [-1, -1]])
    assert rows.dtype == np.int32


def test_end_of_text_stays_a_label_where_rows_are_padded():
    """GPT-2 has no padding token; filling rows with its end-of-text token would mask the label."""
    rows = one_per_row([np.array([5, 6]), np.array([5, 6, 7]), np.array([5, 6, 7, 8])], 4, 9)
    np.testing.assert_array_equal(rows, [[5, 6, 9, -1], [5, 6, 7, 9], [5, 6, 7, 8]])
    targets = rows[:, 1:]
    assert (targets[targets != PAD] == 9).sum() == 2


def test_packed_rows_lose_no_token_and_mark_every_end():
    sequences = [np.arange(3), np.arange(0), np.arange(4)]
    rows = packed(sequences, 4, 9)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 9], [9, 0, 1, 2], [3, 9, -1, -1]])
    assert packed([], 4, 9).shape == (0, 4)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text):
    tokeniser = utf8_bytes()
    ids = tokeniser.encode([text])[0]
    assert tokeniser.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert tokeniser.end_of_text not in ids


def test_a_lone_surrogate_is_the_replacement_character():
    tokeniser = utf8_bytes()
    assert tokeniser.decode(tokeniser.encode(["a\ud800b"])[0]) == "a\ufffdb"


def test_bytes_that_are_no_text_are_shown_as_replaced():
    assert utf8_bytes().decode([0xE2, 0x82, 65, PAD]) == "\ufffdA"


def test_words_of_a_vocabulary():
    vocabulary = Vocabulary.from_texts(["the cat sat"], 7, source="here")
    tokeniser = from_vocabulary(vocabulary)
    ids = tokeniser.encode(["The CAT barked"])[0]
    assert tokeniser.decode([1, *ids, 2]) == "the cat <oov>"
    assert tokeniser.token_bytes()[:4] == (b"", b"", b"", b" <oov>")
    np.testing.assert_array_equal(ids, vocabulary.encode_texts(["the cat barked"], 3)[0][1:])


def test_one_text_alone_is_refused():
    with pytest.raises(InputError, match="a list of texts"):
        utf8_bytes().encode("abc")


def test_ids_of_another_vocabulary_are_refused():
    with pytest.raises(InputError, match=r"0 \.\. 256, found 257"):
        utf8_bytes().decode([257])


def test_a_tokeniser_must_not_have_more_ids_than_the_model():
    check_fits(utf8_bytes(), 257)
    with pytest.raises(InputError, match=r"utf8-bytes has token ids up to 256.*vocab_size is 256"):
        check_fits(utf8_bytes(), 256)


def test_gpt2_ids_are_openais(gpt2_files):
    tokeniser = gpt2(gpt2_files)
    ids = tokeniser.encode(["Hello world", " Hello", "naïve"])
    assert [list(row) for row in ids] == [[15496, 995], [18435], [2616, 38776]]
    assert (tokeniser.vocab_size, tokeniser.ends, tokeniser.start) == (50257, (50256,), None)


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_round_trips_and_text_never_becomes_a_special_token(gpt2_files, text):
    tokeniser = gpt2(gpt2_files)
    ids = tokeniser.encode([text])[0]
    assert tokeniser.decode(ids) == text
    assert tokeniser.end_of_text not in ids
    assert tokeniser.decode([*ids, tokeniser.end_of_text, PAD]) == text


def test_bytes_of_byte_level_tokens_agree_with_the_original_decoder(tmp_path):
    original = byte_level()
    tokeniser = hugging_face(write(tmp_path, original))
    generator = np.random.default_rng(0)
    for _ in range(20):
        ids = generator.integers(2, tokeniser.vocab_size, 12)
        assert tokeniser.decode(ids) == original.decode(ids.tolist())
    assert tokeniser.token_bytes()[:2] == (b"", b"")


def test_several_end_of_text_ids_and_a_start(tmp_path):
    """The settings of Llama-3: a list of ends, and a start that the tokenizer puts itself."""
    tokenizer = byte_level(("<|start|>", "<|end|>", "<|turn|>"), framed=True)
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
    tokenizer = byte_level(("<|start|>", "<|end|>", "<|turn|>"), framed=framed)
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
    tokenizer = byte_level(("<|start|>", "<|end|>"))
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
    with pytest.raises(InputError, match=r"there is no file .*tokenizer\.json"):
        hugging_face(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptFile, match=r"tokenizer\.json is not a tokenizer file"):
        hugging_face(tmp_path)
    write(tmp_path, byte_level(), tokenizer_config={"eos_token": "<|other|>"})
    with pytest.raises(InputError, match=r"tokenizer_config\.json: eos_token must .*<\|other\|>"):
        hugging_face(tmp_path)
    write(tmp_path, byte_level(), tokenizer_config={}, generation_config={"eos_token_id": 999})
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id .* found 999"):
        hugging_face(tmp_path)


def test_bad_gpt2_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"encoder\.json"):
        gpt2(tmp_path)
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    with pytest.raises(InputError, match=r"vocab\.bpe"):
        gpt2(tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(CorruptFile, match=r"vocab\.bpe, line 2"):
        gpt2(tmp_path)
    (tmp_path / "encoder.json").write_text(json.dumps({"a": 0, "b": 2}))
    with pytest.raises(CorruptFile, match=r"its own id, 0 \.\. 1"):
        gpt2(tmp_path)


def scored_file(path, pieces):
    """A file of llama2.c's format: special tokens, bytes, then pieces with their scores."""
    single = [(f"<0x{value:02X}>", 0.0) for value in range(256)]
    everything = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *single, *pieces]
    content = struct.pack("<i", 7)
    for piece, score in everything:
        encoded = piece.encode()
        content += struct.pack("<fi", score, len(encoded)) + encoded
    path.write_bytes(content)
    return path


def merged_step_by_step(pieces, scores, text):
    """The rule, spelt out: join the best pair, the first of equals, until there is none."""
    lookup = {piece: i for i, piece in reversed([*enumerate(pieces)])}
    ids = []
    for character in f" {text}" if text else "":
        content = character.encode()
        ids += [lookup[content]] if content in lookup else [value + 3 for value in content]
    while True:
        best = None
        for place, (left, right) in enumerate(zip(ids, ids[1:], strict=False)):
            union = lookup.get(pieces[left] + pieces[right])
            if union is not None and (best is None or scores[union] > best[0]):
                best = (scores[union], place, union)
        if best is None:
            return ids
        ids[best[1] : best[1] + 2] = [best[2]]


@given(st.text("ab é", max_size=12), st.booleans())
def test_merges_by_score_follow_the_rule(tmp_path_factory, text, across):
    """Equal scores and overlapping pairs are among the pieces, and so are pieces across words."""
    pieces = [*((c, -9.0) for c in "ab "), ("ab", -1.0), ("ba", -1.0), ("aba", -0.5), (" a", -2.0)]
    pieces += [("b a", -0.1), (" b", -3.0)] if across else []
    path = scored_file(tmp_path_factory.getbasetemp() / f"tok{across}.bin", pieces)
    tokeniser = llama2c(path)
    content = [piece.encode() for piece, _ in pieces]
    single = [f"<0x{value:02X}>".encode() for value in range(256)]
    everything = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *single, *content]
    scores = [0.0] * 259 + [score for _, score in pieces]
    ids = tokeniser.encode([text])[0]
    assert ids.tolist() == merged_step_by_step(everything, scores, text)
    assert tokeniser.decode(ids) == text


def test_llama2c_reads_the_real_file(llama2c_file):
    tokeniser = llama2c(llama2c_file)
    assert (tokeniser.vocab_size, tokeniser.start, tokeniser.name) == (512, 1, "tok512")
    texts = ["Once upon a time, there was a little girl.", "日本 x  y", ""]
    for text, ids in zip(texts, tokeniser.encode(texts), strict=True):
        assert tokeniser.decode(ids) == text
        assert ids.tolist() == merged_step_by_step(tokeniser._pieces, tokeniser._scores, text)


def test_broken_llama2c_files_are_refused(tmp_path):
    path = tmp_path / "tok.bin"
    with pytest.raises(InputError, match="there is no file"):
        llama2c(path)
    whole = scored_file(path, [("a", 0.0)]).read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match="piece 259 is broken"):
        llama2c(path)
    path.write_bytes(whole[:60])
    with pytest.raises(CorruptFile, match=r"tok\.bin"):
        llama2c(path)
