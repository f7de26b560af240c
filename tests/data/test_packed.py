"""Packed tables, and folders where one table lies twice: read once, whole, or refused."""

import bz2
import gzip
import lzma
import zipfile

import pytest

import jaxpfl as jp
from jaxpfl.errors import CorruptFile
from tests.refusals import refusal

ROWS = "client,text\nann,a b\nbob,c d\nann,e f\n"
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def packed(path, ending, content=ROWS):
    path = path.with_name(path.name + ending)
    if ending == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inner.csv", content)
            archive.writestr("__MACOSX/._inner.csv", "what macOS adds")
    else:
        path.write_bytes(PACKERS[ending](content.encode()))
    return path


@pytest.mark.parametrize("ending", [*PACKERS, ".zip"])
def test_a_packed_table_is_the_table_and_damage_is_named(tmp_path, ending):
    plain = tmp_path / "t.csv"
    plain.write_text(ROWS)
    path = packed(plain, ending)
    assert jp.data.open(path).content == jp.data.open(plain).content
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:40] + bytes([whole[40] ^ 255]) + whole[41:]):
        path.write_bytes(damaged)
        refusal(lambda: jp.data.open(path), str(path), CorruptFile)


@pytest.mark.parametrize("ending", PACKERS)
def test_all_streams_of_a_file_are_read_or_none(tmp_path, ending):
    first, second = (
        packed(tmp_path / n, ending, n + ROWS[11:]) for n in ("client,text", "cid,a b")
    )
    whole = first.read_bytes() + second.read_bytes()
    path = tmp_path / f"t.csv{ending}"
    path.write_bytes(whole)
    assert jp.data.open(path).num_examples == 7
    at = len(first.read_bytes()) + 30
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    refusal(lambda: jp.data.open(path), str(path), CorruptFile)


def test_a_row_is_never_the_header_of_a_message(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("#user_name,body\nalice@example.com,my diagnosis\n")
    said = refusal(lambda: jp.data.open(f"{path}?client=user&text=message"), "user_name")
    assert "alice" not in said and "diagnosis" not in said
    path.write_text("# made by a tool\n# on a day\n" + ROWS)
    assert jp.data.open(path).num_examples == 3


def test_an_archive_of_several_tables_is_refused(tmp_path):
    path = packed(tmp_path / "t.csv", ".zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other.csv", ROWS)
    refusal(lambda: jp.data.open(path), f"{path} one 2")


@pytest.mark.parametrize("other", ["a.csv.gz", "a.jsonl", "a.parquet"])
def test_a_table_in_two_formats_is_refused_and_one_of_them_is_read(tmp_path, other):
    (tmp_path / "a.csv").write_text(ROWS)
    (tmp_path / other).write_bytes(gzip.compress(ROWS.encode()))
    refusal(lambda: jp.data.open(f"{tmp_path}?client=client"), f"a.csv {other}")
    found = jp.data.open(f"{tmp_path}/*.csv?client=client")
    assert found.num_examples == 3
    (tmp_path / other).rename(tmp_path / "note.md")
    refusal(lambda: jp.data.open(f"{tmp_path}/*?client=client"), f"{tmp_path}/*")


def test_equal_files_are_said_and_what_a_tool_left_is_not_read(tmp_path):
    (tmp_path / "a.csv").write_text(ROWS)
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary/a.csv").write_text(ROWS)
    source = f"{tmp_path}?client=client"
    assert jp.data.open(source).num_examples == 3
    (tmp_path / "a (1).csv").write_text(ROWS)
    with pytest.warns(UserWarning, match="equal"):
        assert jp.data.open(source).num_examples == 6
    lake = tmp_path / "lake/table"
    (lake / "_delta_log").mkdir(parents=True)
    (lake / "b.csv").write_text(ROWS)
    for path in (lake, f"{lake}/*.csv", lake.parent):
        refusal(lambda path=path: jp.data.open(f"{path}?client=client"), f"{lake} Delta")
