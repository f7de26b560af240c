"""Figures of README and docs follow from stored rows, and the tool that says so can refuse."""

import json
from pathlib import Path

import pytest

from tools import figures, site_pages

ROWS = [
    {"what": "ours", "date": "2026-01-01", "rate": 13_812.0, "share": 0.0449, "own.key": {"a": 2}},
    {"what": "theirs", "date": "2026-01-01", "rate": 3_000.0, "share": 0.5, "list": [1.0, 3.0]},
    {"what": "theirs", "date": "2026-02-01", "rate": 3_500.0, "share": 0.7, "list": [2.0, 6.0]},
]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the tool finds wrong with a page of one paragraph and its comment."""
    (tmp_path / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures._rows.cache_clear()

    def faults(text: str, *rows: str) -> list[str]:
        comment = "\n".join(("<!-- rows", *rows, "-->")) if rows else ""
        page = tmp_path / "page.md"
        page.write_text(f"# Title\n\n{text}\n\n{comment}\n\nThe next paragraph.\n")
        return list(figures.faults(page))

    yield faults
    figures._rows.cache_clear()


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_every_measured_figure_of_a_page_follows_from_its_row(page: Path):
    assert not list(figures.faults(page))


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("It is 13,812 clients/s fast.", "13,812: speed what=ours rate"),
        ("It is 13,800 clients/s fast.", "13,800: speed what=ours rate"),
        ("It is 14 thousand, 4.5 % of it.", "4.5 %: speed what=ours share * 100"),
        ("3,000 to 3,500 a second.", "3,000 to 3,500: speed what=the* rate min max"),
        ("It takes 4.6 times as long.", "4.6: speed what=ours rate / speed what=theirs rate min"),
        ("60 ± 10 % of all.", "60 ± 10: speed what=theirs share mean se * 100"),
        (
            "It rose by 10 ± 40 %.",
            "10 ± 40: speed what=t* share each + 1 - speed what=t* list.0 each = mean se * 100",
        ),
        ("0.2 MB.", "0.2 MB: speed own.key.a=2 own.key.a / 10"),
        ("2.5 s", "2.5 s: speed date=2026-02-01 list.0 + 0.5"),
        ("Theirs 3.0 s, ours 3.0 s", "ours 3.0 s: speed what=theirs list mean"),
        ("Privacy has epsilon 8 for 500 clients of Python 3.11.", "500: setting"),
    ],
)
def test_a_figure_that_the_rows_say_is_accepted(said, text, row):
    rows = (row, "Theirs 3.0: setting") if "Theirs" in text else (row,)
    assert not said(text, *rows)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("It is 13,813 clients/s fast.", "13,813: speed what=ours rate"),
        ("It is 13,900 clients/s fast.", "13,900: speed what=ours rate"),
        ("4.4 % of it.", "4.4 %: speed what=ours share * 100"),
        ("It takes 4.7 times as long.", "4.7: speed what=ours rate / speed what=theirs rate min"),
        ("3,000 to 3,600 a second.", "3,000 to 3,600: speed what=theirs rate min max"),
        # Without a row, a field, a file, a number; of several rows; not to be found in the text.
        ("4.5 % of it.", "4.5 %: speed what=nobody share * 100"),
        ("4.5 % of it.", "4.5 %: speed what=ours sharing"),
        ("4.5 % of it.", "4.5 %: speeds what=ours share * 100"),
        ("4.5 % of it.", "of it: speed what=ours share * 100"),
        ("3,000 a second.", "3,000: speed what=theirs rate"),
        ("4.5 % of it.", "14.5 %: speed what=ours share * 100"),
        ("3.5 s and 3.5 s", "3.5 s: speed what=theirs list.1 mean"),
        ("4.5 % of it.", "4.5 %: speed what=ours share times 100"),
        ("4.5 % of it.", "4.5 %"),
        ("4.5 % of it.", "4.5 %: believed"),
    ],
)
def test_a_false_figure_and_a_row_that_does_not_exist_are_refused(said, text, row):
    assert said(text, row)


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3 s.", "12 to 14 % fewer.", "Twice: 6 ± 1.", "A perplexity of 245.", "1.1 times",
        "It runs 20 rounds a second.", "| what | took |\n|---|---|\n| a | 1.25 |",
        "| what | MB |\n|---|---|\n| a | 12 |",
    ],
)  # fmt: skip
def test_a_figure_without_a_row_is_refused(said, text):
    assert said(text)
    assert len(said(f"{text}\n\nThe next: 17 s.", "17 s: setting")) == len(said(text))


def test_code_settings_of_privacy_and_written_tables_need_no_row(said):
    written = "<!-- peers: written by make peers -->\n12 s\n\n13 s\n<!-- /peers -->"
    code = "Set `--limit 3 s` as in Table 2.1, Section 3 s.\n```sh\nsleep 3 s\n```"
    table = "| epsilon | n |\n|---|---|\n| 0.25 | 12 |"
    assert not said("\n\n".join((written, code, table)))


def test_one_line_proves_a_row_of_a_table(said):
    table = "| who | rate | share, % |\n|---|---|---|\n| theirs | 3,250 | {} |"
    row = "| theirs | ...: speed what=theirs rate mean ; share mean * 100"
    assert not said(table.format("60"), row)
    assert said(table.format("61"), row)


def test_readers_of_the_site_see_no_rows_and_each_line_of_a_page_is_named():
    page = "Before.\n\n<!-- rows\n3 s: speed s\n-->\n\nAfter."
    assert "speed" not in site_pages.readable(page) and "After." in site_pages.readable(page)


def test_a_fault_names_the_line(said):
    (found,) = said("One line.\nIt takes 3 s.")
    assert "page.md:4:" in found
