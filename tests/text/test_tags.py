"""Posts as ids of words and tags."""

import numpy as np
import pytest

from jaxpfl.data import from_clients
from jaxpfl.errors import InputError
from jaxpfl.text.tags import TagEncoder, most_frequent

POSTS = {
    "text": ["how to sort jquery-1.9 lists", "", "to to to to to"],
    "title": ["Sort lists", "how", "x"],
    "tags": ["python|sorting", "", "r|python|java|c|go|rust"],
}


def test_words_of_text_and_title_and_tags_become_ids():
    encoder = TagEncoder(("to", "how", "jquery-1.9"), ("python", "r"), max_words=8, max_tags=5)
    population = from_clients({"a": POSTS}, name="x", unit="y")
    found = encoder.encode(population)
    words = [[1, 0, 3, 2, 3, 3, 3], [1], [0, 0, 0, 0, 0, 3]]
    tags = [[0, 2], [], [1, 0, 2, 2, 2]]
    for name, rows, width in (("words", words, 8), ("tags", tags, 5)):
        expected = [row + [-1] * (width - len(row)) for row in rows]
        np.testing.assert_array_equal(found.columns[name], expected)
    assert found.fingerprint == population.fingerprint


def test_a_title_is_optional_and_tags_are_not():
    encoder = TagEncoder(("to",), ("r",))
    untitled = {name: POSTS[name] for name in ("text", "tags")}
    found = encoder.encode(from_clients({"a": untitled}, name="x", unit="y"))
    assert found.columns["words"][1].tolist() == [-1] * 64
    with pytest.raises(InputError, match="'tags'"):
        encoder.encode(from_clients({"a": {"text": POSTS["text"]}}, name="x", unit="y"))


def test_vocabularies_are_the_most_frequent_entries(tmp_path):
    path = tmp_path / "counts.csv"
    path.write_text("r,2\npython,9\njava,5\n")
    assert most_frequent(path, 2, "model.tags") == ("python", "java")
    with pytest.raises(InputError, match=r"counts\.csv has 3 entries"):
        most_frequent(path, 4, "model.tags")
