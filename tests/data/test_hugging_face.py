"""Data sets of the hub, through a stand-in of it."""

import sys

import pytest

from jaxpfl.data import open as open_population
from jaxpfl.errors import InputError
from tests.data.hub import stand_in

REVISION = "0123456789abcdef" * 2 + "01234567"
SOURCE = f"huggingface:owner/abstracts?revision={REVISION}"
ROWS = {
    "abstract": ["One is here. Two is there.", "", "Four.", "Five. Six."],
    "journal": ["canary b", "canary a", "canary b", "canary c"],
    "year": [2001, 2002, 2001, 2003],
}


@pytest.fixture
def hub(monkeypatch):
    return stand_in(monkeypatch, ROWS)


@pytest.mark.parametrize("column", ["text", "data", "abstract"])
def test_a_row_is_a_client_and_texts_are_found_under_the_names_that_sets_give_them(hub, column):
    hub.rows = {"doi": ["1", "2"], column: ["One is here. Two is there.", "Three."]}
    population = open_population(SOURCE)
    assert population.client_ids.to_pylist() == ["1", "2"]
    assert population.columns["text"].to_pylist() == hub.rows[column]
    assert list(population.columns) == ["text"]
    assert (population.unit, population.name) == ("one row", "huggingface:owner/abstracts [train]")
    source = f"{SOURCE}&part=validation&split=sentences"
    assert open_population(source).sizes().tolist() == [2, 1]
    options = {"split": "validation", "revision": REVISION, "name": None, "streaming": False}
    assert hub.asked[1] == ("owner/abstracts", options)
    assert open_population(f"{source}&min_examples=2").sizes().tolist() == [2, 0]
    named = open_population(f"{SOURCE}&text=doi")
    assert named.columns["text"].to_pylist() == ["1", "2"]


def test_a_column_can_say_whose_a_row_is(hub):
    source = f"{SOURCE}&text=abstract&split=sentences&part=test&config=small"
    for column, ids in (("journal", ["canary b", "canary a", "canary c"]), ("year", None)):
        population = open_population(f"{source}&client={column}")
        assert population.client_ids.to_pylist() == (ids or ["2001", "2002", "2003"])
        # The abstract without a sentence leaves its client without examples.
        assert population.sizes().tolist() == [3, 0, 2]
        assert population.examples(0)["text"].to_pylist()[2] == "Four."
        assert population.unit == f'all rows with one value of "{column}"'
    assert hub.asked[0][1]["name"] == "small"
    few = open_population(f"{source}&client=year&min_examples=3")
    assert few.sizes().tolist() == [3, 0, 0]


def test_without_the_library_or_the_network_it_says_so(hub, monkeypatch):
    hub.rows = ConnectionError("cannot reach\nthe hub")
    with pytest.raises(InputError, match=r"did not give it \(ConnectionError: cannot reach\)$"):
        open_population(SOURCE)
    # What another error says may be out of a row.
    hub.rows = ValueError("canary")
    with pytest.raises(InputError, match=r"did not give it \(ValueError\)$") as caught:
        open_population(SOURCE)
    assert caught.value.__cause__ is None
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'jaxpfl\[datasets\]'"):
        open_population(SOURCE)


def test_a_local_folder_does_not_take_the_hubs_place(hub, tmp_path, monkeypatch):
    """The library reads a folder of the data set's name, whatever revision was asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "abstracts").mkdir(parents=True)
    with pytest.raises(InputError, match="a file or folder of that name is here"):
        open_population(SOURCE)
    assert not hub.asked
