"""Files as people have them: separators, encodings, several files at once, saved data sets."""

import csv
import gzip
import io
import re

import numpy as np
import pytest

import jaxpfl as jp
from jaxpfl.data.open import why_missing
from jaxpfl.errors import CorruptFile, InputError
from jaxpfl.experiments.own_table import init
from tests.refusals import refusal

ROWS = [("u1", 'grüße; "you", x\ty'), ("u2", "two\nlines"), ("u1", "z")]
COLUMNS = "client=user&text=said"


def table(separator: str = ",", encoding: str = "utf-8", name: str = "x.csv") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator)
    writer.writerows([("user", "said"), *ROWS])
    content = file.getvalue().encode(encoding)
    return gzip.compress(content) if name.endswith(".gz") else content


def texts(source: str) -> list[str]:
    return [str(text) for text in jp.data.open(source).columns["text"]]


@pytest.fixture
def expected(tmp_path) -> list[str]:
    (tmp_path / "plain.csv").write_bytes(table())
    found = texts(f"{tmp_path / 'plain.csv'}?{COLUMNS}")
    assert sorted(found) == sorted(text for _, text in ROWS)
    return found


@pytest.mark.parametrize(
    ("name", "separator", "encoding", "option"),
    [
        ("x.csv", ";", "utf-8", ""),
        ("x.csv", "\t", "utf-8-sig", ""),
        ("x.csv", "|", "utf-8", ""),
        ("x.tsv", "\t", "utf-8", ""),
        ("x.tsv.gz", "\t", "utf-16", ""),
        ("x.csv", ",", "utf-16", ""),
        ("x.csv.gz", ";", "cp1252", "&encoding=cp1252"),
        ("x.csv", ",", "utf-32-be", "&encoding=utf-32-be"),
    ],
)
def test_separators_and_encodings(tmp_path, expected, name, separator, encoding, option):
    (tmp_path / name).write_bytes(table(separator, encoding, name))
    source = f"{tmp_path / name}?{COLUMNS}{option}"
    assert texts(source) == expected
    assert why_missing(source) == ""


def test_other_texts_have_encodings_too(tmp_path):
    lines = '{"client": "a", "text": "é"}\n{"client": "b", "text": "ü"}\n'
    (tmp_path / "x.jsonl").write_bytes(lines.encode("utf-16"))
    assert texts(str(tmp_path / "x.jsonl")) == ["é", "ü"]
    (tmp_path / "x.txt").write_bytes("é one\n\nü two".encode("latin-1"))
    assert texts(f"{tmp_path / 'x.txt'}?encoding=latin-1") == ["é one", "ü two"]


@pytest.mark.parametrize(
    ("content", "option", "said"),
    [
        (table(encoding="latin-1"), "", r"line 2: byte \d+ is not valid UTF-8.*encoding=latin-1"),
        (table(encoding="utf-16")[:-3], "", "not valid utf-16"),
        (table(encoding="latin-1"), "&encoding=ascii", "not valid ascii"),
        (table(), "&encoding=klingon", "encoding must be one that Python knows"),
        (table(), "&encoding=hex", "encoding must be one that Python knows"),
        (table("~"), "", "there is no field 'user'"),
        (table(encoding="utf-16-le"), "", r"zero bytes.*write .*x\.csv\?encoding=utf-16-le"),
        (table("|").replace(b"user", b"us"), "", "no field 'user', found 'us', 'said'"),
    ],
)
def test_what_is_not_the_encoding_is_refused(tmp_path, content, option, said):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(InputError, match=said) as refused:
        jp.data.open(f"{tmp_path / 'x.csv'}?{COLUMNS}{option}")
    error = refused.value
    assert error.__context__ is None or error.__suppress_context__
    assert "gr" not in str(error).replace("grouped", "")


