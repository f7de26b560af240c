"""Clients' ids of any type: the same id is the same text; what looks like another's is said."""

import datetime
import decimal
import json
import uuid
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import jaxpfl as jp
from tests.refusals import refusal

DAYS = [datetime.date(2020, 1, 31), datetime.date(1969, 7, 20)]
NOONS = [datetime.datetime(2020, 1, 31, 12, 30), datetime.datetime(2020, 1, 31, 12, 30, 0, 500_000)]
UUIDS = [uuid.UUID(int=7), uuid.UUID(int=2**127)]
WHOLE = [decimal.Decimal(12345678901234567890123), decimal.Decimal("-7")]
ISO = ["2020-01-31", "1969-07-20"]
IDS = {
    "uint64": (pa.array([2**64 - 1, 0], pa.uint64()), [str(2**64 - 1), "0"]),
    "decimal128": (pa.array(WHOLE, pa.decimal128(38, 0)), list(map(str, WHOLE))),
    "decimal of 2 digits": (
        pa.array([decimal.Decimal("7.00")] * 2, pa.decimal128(9, 2)),
        ["7"] * 2,
    ),
    "decimal256": (pa.array(WHOLE, pa.decimal256(60, 4)), list(map(str, WHOLE))),
    "binary": (pa.array([b"\xff\0", b"ann"]), ["ff00", "616e6e"]),
    "large_binary": (pa.array([b"\xff\0", b"ann"], pa.large_binary()), ["ff00", "616e6e"]),
    "fixed binary": (pa.array([b"\xff\0", b"an"], pa.binary(2)), ["ff00", "616e"]),
    "uuid": (pa.array([u.bytes for u in UUIDS], pa.uuid()), list(map(str, UUIDS))),
    "16 bytes": (pa.array([u.bytes for u in UUIDS], pa.binary(16)), list(map(str, UUIDS))),
    "bytes, 16 of them": (pa.array([u.bytes for u in UUIDS]), list(map(str, UUIDS))),
    "date32": (pa.array(DAYS), ISO),
    "date64": (pa.array(DAYS, pa.date64()), ISO),
    **{
        f"midnight, {unit}": (pa.array(DAYS).cast(pa.timestamp(unit)), ISO)
        for unit in ("s", "ms", "us", "ns")
    },
    **{
        f"noon, {unit}": (
            pa.array(NOONS, pa.timestamp(unit)),
            ["2020-01-31 12:30:00", "2020-01-31 12:30:00.5"],
        )
        for unit in ("ms", "us", "ns")
    },
    "zone": (
        pa.array(NOONS, pa.timestamp("us", "Asia/Tokyo")),
        ["2020-01-31 12:30:00Z", "2020-01-31 12:30:00.5Z"],
    ),
    "texts of ISO 8601": (
        pa.array(["2020-01-31T12:30:00+00", "2020-01-31 21:30:00.500 +0900"]),
        ["2020-01-31 12:30:00Z", "2020-01-31 12:30:00.5Z"],
    ),
    "dictionary of dates": (pa.array(DAYS).dictionary_encode(), ISO),
    "dictionary of bytes": (pa.array([b"\0", b"\1"]).dictionary_encode(), ["00", "01"]),
    "runs": (pa.RunEndEncodedArray.from_arrays([1, 2], ["a", "b"]), ["a", "b"]),
    "a part of runs": (pa.RunEndEncodedArray.from_arrays([3, 4], ["a", "b"])[2:], ["a", "b"]),
}
UNFIT = {
    "float": pa.array([1.0, 2.0]),
    "float16": pa.array(np.array([1, 2], np.float16)),
    "dictionary of floats": pa.array([1.0, 2.0]).dictionary_encode(),
    "runs of floats": pa.RunEndEncodedArray.from_arrays([1, 2], [1.0, 2.0]),
    "boolean": pa.array([True, False]),
    "time": pa.array([datetime.time(1), datetime.time(2)]),
    "duration": pa.array([1, 2], pa.duration("s")),
    "struct": pa.array([{"a": 1}, {"a": 2}]),
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("form", ["frame", "parquet", "grouped"])
def test_an_id_of_any_type_is_the_same_text(tmp_path, name, form):
    ids, expected = IDS[name]
    table = pa.table({"client": ids, "text": ["x", "y"]})
    if form == "frame":
        found = jp.data.from_dataframe(table)
    else:
        if "runs" in name:
            pytest.skip("Parquet has no runs")
        parquet.write_table(table, tmp_path / "t.parquet")
        rule = "client" if form == "parquet" else "client|value"
        found = jp.data.open(f"{tmp_path}/t.parquet?client={rule}")
    assert sorted(found.client_ids.to_pylist()) == sorted(set(expected))


@pytest.mark.parametrize("ids", UNFIT.values(), ids=UNFIT)
def test_types_that_name_nobody_are_refused(ids):
    table = pa.table({"client": ids, "text": ["x", "y"]})
    refusal(lambda: jp.data.from_dataframe(table), "row 1: 'client' must")


def test_a_fraction_and_a_date_beyond_the_calendar_are_refused():
    for ids in (
        pa.array([decimal.Decimal("1.00"), decimal.Decimal("1.50")]),
        pa.array([0, 2**50], pa.timestamp("s")),
    ):
        table = pa.table({"client": ids, "text": ["x", "y"]})
        refusal(lambda: jp.data.from_dataframe(table), "row 2: 'client' must")  # noqa: B023


@pytest.mark.parametrize(
    "ids",
    [[2**70, 1, 2**70], [1, "a", 1], UUIDS, WHOLE, DAYS, NOONS, [b"a", b"b"]],
    ids=["large", "mixed", "uuid", "decimal", "date", "time", "bytes"],
)
def test_objects_of_pandas_and_dictionaries_of_columns(ids):
    pd = pytest.importorskip("pandas")
    texts = ["x"] * len(ids)
    frame = pd.DataFrame({"client": pd.Series(ids, dtype=object), "text": texts})
    found = jp.data.from_dataframe(frame)
    assert len(found) == len(set(ids))
    other = jp.data.from_dataframe({"client": ids, "text": texts})
    assert other.client_ids.to_pylist() == found.client_ids.to_pylist()


def test_whole_numbers_of_polars_beyond_64_bits():
    pl = pytest.importorskip("polars")
    ids = pl.Series([2**100, 1], dtype=pl.Int128)
    found = jp.data.from_dataframe(pl.DataFrame({"client": ids, "text": ["x", "y"]}))
    assert found.client_ids.to_pylist() == [str(2**100), "1"]


BLANK = ["", " ", "\t", "\u00a0", "\u3000", "\u200b", "\ufeff", " \u2060 "]
AS_FLOATS = ["1.0", "1,0", "12,000", "1e+16", "nan", "NaT", "<NA>"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "json", "frame", "dict", "clients", "npz"])
@pytest.mark.parametrize("wrong", [*BLANK, *AS_FLOATS], ids=ascii)
def test_blank_ids_and_those_of_missing_values_are_refused(tmp_path, form, wrong):
    ids = ["ann", wrong]
    columns = {"client": ids, "text": ["x", "y"]}
    path = tmp_path / f"t.{form}"
    rows = [{"client": id_, "text": "x"} for id_ in ids]
    match form:
        case "csv":
            path.write_text("client;text\n" + "".join(f'"{id_}";x\n' for id_ in ids))
        case "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case "json":
            path.write_text(json.dumps(rows, indent=1))
        case "npz":
            np.savez(path, client=np.array(ids), images=np.zeros((2, 2, 2)), labels=[0, 1])

    def opened():
        match form:
            case "frame":
                return jp.data.from_dataframe(pa.table(columns))
            case "dict":
                return jp.data.from_dataframe(columns)
            case "clients":
                return jp.data.from_clients({id_: {"text": ["x"]} for id_ in ids})
        return jp.data.open(path)

    refusal(opened, "client found")


