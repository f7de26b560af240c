"""Tables as other tools write them: line ends, JSON arrays, parts of fields, partitions."""

import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from jaxpfl.data.open import streamed
from jaxpfl.data.readers import compressed, text_tables
from tests.refusals import refusal

ROWS = [{"client": "a", "text": "x, y"}, {"client": "b", "text": "é [{]}"}]
CSV = 'client,text\na,"x, y"\nb,é [{]}\n'
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def texts(source, **options):
    found = jp.data.open(source, **options)
    return [text.as_py() for text in found.columns["text"]]


def expect_rows(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith(".gz") else content)
    assert texts(path) == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    "content",
    [
        CSV.replace("\n", "\r"),
        "\ufeff" + CSV.replace("\n", "\r"),
        CSV.replace("\n", "\r").encode("utf-16"),
        CSV.replace("\n", "\r", 1),
        "\r\r" + CSV.replace("\n", "\r\r"),
        CSV.replace(",", "\t", 1).replace("a,", "a\t").replace("b,", "b\t").replace("\n", "\r"),
        "sep=,\n" + CSV,
        "SEP=,\r\n" + CSV.replace("\n", "\r\n"),
        '"sep=,"\n' + CSV,
        "\ufeffsep=,\r" + CSV.replace("\n", "\r"),
        "sep=;\n" + CSV.replace(",", ";").replace("x;", "x,"),
        "sep=~\n" + CSV.replace(",", "~").replace("x~", "x,"),
        ("sep=\t\n" + CSV.replace(",", "\t").replace("x\t", "x,")).encode("utf-16"),
    ],
    ids=ascii,
)
def test_lines_of_old_macs_and_a_line_that_names_the_separator(tmp_path, content):
    expect_rows(tmp_path / "t.csv", content)


def test_a_line_that_names_the_separator_is_not_counted(tmp_path):
    (tmp_path / "t.csv").write_text("sep=;\nclient;text\na;x\n;y\n")
    refusal(lambda: jp.data.open(tmp_path / "t.csv"), "row 3: 'client'")


def test_carriage_returns_inside_of_quotes_stay(tmp_path):
    (tmp_path / "t.csv").write_bytes(b'client,text\ra,"x\ry\r\nz"\rb,""\r')
    assert texts(tmp_path / "t.csv") == ["x\ry\r\nz", ""]
    (tmp_path / "t.jsonl").write_bytes(LINES.encode().replace(b"\n", b"\r"))
    assert texts(tmp_path / "t.jsonl") == [row["text"] for row in ROWS]
    (tmp_path / "t.txt").write_bytes(b"one\rtwo\r\rthree\r")
    assert texts(tmp_path / "t.txt") == ["one two", "three"]


@pytest.mark.parametrize(
    "name",
    ["T.CSV", "t.Csv", "t.CSV.GZ", "t.csv.Gz", "t.JSONL", "t.NDJSON", "t.ndjson.gz", "t.Json"],
)
def test_endings_in_letters_of_any_case(tmp_path, name):
    expect_rows(tmp_path / name, CSV if "csv" in name.lower() else LINES)
    (tmp_path / "about.json").write_text("no rows")
    if not name.endswith("Json"):
        assert texts(f"{tmp_path}?client=client") == texts(tmp_path / name)


