"""LargeFedBench through a stand-in of the library `datasets`: the network is never asked."""

import sys

import pytest

from jaxpfl.data import open as open_population
from jaxpfl.data.readers.hugging_face import read_largefedbench
from jaxpfl.errors import InputError
from tests.data.hub import stand_in

REVISION = "0123456789abcdef" * 2 + "01234567"
ROWS = {
    "data": ["I rise today. It is late.", "Thank you.", "", "Order! Order! I beg you."],
    "speaker": ["canary a", "canary b", "canary c", "canary d"],
}


@pytest.fixture
def hub(monkeypatch):
    return stand_in(monkeypatch, ROWS)


def test_a_speech_is_a_client(hub):
    population = open_population(f"largefedbench:congress?revision={REVISION}")
    assert population.client_ids.to_pylist() == ["1", "2", "3", "4"]
    assert population.columns["text"].to_pylist() == ROWS["data"]
    assert list(population.columns) == ["text"]
    assert population.unit == "one speech"
    assert population.name == "largefedbench:congress [train]"
    # The commit is what is asked for, and no code of the data set's is to run.
    assert hub.asked == [
        ("hazylavender/CongressionalDataset", {"split": "train", "revision": REVISION})
    ]


def test_sentences_of_an_abstract(hub):
    hub.rows = {"doi": ["1", "2"], "abstract": ["One is here. Two is there.", "Three."]}
    source = f"largefedbench:biorxiv?revision={REVISION}&part=validation&split=sentences"
    population = open_population(source)
    assert population.sizes().tolist() == [2, 1]
    assert population.columns["text"].to_pylist()[2] == "Three."
    assert hub.asked[0] == (
        "hazylavender/biorxiv-abstract",
        {"split": "validation", "revision": REVISION},
    )
    assert open_population(f"{source}&min_examples=2").sizes().tolist() == [2, 0]
    named = open_population(f"largefedbench:biorxiv?revision={REVISION}&text=doi")
    assert named.columns["text"].to_pylist() == ["1", "2"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("largefedbench:congress", "revision must be a commit"),
        ("largefedbench:congress?revision=main", "40 hexadecimal digits, found 'main'"),
        (f"largefedbench:senate?revision={REVISION}", "found 'senate'"),
        (f"largefedbench:congress?revision={REVISION}&split=words", "found 'words'"),
        (f"largefedbench:congress?revision={REVISION}&text=body", "no field 'body', found 'data'"),
        (f"largefedbench:congress?revison={REVISION}", "did you mean 'revision'"),
        (f"largefedbench:congress?revision={REVISION}&min_examples=x", "must be a number"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(hub, source, message):
    with pytest.raises(InputError, match=message):
        open_population(source)


def test_rows_without_text_are_named_by_number_alone(hub):
    hub.rows = {"data": ["canary", None]}
    message = "row 2: field 'data' must be a string, found no value"
    with pytest.raises(InputError, match=message) as caught:
        read_largefedbench("congress", revision=REVISION)
    assert "canary" not in str(caught.value)
    hub.rows = {"data": []}
    with pytest.raises(InputError, match="has no examples"):
        read_largefedbench("congress", revision=REVISION)


def test_without_the_library_or_the_network_it_says_so(hub, monkeypatch):
    hub.rows = ConnectionError("cannot reach\nthe hub")
    with pytest.raises(InputError, match=r"did not give .* \(ConnectionError: cannot reach\)$"):
        read_largefedbench("congress", revision=REVISION)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'jaxpfl\[datasets\]'"):
        read_largefedbench("congress", revision=REVISION)


def test_each_line_of_a_file_can_be_a_client(tmp_path):
    path = tmp_path / "speeches.jsonl"
    path.write_text('{"client": "m0", "text": "One. Two."}\n\n{"client": "m0", "text": "Three."}\n')
    population = open_population(f"{path}?client=*&split=sentences")
    # Rows are counted as they stand in the file, blank ones too.
    assert population.client_ids.to_pylist() == ["1", "3"]
    assert population.unit == "one row"
    assert open_population(f"{path}").client_ids.to_pylist() == ["m0"]


def test_congress_and_abstracts_at_hand(data_folder):
    """Real files, a client = a speech or an abstract."""
    speeches = data_folder / "text_congress_record" / "congress_speeches.jsonl.gz"
    population = open_population(f"{speeches}?client=*&split=sentences")
    assert len(population) == 789
    assert len(open_population(f"{speeches}?split=sentences")) == 208
    abstracts = data_folder / "public_pubmedqa" / "pubmed_abstracts.jsonl.gz"
    assert len(open_population(f"{abstracts}?split=sentences")) == 1_000
