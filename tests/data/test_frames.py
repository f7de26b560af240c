"""Tables in memory: pandas, polars and `datasets`, read through Arrow."""

import numpy as np
import pyarrow as pa
import pytest

import jaxpfl as jp
from jaxpfl.errors import InputError
from tests.data.traces import no_trace

SECRET = "canary-7f3"
ROWS = {
    "user": [f"u{n * n % 5}" for n in range(30)],
    "text": [f"Message {n}." for n in range(30)],
    "year": [2000 + n for n in range(30)],
    "score": [n / 4 for n in range(30)],
}
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
datasets = pytest.importorskip("datasets")

FRAMES = {
    "pandas": pd.DataFrame,
    "pandas, other index": lambda rows: pd.DataFrame(rows, index=range(100, 130)),
    "polars": pl.DataFrame,
    "datasets": datasets.Dataset.from_dict,
    "pyarrow": pa.table,
}
ALL = {"client": "user", "columns": ["year", "score"]}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_every_frame_is_the_same_population(frame):
    found = jp.data.from_dataframe(frame(ROWS), **ALL, name="messages")
    held = {user: {"text": [], "year": [], "score": []} for user in ROWS["user"]}
    for row in zip(*ROWS.values(), strict=True):
        for name, value in zip(("text", "year", "score"), row[1:], strict=True):
            held[row[0]][name].append(value)
    expected = jp.data.from_clients(held)
    assert found.client_ids.to_pylist() == list(held)
    assert found.content == expected.content
    assert (found.name, found.unit) == ("messages", 'all rows with one value of "user"')


def test_the_selected_rows_of_a_dataset_are_read():
    chosen = datasets.Dataset.from_dict(ROWS).select([7, 3, 3])
    found = jp.data.from_dataframe(chosen, client="*")
    assert found.columns["text"].to_pylist() == ["Message 7.", "Message 3.", "Message 3."]


def test_what_ends_a_stream_is_said_without_a_row():
    def rows():
        yield {"user": "a", "text": "x"}
        raise ValueError(SECRET)

    frame = datasets.IterableDataset.from_generator(rows)
    with pytest.raises(InputError, match=r"did not give it \(ValueError\)$") as error:
        jp.data.from_dataframe(frame, client="user")
    no_trace(error.value, SECRET)


def test_labels_and_features_of_a_frame():
    frame = pd.DataFrame({"who": [1, 2, 1], "y": [True, False, True], "a": [1, 2, 3], "b": 0.5})
    found = jp.data.from_dataframe(frame, client="who", label="y", features=["a", "b"])
    assert found.client_ids.to_pylist() == ["1", "2"]
    np.testing.assert_array_equal(found.examples(0)["features"], [[1, 0.5], [3, 0.5]])
    assert found.examples(1)["label"].tolist() == [0]


def test_what_nobody_asked_for_may_hold_anything():
    frame = pd.DataFrame({**ROWS, "odd": [object()] * 30, "when": pd.Timestamp(0)})
    assert jp.data.from_dataframe(frame, **ALL).num_examples == 30


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"text": [*ROWS["text"][:-1], None]}, "row 30: field 'text' must be a string, found no"),
        ({"score": [SECRET] * 30}, None),
        ({"user": [1.5] * 30}, "row 1: field 'user' must be .* found float"),
        ({"txt": ROWS["text"], "text": None}, "no field 'text', found 'user', .*'txt'"),
    ],
)
def test_a_bad_row_is_named_without_its_value(frame, changed, expected):
    rows = {name: values for name, values in {**ROWS, **changed}.items() if values is not None}
    if expected is None:
        assert jp.data.from_dataframe(frame(rows), **ALL).columns["score"][0].as_py() == SECRET
        return
    with pytest.raises(InputError, match=expected) as error:
        jp.data.from_dataframe(frame(rows), **ALL)
    assert "Message" not in str(error.value)


def test_what_is_no_table_is_refused():
    with pytest.raises(InputError, match="expected a DataFrame of pandas or polars.*found list"):
        jp.data.from_dataframe([1, 2], client="user")
    mixed = pd.DataFrame({"client": ["a", "b"], "text": ["x", 1]})
    with pytest.raises(InputError, match="row 2: field 'text' must be a string, found int"):
        jp.data.from_dataframe(mixed)


def test_records_of_clients_with_whole_numbers_and_of_nobody():
    pairs = [(3, [{"x": 1, "t": "a"}, {"x": 2, "t": "b"}]), ("b", [])]
    found = jp.data.from_clients(pairs)
    assert found.client_ids.to_pylist() == ["3", "b"] and found.sizes().tolist() == [2, 0]
    assert found.columns["x"].tolist() == [1, 2]


ONE = np.zeros((1, 3))
FIRST = ("a", {"x": ONE, "text": [SECRET]})


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        ([], "at least one client"),
        ([("a", [{"x": 1}, {"y": SECRET}])], "client 0, record 1: has the fields"),
        ([FIRST, (SECRET, {"x": ONE})], r"client 1 has columns \['x'\], expected \['text', 'x'\]"),
        ([FIRST, (SECRET, {"x": ONE, "text": ["a"], "z": [1]})], r"client 1 .* \['text', 'x', 'z'"),
        ([FIRST, ("b", {"x": ONE[:, :2], "text": ["a"]})], r"client 1.*64\[2\], expected float64"),
        ([FIRST, ("b", {"x": np.zeros((1, 3), "f4"), "text": ["a"]})], "client 1.*float32.*, exp"),
        ([FIRST, ("b", {"x": ONE, "text": [1]})], "client 1.*expected text"),
        ([FIRST, ("b", {"x": np.zeros((2, 3)), "text": ["a"]})], r"different lengths: \[1, 2\]"),
        ([("a", {"x": [1]}), ("b", {"x": [SECRET]})], "client 1"),
        ([("a", 5)], "client 0 must hold a mapping of columns or a list of records"),
        ([("a", [{"x": 1}]), ("a", [{"x": 1}])], "found one twice"),
        ([(1.5, [{"x": 1}])], "client 0: its id must be a non-empty string or a whole number"),
        ([("", [{"x": 1}])], "found an empty string"),
        ([("a", pd.DataFrame({"x": [1.0]}))], "from_dataframe"),
    ],
)
def test_groups_that_do_not_fit(clients, expected):
    with pytest.raises(InputError, match=expected) as error:
        jp.data.from_clients(clients)
    assert SECRET not in str(error.value)
