"""Embedding a population, and names of embedders."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.text.embed import base, embed, embedder

CLIENTS = {
    "a": {"text": ["one", "two", "one"], "year": [1, 2, 3]},
    "b": {"text": [], "year": []},
    "c": {"text": ["", "three", "two"], "year": [4, 5, 6]},
}


@dataclass
class Lengths:
    """Embeds a text as its length, and remembers what it was asked for."""

    name: str = "lengths"
    dimension: int = 2
    column: str = "text"
    width: int = 2
    asked: list[str] = field(default_factory=list)

    def __call__(self, examples):
        self.asked += list(examples)
        return np.array([[len(example)] * self.width for example in examples], np.float32)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_every_row_gets_its_vector(monkeypatch, chunk):
    monkeypatch.setattr(base, "_CALL", chunk)
    population = from_clients(CLIENTS)
    lengths = Lengths()
    embedded = embed(population, lengths)
    assert list(embedded.columns) == ["embedding"]
    found = embedded.columns["embedding"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([[3, 3, 3, 0, 5, 3]] * 2).T)
    np.testing.assert_array_equal(embedded.offsets, population.offsets)
    assert embedded.client_ids == population.client_ids
    assert embedded.fingerprint == population.fingerprint
    assert embed(population.select([]), lengths).columns["embedding"].shape == (0, 2)


def test_images_go_to_the_embedder_as_they_are(monkeypatch):
    monkeypatch.setattr(base, "_CALL", 2)
    images = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 3, 1, 1), np.uint8)
    population = from_clients({"a": {"image": images[:4]}, "b": {"image": images[4:]}})

    class First(Lengths):
        def __call__(self, examples):
            assert examples.dtype == np.uint8
            return examples[:, :2, 0, 0].astype(np.float32)

    found = embed(population, First(column="image")).columns["embedding"]
    np.testing.assert_array_equal(found[:, 0], np.arange(5))


def test_progress_is_shown_where_it_is_asked_for_and_in_per_cent(capfd):
    embed(from_clients(CLIENTS), Lengths())
    assert capfd.readouterr() == ("", "")
    embed(from_clients(CLIENTS), Lengths(), progress=True)
    said = capfd.readouterr().err
    assert "percent 100/100" in said and "s/s" not in said


def test_hashed_is_named_with_its_dimension():
    assert embedder("hashed").name == "hashed:256"
    assert embedder("hashed:32").dimension == 32
