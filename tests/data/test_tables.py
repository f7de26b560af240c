"""Tables: every format gives the same clients, and names the row that it refuses."""

import csv
import gzip
import io
import json
import re
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from jaxpfl import checks
from jaxpfl.data import stream
from jaxpfl.data.readers import compressed, text_tables
from jaxpfl.errors import InputError
from tests import refusals
from tests.data.traces import no_trace

SECRET = "canary-7f3"
ROWS = [
    {
        "user": f"u{n * n % 5}",
        "text": f'Line {n},\n"quoted" é {"{[" * (n % 3)}\\',
        "year": 2000 + n,
        "score": n / 4,
        "spam": n % 2 == 0,
        "mood": ["good", "bad"][n % 2],
    }
    for n in range(40)
]
OPTIONS = "client=user&columns=year,score,spam,mood"


def lines(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def packed(rows) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


FORMATS = {
    "x.jsonl": lines,
    "x.jsonl.gz": lambda rows: gzip.compress(lines(rows)),
    "x.csv": table,
    "x.csv.gz": lambda rows: gzip.compress(table(rows)),
    "x.parquet": packed,
}


@pytest.fixture(params=FORMATS)
def form(request):
    return request.param


def write(folder, form, rows):
    path = folder / form
    path.write_bytes(FORMATS[form](rows))
    return path


def refusal(source) -> str:
    with pytest.raises(InputError) as error:
        jp.data.open(source)
    assert error.value.__context__ is None or error.value.__suppress_context__
    message = str(error.value)
    no_trace(error.value, SECRET)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("block", [2**22, 300])
def test_every_format_holds_the_same_clients(tmp_path, form, block, monkeypatch):
    monkeypatch.setattr(text_tables, "_BLOCK_CHARACTERS", block)
    found = jp.data.open(f"{write(tmp_path, form, ROWS)}?{OPTIONS}")
    order = list(dict.fromkeys(row["user"] for row in ROWS))
    assert found.client_ids.to_pylist() == order
    assert found.unit == 'all rows with one value of "user"'
    for index, user in enumerate(order):
        held = found.examples(index)
        for name in ("text", "year", "score", "spam", "mood"):
            values = [row[name] for row in ROWS if row["user"] == user]
            assert held[name].tolist() == values
    dtypes = {"year": np.int64, "score": np.float64, "spam": np.bool_}
    assert {name: found.columns[name].dtype for name in dtypes} == dtypes


def test_rows_grouped_on_the_disk_are_the_same(tmp_path, form, monkeypatch):
    path = write(tmp_path, form, ROWS)
    plain = jp.data.open(f"{path}?{OPTIONS}")
    monkeypatch.setattr(stream, "_BITS", 1)
    found = jp.data.open(f"{path}?{OPTIONS.replace('user', 'user|value')}")
    order = found.client_ids.to_pylist()
    assert sorted(order) == sorted(plain.client_ids.to_pylist())
    chosen = plain.select([plain.client_ids.to_pylist().index(id_) for id_ in order])
    assert found.content == chosen.content


def test_each_row_can_be_a_client(tmp_path, form):
    found = jp.data.open(f"{write(tmp_path, form, ROWS)}?client=*")
    assert len(found) == found.num_examples == 40
    # A header is the first row of a spreadsheet.
    first = 2 if ".csv" in form else 1
    assert found.client_ids.to_pylist() == [str(number) for number in range(first, first + 40)]
    assert found.unit == "one row"


def test_label_and_features(tmp_path, form):
    rows = [{"who": k % 3, "y": k % 4, "a": k / 2, "b": -k} for k in range(12)]
    found = jp.data.open(f"{write(tmp_path, form, rows)}?client=who&label=y&features=b,a")
    assert found.client_ids.to_pylist() == ["0", "1", "2"]
    assert list(found.columns) == ["label", "features"]
    held = found.examples(1)
    assert held["label"].dtype == np.int32 and held["features"].dtype == np.float32
    np.testing.assert_array_equal(held["label"], [1, 0, 3, 2])
    np.testing.assert_array_equal(held["features"], [[-k, k / 2] for k in (1, 4, 7, 10)])


@pytest.mark.parametrize("form", [form for form in FORMATS if "csv" not in form])
def test_lists_of_numbers(tmp_path, form):
    rows = [{"client": "a", "y": 0, "x": [k, 1.5, 2.5]} for k in range(5)]
    path = write(tmp_path, form, rows)
    found = jp.data.open(f"{path}?label=y&columns=x")
    np.testing.assert_array_equal(found.columns["x"], [row["x"] for row in rows])
    flat = jp.data.open(f"{path}?label=y&features=x").columns["features"]
    np.testing.assert_array_equal(flat, [row["x"] for row in rows])


@pytest.mark.parametrize(
    ("changed", "options", "expected"),
    [
        ({"user": None}, "client=user", "field 'user' must be a non-empty string"),
        ({"user": ""}, "client=user", "field 'user' must be a non-empty string"),
        ({"year": None}, "client=user&columns=year", "field 'year' must be"),
        ({"year": -7}, "client=user&label=year", "field 'year' must be a whole number from 0"),
        ({"text": None}, "client=user|value", "field 'text' must be a string, found no value"),
        ({"mood": "worse"}, "client=mood|domain", "must be a URL with a host"),
    ],
)
def test_a_bad_row_is_named_in_every_format(tmp_path, form, changed, options, expected):
    """TRUST 7: by file, row and field, without a value."""
    if ".csv" in form and list(changed) == ["text"]:
        pytest.skip("an empty text is an example")
    rows = [{**row, "text": SECRET, "mood": "http://a.org/b"} for row in ROWS]
    rows[33] |= changed
    path = write(tmp_path, form, rows)
    message = refusal(f"{path}?{options}")
    assert expected in message
    assert message.startswith(f"{path}, row {35 if '.csv' in form else 34}:")


def test_truncated_and_altered_files_are_refused(tmp_path, form):
    """TRUST 6: a text that ends with a whole line is a valid text; all others are refused."""
    whole = FORMATS[form](ROWS)
    path = tmp_path / form
    damaged = [whole[:length] for length in range(1, len(whole) - 1, max(1, len(whole) // 40))]
    if form in ("x.jsonl", "x.csv"):
        # Cut between values, which only shows where a value is missing.
        damaged = [each for each in damaged if each.count(b'"') % 2]
    if form.endswith(".gz"):
        flips = range(12, len(whole), 17)
        damaged += [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in flips]
    for content in damaged:
        path.write_bytes(content)
        assert str(path) in refusal(f"{path}?{OPTIONS}")


OK = b'{"client": "a", "text": "x"}\n'
LONG = b'{"client": "a", "text": "canary-7f3", "z": '
BAD = {
    "x.csv": [
        (b"", "expected a header, found an empty file"),
        (b"client\n", "there is no field 'text', found 'client'"),
        (b"client,text,text\na,b,c\n", "there are two fields 'text'"),
        (b"client,text\n", "has no examples"),
        (b"client,text\na,b\na,canary-7f3,c\n", "row 3: expected 2 fields, .* found 3"),
        (b'client,text\na,b\na,"canary-7f3\n', "row 3: its quote is never closed"),
        (b"client,text\na,b\na,canary-7f3 \xff\n", "line 3: byte 14 is not valid UTF-8"),
        (b"client,text\n,canary-7f3\n", "row 2: field 'client' must be .*an empty string"),
    ],
    "x.jsonl": [
        (b"\n\n", "has no examples"),
        *(
            (OK + b"\n" + line, f"row 3: {expected}")
            for line, expected in (
                (LONG + b"\n", "not valid JSON"),
                (LONG + b'"cut', "not valid JSON at character .* line; the file may be truncated"),
                (b'["a", "canary-7f3"]\n', "expected a JSON object, found list"),
                (b'{"text": "canary-7f3"}\n', "there is no field 'client'"),
                (b'{"client": "canary-7f3", "text": 7}\n', ".*'text' must be a string, found int"),
                (b'{"client": "", "text": "canary-7f3"}\n', ".*'client' must be a non-empty"),
                (b'{"client": 1.5, "text": "canary-7f3"}\n', ".*'client' .* found float"),
                (b'{"client": true, "text": "canary-7f3"}\n', ".*'client' .* found bool"),
                (LONG + b"NaN}\n", "expected JSON without NaN"),
                (LONG + b"[" * 100_000, "expected JSON without .* nesting"),
                (LONG + b"9" * 5_000 + b"}\n", "expected JSON without .* digits"),
                (LONG + b'"\xed\xa0\x80"}\n', "byte .* is not valid UTF-8"),
                (OK.decode().encode("utf-16"), "byte .* is not valid UTF-8"),
            )
        ),
    ],
}


TWO_KINDS = [
    (1, SECRET, "a number, found str"),
    (SECRET, 1, "a string, found int"),
    (True, 1, "a boolean, found int"),
    (1.5, True, "a number, found bool"),
    ([1], 1, "a list of numbers as long as the first row's, found int"),
    ([1], [1, 2], "a list of numbers as long as the first row's, found a longer or shorter"),
    ({"k": 1}, 1, "a string, boolean or number, or a list of numbers, found dict"),
    (2**63, 1, "at most 64 bits"),
    (2**70, 1, "at most 64 bits"),
    (1.5, 2**53 + 1, "row 2: .* of at most 2\\^53 where there are fractions"),
]
CASES = [(name, "", *case) for name, cases in BAD.items() for case in cases]
CASES += [
    ("x.jsonl", "?columns=z", lines([{"client": "a", "text": "x", "z": z} for z in pair]), expected)
    for *pair, expected in TWO_KINDS
]
# The first row of a CSV decides.
CASES += [
    ("x.csv", "?columns=z", f"client,text,z\na,x,{first}\na,y,{second}\n".encode(), expected)
    for first, second, expected in (
        ("7", SECRET, "row 3: field 'z' must be a number, found another string"),
        ("7", "", "row 3: field 'z' must be a number, found an empty string"),
        ("true", "7.5", "row 3: field 'z' must be a boolean"),
    )
]


@pytest.mark.parametrize(("name", "options", "content", "expected"), CASES)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, name, options, content, expected):
    """TRUST 6, 7, 8: by file and row, and no value of a client is in the message."""
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(f"{path}{options}")
    assert str(path) in message
    assert re.search(expected, message), message


@pytest.mark.parametrize("values", [(1.5, 2**53 + 1), (2**53 + 1, 1.5)])
def test_a_whole_number_that_no_fraction_can_be_beside_is_refused(
    tmp_path, form, values, monkeypatch
):
    """TRUST 7: in two blocks, each of one kind; Arrow's own error would quote it."""
    monkeypatch.setattr(text_tables, "_BLOCK_CHARACTERS", 1)
    if form == "x.parquet":
        pytest.skip("a column has one type")
    path = write(tmp_path, form, [{"client": "a", "text": "x", "z": z} for z in values])
    message = refusal(f"{path}?columns=z")
    assert "'z' must be whole numbers" in message and str(2**53 + 1) not in message


def test_csv_of_spreadsheets(tmp_path):
    """A byte order mark, CRLF, blank lines, spaces around numbers, leading zeros of ids."""
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfclient,text,n\r\n007,"a,\r\nb", 1\r\n\r\n7,, 2.5 \r\n')
    found = jp.data.open(f"{path}?columns=n")
    assert found.client_ids.to_pylist() == ["007", "7"]
    assert found.columns["text"].to_pylist() == ["a,\r\nb", ""]
    assert found.columns["n"].tolist() == [1.0, 2.5]
    path.write_text("client,text,z\na,x,word\na,y,7\na,y,true\na,y,\n")
    assert jp.data.open(f"{path}?columns=z").columns["z"].to_pylist() == ["word", "7", "true", ""]


def test_overlong_rows_are_refused(tmp_path, monkeypatch):
    """TRUST 8: memory is bounded by a stated cap."""
    monkeypatch.setattr(compressed, "MAX_AT_ONCE", 100)
    for name, where in (("x.csv", "line 3"), ("x.jsonl", "row 2")):
        write = FORMATS[name]
        path = tmp_path / name
        path.write_bytes(write([{"client": "a", "text": "x" * 60}]))
        assert len(jp.data.open(path)) == 1
        path.write_bytes(write([{"client": "a", "text": "x" * size} for size in (1, 400, 1)]))
        assert f"{where}: longer than the 100 bytes" in refusal(path)


@pytest.mark.parametrize(
    ("content", "row"),
    [
        (b"," * 2**20, 1),
        (b'"\n",' * 2**18, 1),
        (b"client,text\n" + b"," * 2**20, 2),
        (b"client,text\n" + b'"\n",' * 2**18, 2),
    ],
    ids=["header", "header of many lines", "row", "row of many lines"],
)
def test_no_row_of_csv_is_held_that_is_too_long(tmp_path, content, row, monkeypatch):
    """TRUST 8, 39: some kilobytes of .csv.gz may hold gigabytes of commas."""
    read = []

    class Counting(io.BufferedReader):
        def read1(self, size=-1):
            read.append(super().read1(size))
            return read[-1]

    @contextmanager
    def counted(path):
        with compressed.open_binary(path) as file, Counting(file) as counting:
            yield counting

    monkeypatch.setattr(compressed, "MAX_AT_ONCE", 100)
    monkeypatch.setattr(text_tables, "open_binary", counted)
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(content))
    expected = f"{path}, (row|line) {row}: longer than the 100 bytes of a"
    assert re.match(expected, refusal(path))
    # Of a megabyte.
    assert 0 < sum(map(len, read)) < 100_000


def test_unusual_lines_are_read_like_all_others(tmp_path):
    """TRUST 8: blank lines, a byte order mark, CRLF, ids of two kinds, no last line end.

    NUL, emoji, empty text and 1 MB stay; lone surrogates are replaced.
    """
    texts = ["Inf, NaN", "a\0b", "👩‍🚀 e\u0301", "", "x" * 2**20, "  ", "l\\ud83d r"]
    rows = [{"client": k % 3, "text": text} for k, text in enumerate(texts)]
    path = tmp_path / "x.jsonl"
    plain = lines(rows).replace(b"\\\\ud83d", b"\\ud83d")
    path.write_bytes(plain)
    expected = jp.data.open(path)
    assert expected.columns["text"].to_pylist()[0] == "Inf, NaN"
    assert sorted(expected.columns["text"].to_pylist()) == sorted([*texts[:-1], "l\ufffd r"])
    other = plain.replace(b'"client": 1', b'"client": "1"', 1).replace(b"\n", b" \r\n\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + other.rstrip())
    assert jp.data.open(path).content == expected.content


def test_split_makes_an_example_of_every_sentence(tmp_path):
    texts = ["One. Two e.g. this.\n\nThree\nlines.", " ...", "Four! Five?"]
    rows = [
        {"client": who, "text": text, "year": year}
        for year, (who, text) in enumerate(zip("aba", texts, strict=True), 1)
    ]
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(rows))
    found = jp.data.open(f"{path}?columns=year&split=sentences")
    assert found.client_ids.to_pylist() == ["a", "b"]
    held = ["One.", "Two e.g. this.", "Three lines.", "Four!", "Five?"]
    assert found.examples(0)["text"].to_pylist() == held
    assert found.columns["year"].tolist() == [1, 1, 1, 3, 3]
    # TRUST 7: rows without sentences are checked, too.
    path.write_bytes(lines([*rows, {"client": "a", "text": "", "year": SECRET}]))
    assert "row 4: field 'year' must be a number" in refusal(f"{path}?columns=year&split=sentences")
    path.write_bytes(lines(rows[1:2]))
    assert "has no examples" in refusal(f"{path}?split=sentences")


def test_real_tables_are_read_as_their_readme_says(data_folder, monkeypatch):
    monkeypatch.setenv("JAXPFL_DATA", str(data_folder))
    source = "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz"
    population = jp.data.open(source)
    assert (len(population), population.num_examples) == (17_513, 216_239)
    assert population.sizes().max() == 2_377
    assert np.sum(population.with_min_examples(5).sizes() > 0) == 8_356
    assert population.name == source
    speeches = data_folder / "text_congress_record" / "congress_speeches.jsonl.gz"
    assert len(jp.data.open(f"{speeches}?client=*&split=sentences")) == 789
    assert len(jp.data.open(f"{speeches}?split=sentences")) == 208
    abstracts = data_folder / "public_pubmedqa" / "pubmed_abstracts.jsonl.gz"
    assert len(jp.data.open(f"{abstracts}?split=sentences")) == 1_000


def test_columns_may_have_any_width_of_type(tmp_path):
    columns = {
        "client": pa.array([7, 8], pa.uint16()),
        "text": pa.array([None, "x", "y"]).dictionary_encode()[1:],
        "x": pa.array([1.5, 2.5], pa.float16()),
        "v": pa.array(["p", "q"], pa.string_view()),
    }
    found = jp.data.from_dataframe(pa.table(columns), columns=["x", "v"])
    assert found.client_ids.to_pylist() == ["7", "8"]
    assert found.columns["text"].to_pylist() == ["x", "y"]
    assert found.columns["x"].tolist() == [1.5, 2.5]
    assert found.columns["v"].to_pylist() == ["p", "q"]


VIEWS = pa.array(["a", "b", None], pa.string_view())


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([2**64 - 1, 7], pa.uint64()), [str(2**64 - 1), "7"]),
        (pa.array([2**64 - 1, 7], pa.uint64()).dictionary_encode(), [str(2**64 - 1), "7"]),
        (pa.DictionaryArray.from_arrays([1, 0], VIEWS), ["b", "a"]),
        (pa.DictionaryArray.from_arrays([1, 2], VIEWS), None),
    ],
)
def test_ids_may_be_hashes_and_categories(ids, expected):
    """Those of pandas and polars; one may be missing in the dictionary itself."""
    table = pa.table({"client": ids, "text": ["x", "y"]})
    if expected is None:
        refusals.refusal(lambda: jp.data.from_dataframe(table), "row 2: 'client' no value")
        return
    assert jp.data.from_dataframe(table).client_ids.to_pylist() == expected


