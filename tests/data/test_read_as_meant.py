"""What a file says in another way than usual: read as its author meant it, or refused."""

import json

import numpy as np
import pandas as pd
import pytest

import jaxpfl as jp
from tests.refusals import refusal

ROWS = "client,text\nann,a b\nbob,c d\n"


@pytest.mark.parametrize("above", ["# made by a tool\n", '# it\'s "so"\n\n#\n', "# a, b; c\n"])
def test_lines_of_comment_above_a_header_are_skipped(tmp_path, above):
    path = tmp_path / "t.csv"
    path.write_text(ROWS)
    plain = jp.data.open(path)
    path.write_text(above + ROWS + "# x,y z\n")
    found = jp.data.open(path)
    assert found.client_ids.to_pylist() == [*plain.client_ids.to_pylist(), "# x"]
    path.write_text("#" + ROWS)
    refusal(lambda: jp.data.open(path), "'client' '#client'")


@pytest.mark.parametrize("meta", [None, "absent", "text"])
def test_a_field_in_a_field_that_is_null_is_missing(tmp_path, meta):
    path = tmp_path / "t.jsonl"
    first, last = {"client": "a", "meta": {"text": "hi"}}, {"client": "b", "meta": meta}
    if meta == "absent":
        del last["meta"]
    path.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    said = "no value missing=drop" if meta is None else "there is no field"
    refusal(lambda: jp.data.open(f"{path}?text=meta.text"), f"row 2 'meta.text' {said}")
    kept = jp.data.open(f"{path}?text=meta.text&missing=drop")
    assert kept.client_ids.to_pylist() == ["a"]


MOMENTS = ["2024-01-31 10:20:30.5", "2024-01-31", "1969-12-31 23:59:59", "2024-02-29 01:00:00"]


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata", "America/New_York"])
def test_a_moment_is_the_same_id_in_every_format(tmp_path, zone):
    """As pandas writes them; one who has rows in two files is one client."""
    moments = pd.to_datetime(MOMENTS, format="ISO8601")
    moments = moments if zone is None else moments.tz_localize(zone)
    frame = pd.DataFrame({"client": moments, "text": list("abcd")})
    frame.to_parquet(tmp_path / "p.parquet")
    frame.to_csv(tmp_path / "c.csv", index=False)
    lines = {"orient": "records", "lines": True, "date_format": "iso"}
    frame.to_json(tmp_path / "j.jsonl", **lines)
    expected = [
        f"{moment:%Y-%m-%d %H:%M:%S}" + (".5" if moment.microsecond else "") + ("Z" if zone else "")
        for moment in (moments if zone is None else moments.tz_convert("UTC"))
    ]
    expected = [text.removesuffix(" 00:00:00") for text in expected]
    for name in ("p.parquet", "c.csv", "j.jsonl"):
        assert jp.data.open(tmp_path / name).client_ids.to_pylist() == expected, name
    together = jp.data.open(f"{tmp_path}?client=client")
    assert np.diff(together.offsets).tolist() == [3] * 4


@pytest.mark.parametrize("text", ["2024-13-01 10:00", "2024-01-31 25:00", "12:30", "v2024-01-31 1"])
def test_what_is_no_moment_is_an_id_as_it_stands(text):
    found = jp.data.from_dataframe({"client": [text], "text": ["a"]})
    assert found.client_ids.to_pylist() == [text]


def test_values_that_are_masked_or_have_no_text_are_refused():
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    refusal(lambda: jp.data.from_clients({"a": {"x": masked}}), "client 0 'x' masked")
    polars = pytest.importorskip("polars")
    ids = polars.Series([object(), object()], dtype=polars.Object)
    frame = polars.DataFrame({"client": ids, "text": ["a", "b"]})
    refusal(lambda: jp.data.from_dataframe(frame), "'client' objects")


def test_a_tiff_of_several_pages_is_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pages = [image.fromarray(np.full((4, 4), level, np.uint8)) for level in (1, 2, 3)]
    (tmp_path / "ann").mkdir()
    path = tmp_path / "ann/a.tif"
    pages[0].save(path)
    assert jp.data.open(str(tmp_path)).num_examples == 1
    pages[0].save(path, save_all=True, append_images=pages[1:])
    refusal(lambda: jp.data.open(str(tmp_path)), "image 1 one page 3")


def test_a_number_that_excel_has_rounded_is_no_id(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    for number, fits in ((123456789012345, True), (1234567890123456789, False)):
        book = openpyxl.Workbook()
        for row in (["client", "text"], [number, "a"], ["b", "c"]):
            book.active.append(row)
        book.save(tmp_path / "t.xlsx")
        if fits:
            ids = jp.data.open(tmp_path / "t.xlsx").client_ids.to_pylist()
            assert ids == [str(number), "b"]
        else:
            refusal(lambda: jp.data.open(tmp_path / "t.xlsx"), "row 2 'client'")


@pytest.mark.parametrize("path", ["s3://bucket/l.jsonl", "file:///tmp/l.jsonl", "gs://b/l"])
def test_an_address_is_no_ledger(path, tmp_path, monkeypatch):
    """It would be another file in each working folder."""
    monkeypatch.chdir(tmp_path)
    clients = jp.data.from_clients({"a": {"x": np.ones(1)}})
    plan = jp.Plan.without_privacy(rounds=1, participation=jp.Poisson(1, 1))
    refusal(lambda: jp.release(lambda *_: np.float32(1), clients, plan, ledger=path), path)
    assert not list(tmp_path.iterdir())