ALIKE = [
    ("ann", "Ann"),
    ("ann", "ann "),
    ("ann", "\tann"),
    ("ann", "ann\u00a0"),
    ("ann", "\ufeffann"),
    ("straße", "STRASSE"),
    ("é", "e\u0301"),
    ("ﬁn", "fin"),
    ("Ａnn", "Ann"),
]


@pytest.mark.parametrize(("first", "second"), ALIKE, ids=ascii)
@pytest.mark.parametrize("form", ["frame", "grouped", "clients", "npz"])
def test_a_caution_where_ids_differ_in_form_alone(tmp_path, form, first, second):
    """Without an id, and without how many there are."""

    def opened(ids):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if form == "clients":
                jp.data.from_clients({id_: {"x": [1]} for id_ in ids})
            elif form == "npz":
                arrays = {"images": np.zeros((3, 2, 2)), "labels": [0, 1, 0]}
                np.savez(tmp_path / "t.npz", client=np.array(ids), **arrays)
                jp.data.open(tmp_path / "t.npz")
            else:
                table = pa.table({"client": ids, "text": ["x"] * len(ids)})
                parquet.write_table(table, tmp_path / "t.parquet")
                rule = "client" if form == "frame" else "client|value"
                jp.data.open(f"{tmp_path}/t.parquet?client={rule}")
        return [str(warning.message) for warning in caught if warning.category is UserWarning]

    (said,) = opened([first, "canary", second])
    said = said.replace(str(tmp_path), "")
    assert "differ only by case" in said
    assert "canary" not in said and not any(character.isdigit() for character in said)
    assert opened([first, "canary", "an"]) == []


def test_names_of_columns_may_be_whole_numbers():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({0: ["a", "b"], 1: ["x", "y"], 2: [0, 1], 3: [0.5, 1.5]})
    assert jp.data.from_dataframe(frame, client=0, text=1).client_ids.to_pylist() == ["a", "b"]
    found = jp.data.from_dataframe(frame, client=0, label=2, features=[3])
    assert found.columns["features"].tolist() == [[0.5], [1.5]]
    found = jp.data.from_dataframe(frame, client="0", text=["1", 1][:1], columns=[2])
    assert found.columns["2"].tolist() == [0, 1]
