"""Running text: what a paragraph and a sentence are."""

import pytest

from jaxpfl.data.readers import plain_text
from jaxpfl.data.readers.plain_text import pieces, split_sentences

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


LONG = "word " * 41


@pytest.mark.parametrize(
    ("lines", "split", "expected"),
    [
        (
            WRAPPED,
            "paragraphs",
            [
                "THE TITLE",
                'It was late. Mr. Hill had gone home; was it "late"? He said: * * *',
                "***",
                "No! (Yes.) Never",
            ],
        ),
        # Sentences do not cross paragraphs, and hold a letter or digit.
        (
            WRAPPED,
            "sentences",
            [
                *("THE TITLE", "It was late.", 'Mr. Hill had gone home; was it "late"?'),
                *("He said: * * *", "No!", "(Yes.)", "Never"),
            ],
        ),
        ([" a  b \r\n", "\n", "c"], "lines", ["a  b", "c"]),
        # A long line is a paragraph by itself.
        (["a", LONG, LONG, "b", "c"], "paragraphs", ["a", LONG.strip(), LONG.strip(), "b c"]),
        *((["", " \t\n", "\u2028"], split, []) for split in plain_text.PIECES),
    ],
)
def test_the_pieces_of_a_text(lines, split, expected):
    assert list(pieces(lines, split)) == expected


def test_a_paragraph_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(plain_text, "_LONGEST_PARAGRAPH", 10)
    assert list(pieces(["aaaa"] * 5, "paragraphs")) == ["aaaa aaaa", "aaaa aaaa", "aaaa"]


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
