"""Successive spans of tokens, of texts and of clients."""

from jaxpfl.data import from_clients
from jaxpfl.text.tokenisers.spans import in_spans, spans
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

BYTES = UTF8Bytes()


def test_spans_follow_one_another():
    texts = ["abcdefghij", "abcd", "", "ab"]
    assert spans(BYTES, texts, 4) == [["abcd", "efgh", "ij"], ["abcd"], [], ["ab"]]
    # Nothing is lost and nothing doubled but space.
    text = "a b  cde " * 50
    (cut,) = spans(BYTES, [text], 7)
    assert "".join(cut).replace(" ", "") == text.replace(" ", "")
    assert all(span == span.strip() for span in cut)
    assert spans(BYTES, ["ab      cd"], 2) == [["ab", "cd"]]


def test_a_character_that_is_cut_in_two_is_left_out():
    # Of three bytes each: four bytes are one and a third, the next four none that is whole.
    assert spans(BYTES, ["€€€a"], 4) == [["€", "a"]]
    assert spans(BYTES, ["€€€"], 3) == [["€", "€", "€"]]


def test_a_population_keeps_its_clients_and_its_fingerprint():
    clients = from_clients(
        {"a": {"text": ["abc\n\ndef", "xy\n"]}, "b": {"text": []}, "c": {"text": ["", "pqrst"]}}
    )
    found = in_spans(clients, BYTES, 4)
    assert found.client_ids.to_pylist() == ["a", "b", "c"]
    # "abc def xy", without a newline; nothing; "pqrst" alone.
    assert found.sizes().tolist() == [3, 0, 2]
    assert found.columns["text"].to_pylist() == ["abc", "def", "xy", "pqrs", "t"]
    assert found.fingerprint == clients.fingerprint


def test_more_texts_than_a_block(monkeypatch):
    monkeypatch.setattr("jaxpfl.text.tokenisers.spans._BLOCK", 3)
    clients = from_clients({str(k): {"text": [f"{k}abc"] * (k % 3)} for k in range(9)})
    found = in_spans(clients, BYTES, 2)
    # "8abc", a space and "8abc" are nine bytes.
    assert found.sizes().tolist() == [[0, 2, 5][k % 3] for k in range(9)]
    assert found.examples(8)["text"].to_pylist() == ["8a", "bc", "8", "ab", "c"]