def test_other_endings_in_letters_of_any_case(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.PARQUET")
    assert texts(tmp_path / "t.PARQUET") == [row["text"] for row in ROWS]
    (tmp_path / "t.TSV").write_text("client\ttext\na\tx, y\n")
    assert texts(tmp_path / "t.TSV") == ["x, y"]
    (tmp_path / "t.TXT.GZ").write_bytes(gzip.compress(b"one"))
    assert texts(tmp_path / "t.TXT.GZ") == ["one"]


ARRAYS = [
    json.dumps(ROWS),
    json.dumps(ROWS, indent=4, ensure_ascii=False),
    json.dumps(ROWS, indent=1).replace("\n", "\r\n"),
    "\ufeff \n\n[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n\n",
    json.dumps(ROWS, ensure_ascii=False).encode("utf-16"),
    json.dumps([{**row, "more": [{"]": "["}]} for row in ROWS]),
]


@pytest.mark.parametrize("content", ARRAYS, ids=ascii)
@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.jsonl", "t.ndjson"])
@pytest.mark.parametrize("piece", [2**20, 7, 1])
def test_arrays_of_objects(tmp_path, content, name, piece, monkeypatch):
    """However the pieces fall that they are read in."""
    monkeypatch.setattr(text_tables, "_PIECE", piece)
    expect_rows(tmp_path / name, content)


CLIENT = '{"client": "canary", "text": "canary"}'
BAD_ARRAYS = [
    ("[]", "has no examples"),
    (" [ \n ]", "has no examples"),
    ("[" + CLIENT, "row 2: truncated"),
    ("[" + CLIENT + ",", "row 2: truncated"),
    ("[" + CLIENT + ', {"cli', "row 2: truncated"),
    ("[" + CLIENT + ",]", "row 2: not valid JSON"),
    ("[" + CLIENT + CLIENT + "]", "row 2:"),
    ("[" + CLIENT + " " + CLIENT, "row 2: comma"),
    ("[," + CLIENT + "]", "row 1:"),
    ("[" + CLIENT + "] " + CLIENT, "nothing behind its array"),
    ("[" + CLIENT + "]]", "nothing behind its array"),
    ("[" + CLIENT + ', ["canary"]]', "row 2: found list"),
    ("[" + CLIENT + ", null]", "row 2: found NoneType"),
    ("[[" + CLIENT + "]]", "row 1: found list"),
    ("[" + CLIENT + ', {"client": NaN, "text": "canary"}]', "row 2: without NaN"),
    ("[" + CLIENT + ', {"client": "b", "client": "canary", "text": ""}]', "row 2: twice"),
    ("[" + CLIENT + ', {"client": "b"}]', "row 2: 'text'"),
    ("[" + CLIENT + ', {"client": "b", "text": 5}]', "row 2: 'text' found int"),
    (b"[" + CLIENT.encode() + b', "\xff"]', "byte not valid UTF-8"),
]


@pytest.mark.parametrize(("content", "words"), BAD_ARRAYS, ids=ascii)
@pytest.mark.parametrize("piece", [2**20, 3])
def test_an_array_that_is_none_is_refused_by_row(tmp_path, content, words, piece, monkeypatch):
    monkeypatch.setattr(text_tables, "_PIECE", piece)
    path = tmp_path / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert "canary" not in refusal(lambda: jp.data.open(path), f"t.json {words}")


def test_an_element_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_tables, "_PIECE", 10)
    monkeypatch.setattr(compressed, "MAX_AT_ONCE", 100)
    path = tmp_path / "t.json"
    path.write_text(json.dumps([*ROWS, {"client": "c", "text": "x" * 500}]))
    refusal(lambda: jp.data.open(path), "row 3:")


@pytest.mark.parametrize(
    "line",
    [
        '{"client": "a", "client": "canary", "text": "x"}',
        '{"client": "a", "text": "canary", "text": "x"}',
        '{"client": "a", "text": "x", "z": 1, "z": 1}',
        '{"client": "a", "text": "x", "z": {"k": "canary", "k": 1}}',
        '{"client": "a", "text": "x", "z": [{"k": 1, "\\u006b": 2}]}',
    ],
)
def test_a_key_twice_in_a_line_is_refused(tmp_path, line):
    (tmp_path / "t.jsonl").write_text(f"{LINES}{line}\n")
    assert "canary" not in refusal(lambda: jp.data.open(tmp_path / "t.jsonl"), "row 3: twice")


PARTS = [
    {"who": {"id": 7, "x": None}, "meta": {"deep": {"text": "one"}}, "a.b": "p"},
    {"who": {"id": 8, "x": None}, "meta": {"deep": {"text": "two"}}, "a.b": "q"},
]


def forms(folder, rows):
    """The rows of a table in every form that may have fields inside of fields."""
    pd, pl, datasets = map(pytest.importorskip, ("pandas", "polars", "datasets"))
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    return [
        *(folder / f"t.{form}" for form in ("jsonl", "json", "parquet")),
        pa.Table.from_pylist(rows),
        pd.DataFrame(rows),
        pl.DataFrame(rows),
        datasets.Dataset.from_list(rows),
        datasets.IterableDataset.from_generator(lambda: iter(rows)),
        {name: [row[name] for row in rows] for name in rows[0]},
    ]


