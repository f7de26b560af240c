"""One rule cuts the texts of clients, of public corpora and of generators."""

import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.data.readers.plain_text import split_sentences
from jaxpfl.text.cut import Cut
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

BYTES = UTF8Bytes()
RULES = ("messages", "sentences", "words:4", "documents:4", "tokens:4")
WORDS = ["Ja", "vu", "da.", "Then", "e.g.", "x", "\n", "\t", "\u00e9t\u00e9!", "--", "(So)", ""]


def made_up(seed: int) -> list[list[str]]:
    """The texts of some clients: with newlines and runs of spaces, empty ones, clients without."""
    rng = np.random.default_rng(seed)
    clients = [
        [" ".join(rng.choice(WORDS, rng.integers(0, 12))) for _ in range(rng.integers(0, 5))]
        for _ in range(rng.integers(0, 9))
    ]
    return [*clients, ["a b", "c d"]]


def plain(rule: str, texts: list[str]) -> list[str]:
    """The pieces of a client's texts, one after another."""
    unit, _, size = rule.partition(":")
    pieces, words = [], []
    if unit == "messages":
        return texts
    if unit == "sentences":
        for text in texts:
            for paragraph in text.split("\n"):
                pieces += split_sentences(" ".join(paragraph.split()))
        return [piece for piece in pieces if any(map(str.isalnum, piece))]
    for text in texts:
        words += text.split()
    units = words if unit != "tokens" else list(" ".join(words).encode())
    while units:
        piece, units = units[: int(size)], units[int(size) :]
        if unit == "tokens":
            pieces.append(bytes(piece).decode(errors="ignore").strip())
        else:
            pieces.append(" ".join(piece))
    pieces = [piece for piece in pieces if piece]
    return pieces[:1] if unit == "documents" else pieces


@pytest.mark.parametrize("rule", RULES)
def test_pieces_are_those_of_a_plain_loop(rule, monkeypatch):
    """Of lists of texts and of populations, however many clients are read at a time."""
    cut = Cut.parse(rule, BYTES)
    assert str(cut) == rule
    for seed in range(30):
        clients = made_up(seed)
        if rule == "sentences":
            # A paragraph of several lines is the reader's: here each line is one.
            clients = [[text.replace("\n", "\n\n") for text in texts] for texts in clients]
        expected = [plain(rule, texts) for texts in clients]
        assert cut.pieces(clients) == expected
        monkeypatch.setattr("jaxpfl.text.cut._BLOCK", 1 + seed % 3)
        whole = from_clients({str(i): {"text": texts} for i, texts in enumerate(clients)})
        found = cut.population(whole)
        assert found.client_ids == whole.client_ids
        assert found.sizes().tolist() == list(map(len, expected))
        assert found.columns["text"].to_pylist() == [piece for own in expected for piece in own]
        assert found.fingerprint == whole.fingerprint


def test_pieces_are_cut_again_to_themselves():
    for rule in RULES:
        cut = Cut.parse(rule, BYTES)
        for clients in map(made_up, range(10)):
            pieces = cut.pieces(clients)
            if rule != "tokens:4":  # Spaces at the ends of tokens are lost.
                assert cut.pieces(pieces) == pieces


def test_the_rest_of_a_client_is_a_piece_and_no_piece_is_of_two_clients():
    cut = Cut.parse("words:3")
    assert cut.pieces([["a b", "c d"], [], ["e"]]) == [["a b c", "d"], [], ["e"]]
    assert cut.pieces([["a \ufffd"]]) == [["a \ufffd"]]


def test_a_written_text_is_cut_to_its_first_piece():
    texts = ["One. Two three four. Five.", "", "--", "a  b\nc d e"]
    for rule, expected in (
        ("messages", texts),
        ("sentences", ["One.", "", "", "a b c d e"]),
        ("words:2", ["One. Two", "", "--", "a b"]),
        ("documents:2", ["One. Two", "", "--", "a b"]),
        ("tokens:6", ["One. T", "", "--", "a b c"]),
    ):
        assert Cut.parse(rule, BYTES).first(texts) == expected


def test_a_character_that_is_cut_in_two_is_left_out():
    # Of three bytes each: four bytes are one and a third, the next four none that is whole.
    assert Cut.parse("tokens:4", BYTES).pieces([["€€€a"]]) == [["€", "a"]]
    assert Cut.parse("tokens:3", BYTES).pieces([["€€€"]]) == [["€", "€", "€"]]


def test_messages_keep_every_column():
    clients = from_clients({"a": {"text": ["One. Two."], "year": [1]}})
    assert Cut().population(clients) is clients
    assert list(Cut.parse("sentences").population(clients).columns) == ["text"]