@pytest.mark.parametrize("form", ["x.jsonl.gz", "x.csv.gz", "x.parquet"])
def test_rows_that_exceed_memory_together_are_refused(tmp_path, monkeypatch, form):
    monkeypatch.setattr(checks, "machine_memory", lambda: 2**26)
    path = write(tmp_path, form, [{"client": "u", "text": "a" * 100_000}] * 500)
    with pytest.raises(InputError, match=f"{form}: its rows, in memory, would take"):
        jp.data.open(path)


PARTS = [
    {"user": "u0", "title": "A title", "body": "and a body"},
    {"user": "u1", "title": "", "body": "a body alone"},
    {"user": "u0", "title": "a title alone", "body": ""},
    {"user": "u2", "title": "last", "body": "one, of\ntwo lines"},
]
JOINED = ["A title\nand a body", "a title alone", "a body alone", "last\none, of\ntwo lines"]


@pytest.mark.parametrize("missing", ["empty", "null", "absent"])
def test_texts_of_several_columns_are_one_text(tmp_path, form, missing):
    """A row that lacks one of them keeps the others."""
    dropped = form[:6] == "x.json" and missing == "absent"
    rows = [
        {k: v or (None if missing == "null" else "") for k, v in row.items() if v or not dropped}
        for row in PARTS
    ]
    path = write(tmp_path, form, rows)
    for client in ("user", "user|value"):
        found = jp.data.open(f"{path}?client={client}&text=title,body")
        texts = {
            str(name): found.examples(i)["text"].tolist() for i, name in enumerate(found.client_ids)
        }
        assert texts == {"u0": JOINED[:2], "u1": JOINED[2:3], "u2": JOINED[3:]}
    assert jp.data.open(f"{path}?text=body,title", public=True).columns["text"][0].as_py() == (
        "and a body\nA title"
    )