def opened(form, **options):
    if not isinstance(form, os.PathLike):
        return jp.data.from_dataframe(form, **options)
    query = "&".join(
        f"{name}={value if isinstance(value, str) else ','.join(value)}"
        for name, value in options.items()
    )
    return jp.data.open(f"{form}?{query}")


def test_a_field_inside_of_a_field(tmp_path):
    for form in forms(tmp_path, PARTS):
        found = opened(form, client="who.id", text="meta.deep.text", columns=["a.b"])
        assert found.client_ids.to_pylist() == ["7", "8"]
        assert found.columns["text"].to_pylist() == ["one", "two"]
        assert found.columns["a.b"].to_pylist() == ["p", "q"]
        found = opened(form, client="who.id", text=["a.b", "meta.deep.text"])
        assert found.columns["text"].to_pylist() == ["p\none", "q\ntwo"]
        for wrong in ("meta.text", "meta.deep", "a.b.c", "mata.text"):
            refusal(lambda w=wrong, f=form: opened(f, client="who.id", text=w), f"'{wrong}'")


def test_a_row_that_lacks_the_outer_field(tmp_path):
    rows = [{"client": "a", "meta": {"text": "x"}}, {"client": "b", "meta": None}]
    for form in forms(tmp_path, rows):
        refusal(lambda f=form: opened(f, text="meta.text"), "row 2: 'meta.text'")
    for name in ("t.jsonl", "t.json", "t.parquet"):
        assert texts(f"{tmp_path / name}?text=meta.text&missing=drop") == ["x"]


def message(role, content):
    return {"role": role, "content": content}


CHATS = [
    {"client": "a", "messages": [message("user", "Hi."), message("assistant", "Yes?\nGo on.")]},
    {"client": "a", "messages": [message("system", ""), message("user", "x")]},
    {"client": "b", "messages": [message("user", "y"), message("assistant", None)]},
]


def test_a_conversation_is_one_text(tmp_path):
    """The contents of its messages in their order, without the roles."""
    for form in forms(tmp_path, CHATS):
        found = opened(form, text="messages")
        assert found.columns["text"].to_pylist() == ["Hi.\nYes?\nGo on.", "x", "y"]
    for name in ("t.jsonl", "t.parquet"):
        assert len(texts(f"{tmp_path / name}?client=client|value&text=messages")) == 3
    nested = [{"client": "a", "body": {"chat": CHATS[0]["messages"]}}]
    for form in forms(tmp_path, nested):
        found = opened(form, text="body.chat")
        assert found.columns["text"].to_pylist() == ["Hi.\nYes?\nGo on."]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "text": "canary"}],
        [{"role": "user", "content": [{"type": "text", "text": "canary"}]}],
        ["canary", "canary"],
        [{"role": "user", "content": 5}],
    ],
)
def test_lists_that_are_no_conversation_are_refused(tmp_path, messages):
    rows = [{"client": "a", "messages": messages}]
    for form in forms(tmp_path, rows):
        said = refusal(lambda f=form: opened(f, text="messages"), "row 1: 'messages' list")
        assert "canary" not in said


def test_partitions_of_hive_are_fields(tmp_path):
    pd = pytest.importorskip("pandas")
    users, labels = ["ann", "bob", "ann", "50% /:"], [1, 0, 0, 1]
    frame = pd.DataFrame({"u": users, "y": labels, "x": [0.5, 1.5, 2.5, 3.5]})
    frame.to_parquet(tmp_path / "hive", partition_cols=["u", "y"])
    expected = {(u, y, x) for u, y, x in frame.itertuples(index=False)}
    for source in (
        f"{tmp_path}/hive",
        f"{tmp_path}/hive/u=*/*/*.parquet",
        f"{tmp_path}/**/*.parquet",
    ):
        found = jp.data.open(f"{source}?client=u&label=y&features=x")
        rows = set()
        for index, id_ in enumerate(found.client_ids.to_pylist()):
            held = found.examples(index)
            pairs = zip(held["label"].tolist(), held["features"][:, 0].tolist(), strict=True)
            rows |= {(id_, *pair) for pair in pairs}
        assert rows == expected
    found = jp.data.open(f"{tmp_path}/hive?client=u&label=y&features=x&classes=1,0")
    assert found.columns["label"].sum() == 2
    refusal(lambda: jp.data.open(f"{tmp_path}/hive?client=v&features=x"), "no field 'v'")
    with streamed(f"{tmp_path}/hive?client=u&features=x")(tmp_path) as stream:
        assert sorted(i for batch in stream.batches for i in batch.client_ids) == sorted(set(users))