def test_a_path_with_a_star_is_all_files_that_it_fits(tmp_path):
    (tmp_path / "2025").mkdir()
    for blank, place in enumerate(("a.csv", "b.csv", "2025/c.csv")):
        (tmp_path / place).write_bytes(table(";") + b"\n" * blank)
    (tmp_path / "a.txt").write_text("not a table")
    for pattern, files in (("*.csv", 2), ("**/*.csv", 3), ("2025/*", 0), ("*/c.csv", 1)):
        source = f"{tmp_path / pattern}?{COLUMNS}"
        if not files:
            with pytest.raises(InputError, match="ending in"):
                jp.data.open(source)
            continue
        clients = jp.data.open(source)
        assert (len(clients), clients.num_examples) == (2, 3 * files)
        assert why_missing(source) == ""
    assert why_missing(f"{tmp_path / 'z*.csv'}?{COLUMNS}")
    with pytest.raises(InputError, match="one file, found several"):
        jp.data.open(f"{tmp_path / '*.csv'}?client=*&text=said")
    for client in ("", "&client=*"):
        rows = jp.data.open(f"{tmp_path / '*.csv'}?text=said{client}", public=True)
        assert sorted(rows.columns["text"].to_pylist()) == sorted(2 * [text for _, text in ROWS])


def test_a_config_can_be_made_for_several_files(tmp_path):
    rows = "".join(f"u{number % 30};some words\n" for number in range(60))
    for name, end in (("a.csv", ""), ("b.csv", "\n")):
        (tmp_path / name).write_text(f"user;said\n{rows}{end}")
    for file in (tmp_path, tmp_path / "*.csv"):
        assert "clients: 30 " in init(str(file), client="user", text="said")
    with pytest.raises(InputError, match=re.escape("?client=FIELD")):
        init(str(tmp_path))
    latin = tmp_path / "latin.csv"
    latin.write_bytes(f"user;said\n{rows}u0;é\n".encode("latin-1"))
    config = init(f"{latin}?encoding=latin-1", client="user", text="said")
    assert f'source: "{latin}?encoding=latin-1&client=user&text=said"' in config


