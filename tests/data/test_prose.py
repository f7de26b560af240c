"""Running text: what a paragraph and a sentence are."""

import pytest

from jaxpfl.data.readers import prose
from jaxpfl.data.readers.prose import pieces, split_sentences
from jaxpfl.errors import InputError

WRAPPED = [
    "",
    "   THE TITLE",
    "",
    "It was late. Mr. Hill had  gone\r\n",
    'home; was it "late"? He\tsaid:',
    "* * *",
    " \n",
    "***",
    "",
    "No! (Yes.) Never",
]


def test_lines_between_blank_ones_are_a_paragraph():
    assert list(pieces(WRAPPED, "paragraphs")) == [
        "THE TITLE",
        'It was late. Mr. Hill had gone home; was it "late"? He said: * * *',
        "***",
        "No! (Yes.) Never",
    ]


def test_sentences_do_not_cross_paragraphs_and_hold_a_letter_or_digit():
    assert list(pieces(WRAPPED, "sentences")) == [
        "THE TITLE",
        "It was late.",
        'Mr. Hill had gone home; was it "late"?',
        "He said: * * *",
        "No!",
        "(Yes.)",
        "Never",
    ]


def test_lines_are_stripped_and_blank_ones_left_out():
    assert list(pieces([" a  b \r\n", "\n", "c"], "lines")) == ["a  b", "c"]


def test_a_long_line_is_a_paragraph_by_itself():
    long = "word " * 41
    assert list(pieces(["a", long, long, "b", "c"], "paragraphs")) == [
        "a",
        long.strip(),
        long.strip(),
        "b c",
    ]


def test_a_paragraph_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(prose, "_LONGEST_PARAGRAPH", 10)
    assert list(pieces(["aaaa"] * 5, "paragraphs")) == ["aaaa aaaa", "aaaa aaaa", "aaaa"]


@pytest.mark.parametrize("split", prose.PIECES)
def test_nothing_comes_of_nothing(split):
    assert list(pieces(["", " \t\n", "\u2028"], split)) == []


def test_other_pieces_are_refused():
    with pytest.raises(InputError, match="split must be one of 'paragraphs'"):
        pieces(["a"], "words")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three! Four", ["One.", "Two?", "Three!", "Four"]),
        ("Dr. A. B. Smith, e.g. Mrs. X, vol. 3.", ["Dr. A. B. Smith, e.g. Mrs. X, vol. 3."]),
        ("Version 3.5 of it. see file.txt", ["Version 3.5 of it. see file.txt"]),
        ('He said "No." Then he left.', ['He said "No."', "Then he left."]),
        ("", [""]),
    ],
)
def test_sentences_of_a_paragraph(text, expected):
    assert split_sentences(text) == expected