@pytest.mark.parametrize("name", ["p.csv", "p.jsonl", "p.parquet"])
def test_a_field_of_a_folder_and_of_its_file_is_refused_without_its_value(tmp_path, name):
    """The file's own ids would be merged to one."""
    folder = tmp_path / "hive" / "u=ann@example.org"
    folder.mkdir(parents=True)
    frame = pytest.importorskip("pandas").DataFrame({"u": ["bob", "carl"], "x": [1, 2]})
    text = {
        "p.csv": frame.to_csv(index=False),
        "p.jsonl": frame.to_json(orient="records", lines=True),
    }
    if name in text:
        (folder / name).write_text(text[name])
    else:
        frame.to_parquet(folder / name)
    said = refusal(lambda: jp.data.open(f"{tmp_path}/hive?client=u&features=x"), "folder's name")
    assert "ann@" not in said


def test_partitions_of_other_formats_and_without_a_value(tmp_path):
    for user, text in (("a%20b", "x"), ("__HIVE_DEFAULT_PARTITION__", "y"), ("7", "z")):
        folder = tmp_path / f"u={user}" / "day=2020-01-31"
        folder.mkdir(parents=True)
        (folder / "part-0.csv").write_text(f"text\n{text}\n")
    source = f"{tmp_path}?client=u&columns=day"
    refusal(lambda: jp.data.open(f"{source}&text=text"), "file row 2: 'u' an empty string")
    found = jp.data.open(f"{source}&text=text&missing=drop")
    assert sorted(found.client_ids.to_pylist()) == ["7", "a b"]
    assert found.columns["day"].to_pylist() == ["2020-01-31"] * 2
    (tmp_path / "u=7" / "day=2020-01-31" / "part-1.csv").write_text("text\nw\n")
    (tmp_path / "u=1.0").mkdir()
    (tmp_path / "u=1.0" / "part-0.csv").write_text("text\nx\n")
    refusal(lambda: jp.data.open(f"{tmp_path}?client=u&missing=drop"), "file row 2: 'u' 1.0")


def test_signs_in_paths_mean_themselves_but_the_star(tmp_path):
    for folder in ("[x]", "a?b", "{c}", "(d) e", "x.csv", "x.csv/y.csv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part[1].csv").write_text("client,text\na,x\n")
        (tmp_path / folder / "~$part.csv").write_text("no table")
    for folder in ("[x]", "{c}", "(d) e", "x.csv/y.csv"):
        for name in ("part[1].csv", "*.csv", "part[1*.csv"):
            assert texts(f"{tmp_path / folder / name}") == ["x"]
    assert texts(f"{tmp_path}/x.csv?client=client") == ["x", "x"]
    # What fits is read once, a folder as its shards.
    assert texts(f"{tmp_path}/*.csv") == ["x", "x"]
    assert texts(f"{tmp_path}/x.csv/*.csv") == ["x", "x"]
    every = texts(f"{tmp_path}?client=client")
    assert len(every) == len(texts(f"{tmp_path}/**/*.csv")) == 6
    refusal(lambda: jp.data.open(f"{tmp_path}/[y]/*.csv"), "no such file")


