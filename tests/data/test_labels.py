"""Labels of a table: whole numbers however they are written, and words of a public list."""

import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml

import jaxpfl as jp
from jaxpfl.cli import main
from jaxpfl.data.open import streamed
from jaxpfl.experiments.own_table import init
from tests.refusals import refusal

WORDS = ["spam", "ham", "ham"]
NUMBERS = {
    "whole floats": pa.array([1.0, 0.0, 2.0]),
    "float32": pa.array([1, 0, 2], pa.float32()),
    "decimals": pa.array([decimal.Decimal(x) for x in (1, 0, 2)]),
    "uint64": pa.array([1, 0, 2], pa.uint64()),
    "categories": pa.array([1, 0, 2]).dictionary_encode(),
    "categories of floats": pa.array([1.0, 0.0, 2.0]).dictionary_encode(),
}


def table(labels):
    return pa.table({"client": ["a", "b", "c"], "y": labels, "x": [1.0, 2.0, 3.0]})


def labels_of(frame, **options):
    found = jp.data.from_dataframe(frame, label="y", features=["x"], **options)
    assert found.columns["label"].dtype == np.int32
    return found.columns["label"].tolist()


@pytest.mark.parametrize("labels", NUMBERS.values(), ids=NUMBERS)
def test_whole_numbers_of_any_type(labels):
    assert labels_of(table(labels)) == [1, 0, 2]


@pytest.mark.parametrize("labels", [[True, False, True], ["x", "y", "x"]])
def test_categories_of_booleans_and_words(labels):
    pd = pytest.importorskip("pandas")
    frame = table(labels).to_pandas()
    frame["y"] = pd.Categorical(labels)
    if labels[0] is True:
        assert labels_of(frame) == [1, 0, 1]
    assert labels_of(frame, classes=["y", "x", "false", "true"])[0] in (1, 3)


@pytest.mark.parametrize("bad", [0.5, -1.0, float("nan"), float("inf"), 2.0**31, -0.5])
def test_other_numbers_are_refused_by_row(bad, tmp_path):
    frame = table([0.0, bad, 1.0])
    refusal(lambda: labels_of(frame), "row 2: 'y'")
    parquet.write_table(frame, tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text(f"client,y,x\na,0,1\nb,{bad},2\n")
    for name in ("t.parquet", "t.csv"):
        row = "row 3:" if "csv" in name else "row 2:"
        refusal(lambda n=name: jp.data.open(f"{tmp_path / n}?label=y&features=x"), f"{row} 'y'")


def write(folder, form, labels):
    path = folder / f"t.{form}"
    rows = [{"client": c, "y": y, "x": 1.5} for c, y in zip("abc", labels, strict=True)]
    if form == "csv":
        lines = [f"{row['client']},{row['y']},1.5" for row in rows]
        path.write_text("\n".join(["client,y,x", *lines]))
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (WORDS, "ham,spam", [1, 0, 0]),
        (WORDS, "spam,other,ham", [0, 2, 2]),
        (["yes", " no ", "yes"], "no,yes", [1, 0, 1]),
        ([5, 1, 3], "1,2,3,4,5", [4, 0, 2]),
        (["1", "0", "1"], "0,1", [1, 0, 1]),
        (["a,b", "c", "c"], "a%2Cb,c", [0, 1, 1]),
        (["Über", "c", "c"], "c,Über", [1, 0, 0]),
    ],
)
def test_words_are_numbered_as_the_list_says(tmp_path, form, labels, classes, expected):
    if form == "csv" and "a,b" in labels:
        labels = ['"a,b"', "c", "c"]
    path = write(tmp_path, form, labels)
    for client in ("client", "client|value"):
        source = f"{path}?client={client}&label=y&features=x&classes={classes}"
        found = jp.data.open(source)
        by_id = dict(zip(found.client_ids.to_pylist(), found.columns["label"], strict=True))
        assert [by_id[id_] for id_ in "abc"] == expected
    with streamed(source)(tmp_path) as stream:
        assert next(stream.batches).columns["label"].dtype == np.int32


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_another_word_is_refused_without_it(tmp_path, form):
    path = write(tmp_path, form, ["spam", "canary", "ham"])
    row = "row 3:" if form == "csv" else "row 2:"
    said = refusal(
        lambda: jp.data.open(f"{path}?label=y&features=x&classes=ham,spam"), f"{row} 'y' classes"
    )
    assert "canary" not in said
    # Without a list, which words occur is not read from the clients.
    said = refusal(lambda: jp.data.open(f"{path}?label=y&features=x"), "'y' classes=A,B,...")
    assert "spam" not in said
    for wrong in ("ham,ham", "ham,"):
        source = f"{path}?label=y&features=x&classes={wrong}"
        refusal(lambda s=source: jp.data.open(s), "classes must be different")


def test_a_label_that_is_missing(tmp_path):
    path = write(tmp_path, "csv", ["spam", "", "ham"])
    source = f"{path}?label=y&features=x&classes=ham,spam"
    refusal(lambda: jp.data.open(source), "row 3: 'y'")
    assert jp.data.open(f"{source}&missing=drop").client_ids.to_pylist() == ["a", "c"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_init_reads_the_words_and_says_that_they_are_public(tmp_path, form, capsys, monkeypatch):
    words = ["not spam", "spam, or so", "50% + more"] * 10
    path = tmp_path / f"my table.{form}"
    rows = pa.Table.from_pylist(
        [{"who": str(k), "y": word, "x": k / 2} for k, word in enumerate(words)]
    )
    if form == "parquet":
        parquet.write_table(rows, path)
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows.to_pylist())))
    else:
        rows.to_pandas().to_csv(path, index=False)
    monkeypatch.chdir(tmp_path)
    main(["init", path.name, "--client", "who", "--label", "y", "--features", "x"])
    # A shell reads the command that is printed.
    assert "jaxpfl run 'my table.yaml'" in capsys.readouterr().out
    text = (tmp_path / "my table.yaml").read_text()
    config = yaml.safe_load(text)
    assert config["model"]["classes"] == 3 and "PUBLIC" in text
    found = jp.data.open(config["data"]["source"])
    place = sorted(set(words))
    assert found.columns["label"].tolist() == [place.index(word) for word in words]


def test_init_takes_no_texts_for_labels(tmp_path):
    lines = [f"{k},canary {k},{k}" for k in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["client,y,x", *lines]))
    said = refusal(lambda: init(f"{tmp_path}/t.csv", label="y", features="x"), "'y' classes")
    assert "canary" not in said
