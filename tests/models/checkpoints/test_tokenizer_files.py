"""Tokenizers that would make gigabytes of a letter are refused before they read one."""

import json

import pytest

from jaxpfl.errors import CorruptFile
from jaxpfl.models.checkpoints.tokenizer_files import faults, framed, read_tokenizer
from tests.refusals import refusal

tokenizers = pytest.importorskip("tokenizers")

DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
PIECE = {"Sequence": {"id": "A", "type_id": 0}}


def template(pieces, ids=(0,)):
    special = {"[E]": {"id": "[E]", "ids": list(ids), "tokens": ["[E]"]}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special}


def described(**changed):
    """A tokenizer.json of two words."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    parts = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    others = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    return {**others, **parts, "model": model, **changed}


def written(folder, **changed):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(described(**changed)))
    return path


def test_a_plain_one_is_read(tmp_path):
    path = written(tmp_path)
    assert framed(read_tokenizer(path), path) == ([0], [0])


def test_one_that_pads_and_cuts_does_neither(tmp_path):
    """TRUST 39: a fixed length of 2^40 tokens would be filled."""
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    path = written(tmp_path, padding=padding, truncation=cut)
    assert framed(read_tokenizer(path), path) == ([0], [0])


LEVEL = {"type": "ByteLevel"}
WORDS = {"type": "WordLevel", "unk_token": "a"}
REFUSED = [
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 40}}, "times as long"),
    ({"normalizer": {"type": "Sequence", "normalizers": [LEVEL] * 40}}, "times as long"),
    ({"post_processor": template([PIECE] * 2_000)}, "times as long"),
    (
        {"post_processor": {"type": "Sequence", "processors": [template([PIECE] * 40)] * 5}},
        "times as long",
    ),
    ({"post_processor": template([PIECE], ids=[2**31])}, "adds an id that no token has"),
    ({"model": WORDS | {"vocab": {"a": 0, "b": 2**32 - 1}}}, "below 4194304, found 4294967295"),
    ({"model": WORDS | {"vocab": {"a": -1}}}, "not a tokenizer"),
    ({"added_tokens": 7}, "is not a tokenizer file"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=range(8))
def test_one_that_grows_without_end_is_refused(changed, words, tmp_path):
    """TRUST 39: three kilobytes asked for eight gigabytes."""
    path = written(tmp_path, **changed)
    refusal(lambda: read_tokenizer(path), f"tokenizer.json {words}", CorruptFile)


class PanicException(BaseException):
    """As that of the library, whose class cannot be imported."""


def test_a_panic_is_an_error_of_ours_and_a_stop_is_not():
    """TRUST 39: a panic of Rust code is no `Exception`; nor is Control-C, which is let through."""
    with (
        pytest.raises(CorruptFile, match="the tokenizer fails$") as raised,
        faults("the tokenizer fails", private=True),
    ):
        raise PanicException("inside 'rosebud'")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    fails = pytest.raises(CorruptFile, match="the tokenizer fails: at byte 3")
    with fails, faults("the tokenizer fails"):
        raise PanicException("at byte 3")
    with pytest.raises(KeyboardInterrupt), faults("the tokenizer fails"):
        raise KeyboardInterrupt