def test_a_stream_of_rows_that_are_not_all_alike():
    datasets = pytest.importorskip("datasets")

    def opened(*rows, **options):
        frame = datasets.IterableDataset.from_generator(lambda: iter(rows))
        return jp.data.from_dataframe(frame, **options)

    row = {"client": "a", "text": "x"}
    refusal(lambda: opened(row, {**row, "text": None}), "row 2: 'text' no value")
    refusal(lambda: opened({**row, "text": None}, row), "row 1: 'text' no value")
    refusal(lambda: opened(row, {**row, "client": None}), "row 2: 'client' no value")
    refusal(lambda: opened(row, None), "row 2: found NoneType")
    refusal(lambda: opened(row, {"client": "a"}), "row 2: 'text'")
    refusal(lambda: opened(row, {**row, "text": 7}), "row 2: 'text' found int")
    assert opened(row, {**row, "client": 7}).client_ids.to_pylist() == ["a", "7"]
    mixed = opened({**row, "z": 1}, {**row, "z": 1.5}, columns=["z"])
    assert mixed.columns["z"].tolist() == [1, 1.5]
    joined = opened({**row, "t": None}, {**row, "t": "y"}, text=["text", "t"])
    assert joined.columns["text"].to_pylist() == ["x", "x\ny"]


def test_a_dictionary_of_columns(tmp_path):
    columns = {
        "client": np.array([1, 2, 1]),
        "y": pa.array([0, 1, 0]),
        "x": np.arange(6.0).reshape(3, 2),
        "unread": None,
    }
    found = jp.data.from_dataframe(columns, label="y", features=["x"])
    assert found.client_ids.to_pylist() == ["1", "2"]
    np.testing.assert_array_equal(found.columns["features"], [[0, 1], [4, 5], [2, 3]])
    for wrong, words in (
        ({"y": [0]}, "one length"),
        ({"y": 5}, "'y' found int"),
        ({"y": "canary"}, "'y' found str"),
        ({"y": [0, None, 1]}, "row 2: 'y' no value"),
    ):
        given = {**columns, **wrong}
        call = lambda g=given: jp.data.from_dataframe(g, label="y", features=["x"])  # noqa: E731
        assert "canary" not in refusal(call, words)
    by_client = {"canary": [1], "canary 2": [2]}
    said = refusal(
        lambda: jp.data.from_dataframe(by_client, text="t"), "'client', 't' from_clients"
    )
    assert "canary" not in said


@pytest.mark.parametrize("number", [16777217, -16777217, 16777217.0, 2**53 + 1, 2**63 - 1])
@pytest.mark.parametrize("in_list", [False, True])
def test_a_whole_number_that_float32_makes_another(tmp_path, number, in_list):
    right, wrong = ([[1, 2**24], [1, number]]) if in_list else (2**24, number)
    rows = [{"client": "a", "y": 0, "x": x} for x in (right, right, wrong)]
    paths = [tmp_path / "t.jsonl", tmp_path / "t.parquet"]
    paths[0].write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = type(number) if not in_list else None
    if kind is float or (in_list and isinstance(number, float)):
        floats = [float, lambda x: list(map(float, x))][in_list]
        rows = [{**row, "x": floats(row["x"])} for row in rows]
    parquet.write_table(pa.Table.from_pylist(rows), paths[1])
    for path in paths:
        refusal(lambda p=path: jp.data.open(f"{p}?label=y&features=x"), "row 3: 'x' float32")
        rows_read = jp.data.open(f"{path}?label=y&columns=x").columns["x"]
        assert rows_read.dtype in (np.int64, np.float64)
    if not in_list:
        lines = [f"a,0,{row['x']}" for row in rows]
        (tmp_path / "t.csv").write_text("\n".join(["client,y,x", *lines]))
        call = lambda: jp.data.open(f"{tmp_path}/t.csv?label=y&features=x")  # noqa: E731
        refusal(call, "row 4: 'x' float32")
    frame = pa.Table.from_pylist([{"client": "a", "y": 0, "x": x} for x in (0.1, 1e20, 16777217.5)])
    assert len(jp.data.from_dataframe(frame, label="y", features=["x"]).columns["features"]) == 3


@pytest.mark.parametrize("wrong", [[1.0, None], [None, None], [1.0, float("nan")], []])
def test_a_list_without_some_of_its_values(tmp_path, wrong):
    rows = [{"client": "a", "x": [1.0, 2.0]}, {"client": "b", "x": wrong}]
    # A NaN is none in JSON.
    texts = 2 if wrong and wrong[1] != wrong[1] else 0
    for form in forms(tmp_path, rows)[texts:]:
        refusal(lambda f=form: opened(f, features="x"), "row 2: 'x' list")