def test_a_row_without_any_of_several_texts_is_refused_or_left_out(tmp_path):
    rows = [*PARTS, {"user": SECRET, "title": None, "body": None}]
    path = write(tmp_path, "x.jsonl", rows)
    message = refusal(f"{path}?client=user&text=title,body")
    assert "row 5: field 'title,body' must be a string, found no value" in message
    found = jp.data.open(f"{path}?client=user&text=title,body&missing=drop")
    assert found.num_examples == 4
    assert "'titel'" in refusal(f"{path}?client=user&text=titel,body&missing=drop")
    rows[1] = {**rows[1], "title": 3}
    message = refusal(f"{write(tmp_path, 'x.jsonl', rows)}?client=user&text=title,body")
    assert "row 2: field 'title' must be a string, found int" in message
    with pytest.raises(InputError, match="must be different"):
        jp.data.open(f"{path}?client=user&text=title,title")


def test_several_text_columns_of_a_frame():
    frame = pa.Table.from_pylist([{**row, "title": row["title"] or None} for row in PARTS])
    for given in (frame, frame.to_pandas()):
        found = jp.data.from_dataframe(given, client="user", text=["title", "body"])
        assert found.columns["text"].to_pylist() == JOINED


def test_names_with_commas_are_one_name_and_never_that_of_joined_texts(tmp_path):
    (tmp_path / "x.csv").write_text(f'"a,b",a,b\nu,{SECRET},y\n')
    source = f"{tmp_path / 'x.csv'}?"
    for client in ("a,b", "a%2Cb", "a,b|value"):
        found = jp.data.open(f"{source}client={client}&text=b")
        assert found.client_ids.to_pylist() == ["u"]
        assert "'a,b' names the joined texts" in refusal(f"{source}client={client}&text=a,b")
    assert "'a,b' names" in refusal(f"{source}client=*&label=a,b&text=a,b")
    found = jp.data.open(f"{source}client=*&text=a%2cb,b")
    assert found.columns["text"].to_pylist() == ["u\ny"]
    assert jp.data.open(f"{source}client=b&text=a%2Cb").columns["text"].to_pylist() == ["u"]


@pytest.mark.parametrize("given", [None, ""])
def test_one_of_several_text_columns_may_have_no_value(tmp_path, form, given):
    rows = [{"client": "u", "a": "x", "b": given}, {"client": "u", "a": "y", "b": given}]
    found = jp.data.open(f"{write(tmp_path, form, rows)}?text=a,b")
    assert found.columns["text"].to_pylist() == ["x", "y"]