def test_saved_data_sets_keep_the_rows_that_were_selected(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_dict({"user": ["a", "b", "a"], "said": ["x", "y", "z"]})
    chosen = whole.filter(lambda row: row["user"] == "a")
    chosen.save_to_disk(tmp_path / "saved")
    assert texts(f"{tmp_path / 'saved'}?{COLUMNS}") == ["x", "z"]
    parts = datasets.DatasetDict({"train": chosen, "test": whole})
    parts.save_to_disk(tmp_path / "parts")
    assert texts(f"{tmp_path / 'parts' / 'train'}?{COLUMNS}") == ["x", "z"]
    with pytest.raises(InputError, match="'train', 'test', expected one: .*parts/PART"):
        jp.data.open(f"{tmp_path / 'parts'}?{COLUMNS}")
    with pytest.raises(InputError, match="'train', 'test', expected one"):
        jp.data.from_dataframe(parts, client="user", text="said")
    streamed = whole.to_iterable_dataset(), datasets.IterableDataset.from_generator(lambda: whole)
    for rows in streamed:
        assert len(jp.data.from_dataframe(rows, client="user", text="said")) == 2
        with pytest.raises(InputError, match="no field 'text', found 'user', 'said'"):
            jp.data.from_dataframe(rows, client="user")
    for shard in (tmp_path / "saved").glob("*.arrow"):
        shard.write_bytes(shard.read_bytes()[:100])
    refusal(lambda: jp.data.open(f"{tmp_path / 'saved'}?{COLUMNS}"), "saved", CorruptFile)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
def test_rows_without_a_value_can_be_left_out(tmp_path, name, monkeypatch, capsys):
    """Only the rows that lack a value of a field that is read; how many is PRIVATE."""
    pd = pytest.importorskip("pandas")
    users, said = ["a", None, "b", "a"], ["x", "y", None, "z"]
    rows = pd.DataFrame({"user": users, "said": said, "age": [1.5, 2, 3, None], "other": None})
    path = tmp_path / name
    if name == "x.jsonl":
        path.write_text(rows.to_json(orient="records", lines=True).replace('"user":null,', ""))
    else:
        (rows.to_csv if name == "x.csv" else rows.to_parquet)(path, index=False)
    for rule in ("user", "user|value"):
        source = f"{path}?client={rule}&text=said&missing=drop"
        found = jp.data.open(source)
        assert (texts(source), found.client_ids.to_pylist()) == (["x", "z"], ["a"])
        assert found.dropped == found.split({"a": 1.0}, seed=0)["a"].dropped == 2
    assert texts(f"{source}&columns=age") == ["x"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    jp.data.open(source)
    assert capsys.readouterr().err.startswith("2 rows lack a value")
    with pytest.raises(InputError, match="missing=drop leaves such rows out"):
        jp.data.open(f"{path}?client=*&text=said&columns=age")
    with pytest.raises(InputError, match="has no (examples|rows)"):
        jp.data.open(f"{path}?client=other&text=said&missing=drop")


def test_sheets_of_excel_are_tables(tmp_path):
    pd = pytest.importorskip("pandas")
    (tmp_path / "x.xlsx").write_bytes(b"no sheet")
    with pytest.raises(InputError, match="pip install pandas openpyxl|no Excel file"):
        jp.data.open(tmp_path / "x.xlsx")
    # What libraries take for missing cells are texts, and one is somebody's name.
    cells = "None", "NA", "N/A", "null", "NaN", "#N/A"
    rows = [("user", "said"), (1, "x"), *(("Null", cell) for cell in cells), (float("nan"), "z")]
    sheet = pd.DataFrame(rows, dtype=object)
    pytest.importorskip("openpyxl")
    sheet.to_excel(tmp_path / "x.xlsx", header=False, index=False)
    source = f"{tmp_path / 'x.xlsx'}?{COLUMNS}"
    refusal(lambda: jp.data.open(source), "row 9: field 'user'")
    clients = jp.data.open(f"{source}&missing=drop")
    assert clients.client_ids.to_pylist() == ["1", "Null"]
    # The last is written as an error of Excel's, which is no value.
    assert clients.columns["text"].to_pylist() == ["x", *cells[:-1]]


def test_a_folder_of_images_by_client(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (4, 6, 5, 3), np.uint8)
    for place, values in zip(("b/cat/1", "b/dog/2", "a/dog/1", "c/.x"), pixels, strict=True):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(values).save(tmp_path / f"{place}.png")
    found = jp.data.open(f"{tmp_path}?classes=cat,dog")
    assert found.client_ids.to_pylist() == ["a", "b", "c"]
    assert found.sizes().tolist() == [1, 2, 0]
    np.testing.assert_array_equal(found.columns["image"], pixels[[2, 0, 1]])
    np.testing.assert_array_equal(found.columns["label"], [1, 0, 1])
    assert why_missing(f"{tmp_path}?classes=cat,dog") == ""
    image.fromarray(pixels[0, :3, :, 0]).save(tmp_path / "a" / "dog" / "2.jpg")
    scaled = jp.data.open(f"{tmp_path}?classes=cat,dog&size=4&channels=1")
    assert scaled.columns["image"].shape == (4, 4, 4, 1)
    for options, said in (
        ("", "image 1: expected CLIENT/IMAGE, or .*, found none"),
        ("?classes=cat", "image 1: .* found cat"),
        ("?classes=cat,dog", r"image 2: is \[3, 5, 1\].*\?size=32&channels=3"),
        ("?channels=2", "1 .grey. or 3 .colour."),
    ):
        with pytest.raises(InputError, match=said):
            jp.data.open(f"{tmp_path}{options}")
    with pytest.raises(InputError, match="found image, label"):
        init(f"{tmp_path}?classes=cat,dog&size=4&channels=1")
    cut = (tmp_path / "a/dog/1.png").read_bytes()[:60]
    (tmp_path / "a/dog/1.png").write_bytes(cut)
    refusal(lambda: jp.data.open(f"{tmp_path}?classes=cat,dog"), "image 1: truncated", CorruptFile)
